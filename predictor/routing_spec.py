"""RoutingSpec: what a target's routing looks like, and whether two artefacts speak of the same target.

The one contract every other artefact carries (trace stores, draft-tree traces, predictor bundles). On disk it is
a JSON object, alone or as a value inside a larger one::

    {
      "format_version": 1,
      "num_layers": 6,                     # L, MoE layers only
      "layer_indices": [0, 1, 2, 3, 4, 5], # their decoder layer numbers; dense layers are absent
      "num_experts": 64,                   # E, routed experts only
      "top_k": 4,                          # K
      "vocab_size": 2048,
      "tokenizer_fingerprint": "<64 hex>",
      "target_id": "checkpoints/target",   # informational, never compared
      "target_fingerprint": "<64 hex>"
    }
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

FORMAT_VERSION = 1
#: Ids of experts are at most uint16.
MAX_EXPERTS = 2**16

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Shape and identity of a target's routing.

    Attributes:
        num_layers: Number of MoE layers, L.
        layer_indices: Decoder layer number of each MoE layer, ascending, length L.
        num_experts: Routed experts per layer, E; shared and zero experts are not counted.
        top_k: Experts each token is routed to per layer, K.
        vocab_size: Rows of the target's embedding.
        tokenizer_fingerprint: SHA-256 hex of the sorted (token, id) pairs.
        target_id: Where the target came from; informational, never compared.
        target_fingerprint: SHA-256 hex of the routing-relevant config and router tensors.
        format_version: Version of this contract.

    Raises:
        ValueError: A field is out of range; the message names the field.
    """

    num_layers: int
    layer_indices: tuple[int, ...]
    num_experts: int
    top_k: int
    vocab_size: int
    tokenizer_fingerprint: str
    target_id: str
    target_fingerprint: str
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Validate every field."""
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"RoutingSpec.format_version is {self.format_version}, this version reads {FORMAT_VERSION}; "
                "use the EcoSpec release that wrote it"
            )
        for name in ("num_layers", "num_experts", "top_k", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"RoutingSpec.{name} must be a positive integer, got {value!r}")
        indices = self.layer_indices
        if not isinstance(indices, tuple) or any(not isinstance(i, int) or isinstance(i, bool) for i in indices):
            raise ValueError(f"RoutingSpec.layer_indices must be a tuple of integers, got {indices!r}")
        if len(indices) != self.num_layers:
            raise ValueError(
                f"RoutingSpec.layer_indices has {len(indices)} entries, num_layers is {self.num_layers}; "
                "list the decoder layer number of every MoE layer"
            )
        if indices[0] < 0 or any(a >= b for a, b in itertools.pairwise(indices)):
            raise ValueError(f"RoutingSpec.layer_indices must be non-negative and ascending, got {indices!r}")
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(
                f"RoutingSpec.num_experts must be at most {MAX_EXPERTS}, because ids are stored in 16 bits, got "
                f"{self.num_experts}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"RoutingSpec.top_k {self.top_k} exceeds num_experts {self.num_experts}")
        for name in ("tokenizer_fingerprint", "target_fingerprint"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
                raise ValueError(f"RoutingSpec.{name} must be 64 lower-case hex digits, got {value!r}")
        if not isinstance(self.target_id, str):
            raise ValueError(f"RoutingSpec.target_id must be a string, got {self.target_id!r}")

    @property
    def expert_dtype(self) -> str:
        """Smallest storage type of an expert id: ``"uint8"`` up to 256 experts, else ``"uint16"``."""
        return "uint8" if self.num_experts <= 256 else "uint16"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form drawn at the top of this file."""
        return dataclasses.asdict(self) | {"layer_indices": list(self.layer_indices)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "RoutingSpec") -> RoutingSpec:
        """Read the JSON form.

        Args:
            data: The JSON object.
            source: File (or other origin) named in error messages.

        Raises:
            ValueError: A field is unknown, missing or out of range.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{source}: a RoutingSpec must be a JSON object, got {type(data).__name__}")
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - names):
            raise ValueError(f"{source}: unknown RoutingSpec field {unknown[0]!r}; allowed: {sorted(names)}")
        if missing := sorted(names - set(data)):
            raise ValueError(f"{source}: RoutingSpec field {missing[0]!r} is missing")
        values = dict(data)
        if isinstance(values["layer_indices"], list):
            values["layer_indices"] = tuple(values["layer_indices"])
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def differences(self, other: RoutingSpec) -> list[str]:
        """Names of the fields that differ, every field but ``target_id`` compared."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name != "target_id" and getattr(self, field.name) != getattr(other, field.name)
        ]

    def require_same(self, other: RoutingSpec, *, mine: str, theirs: str) -> None:
        """Refuse a part that was made for another target.

        Args:
            other: The spec of the part to be used together with this one.
            mine: What this spec belongs to, for the message, e.g. ``"target checkpoints/target"``.
            theirs: What ``other`` belongs to, e.g. ``"predictor runs/predictor"``.

        Raises:
            ValueError: They differ; the message names the first differing field and both values.
        """
        if fields := self.differences(other):
            name = fields[0]
            raise ValueError(
                f"{theirs} was made for another target than {mine}: {', '.join(fields)} differ "
                f"({name}: {getattr(other, name)} there, {getattr(self, name)} here); "
                "use parts made from one target"
            )
