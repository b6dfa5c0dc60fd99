"""PredictorConfig: the contract in a predictor bundle's ``config.json``.

Its form::

    {
      "format_version": 2,
      "kind": "neural",               # neural, random, frequency, token_table, bigram_table, token_ranking,
                                      # bigram_ranking, last_token, mlp, drafter_attached
      "spec": {...},                  # RoutingSpec of the target it predicts
      "backbone": {...},              # transformers configuration with model_type; null unless neural
      "input_mode": "target_embedding",  # or backbone_embedding (neural only); null unless neural or mlp
      "embedding_size": 128,          # width of the target's embedding; null unless that is what it reads
      "head_rank": null,              # rank of a low-rank head; null for a full one and unless neural
      "embedding_stored": false,      # whether model.safetensors holds target_embedding.weight
      "calibration": {"temperature": [1.0, ...]},  # one per MoE layer; scores are divided by it
      "options": {...},               # of its kind, e.g. {"shrinkage": 1.0}; an mlp's sizes: window_tokens,
                                      # hidden_size, hidden_layers
      "training_data": {...},         # fingerprint of the traces it was fitted on
      "metrics": {...},               # e.g. held-out top-K overlap
      "provenance": {...}             # versions, command, seeds
    }

Version 1 had no ``head_rank`` (its heads were full); such bundles are read as what they are.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecospec.predictor.choices import require_choice
from ecospec.predictor.routing_spec import RoutingSpec

FORMAT_VERSION = 2
CONFIG_NAME = "config.json"
KINDS = (
    "neural",
    "random",
    "frequency",
    "token_table",
    "bigram_table",
    "token_ranking",
    "bigram_ranking",
    "last_token",
    "mlp",
    "drafter_attached",
)

#: Fields that only a predictor with a network on token embeddings has, by kind.
_NETWORK = {
    "neural": ("backbone", "input_mode", "embedding_size", "head_rank"),
    "mlp": ("input_mode", "embedding_size"),
}
#: Options that must be positive integers, by kind.
_SIZES = {"mlp": ("window_tokens", "hidden_size", "hidden_layers")}
_FREE_FORM = ("options", "training_data", "metrics", "provenance")


class InputMode(enum.StrEnum):
    """What the backbone of a neural predictor reads.

    ``TARGET_EMBEDDING``: the target's token embedding, projected; any vocabulary. ``BACKBONE_EMBEDDING``: the
    backbone's own token embedding, part of the predictor; only where target and backbone have one vocabulary.
    """

    TARGET_EMBEDDING = "target_embedding"
    BACKBONE_EMBEDDING = "backbone_embedding"


@dataclasses.dataclass(frozen=True)
class PredictorConfig:
    """What a predictor bundle holds; see the top of this file for its JSON form.

    Attributes:
        kind: Which predictor.
        spec: The target it predicts.
        backbone: transformers configuration of the backbone, with ``model_type``; neural only.
        input_mode: What the network reads; neural and mlp only.
        embedding_size: Width of the target's embedding, H; only where that is what the backbone reads.
        head_rank: Rank of a low-rank head; None for a full one.
        embedding_stored: Whether the bundle holds the target's embedding.
        temperature: Calibration: scores of MoE layer l are divided by ``temperature[l]``; empty means all ones.
        options: Settings of the kind.
        training_data: Fingerprint of the traces.
        metrics: Measured quality.
        provenance: Versions, command, seeds.
        format_version: Version of this contract.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    kind: str
    spec: RoutingSpec
    backbone: Mapping[str, Any] | None = None
    input_mode: str | None = None
    embedding_size: int | None = None
    head_rank: int | None = None
    embedding_stored: bool = False
    temperature: tuple[float, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training_data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Validate every field."""
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"PredictorConfig.format_version is {self.format_version}, this version reads {FORMAT_VERSION}; "
                "use the EcoSpec release that wrote it"
            )
        if self.kind not in KINDS:
            raise ValueError(f"PredictorConfig.kind is {self.kind!r}; allowed: {list(KINDS)}")
        if not isinstance(self.spec, RoutingSpec):
            raise ValueError(f"PredictorConfig.spec must be a RoutingSpec, got {type(self.spec).__name__}")
        self._check_network()
        self._check_temperature()
        for name in _FREE_FORM:
            _require_json(f"PredictorConfig.{name}", getattr(self, name))
        for name in _SIZES.get(self.kind, ()):
            _require_positive(f"options.{name}", self.options.get(name))

    def _check_network(self) -> None:
        """Fields that only a predictor with a network on token embeddings has."""
        if not isinstance(self.embedding_stored, bool):
            raise ValueError(
                f"PredictorConfig.embedding_stored must be true or false, got {self.embedding_stored!r}"
            )
        for name in _NETWORK["neural"]:
            if name not in _NETWORK.get(self.kind, ()) and getattr(self, name) is not None:
                raise ValueError(f"PredictorConfig.{name} must be null for kind {self.kind!r}")
        if self.kind not in _NETWORK:
            if self.embedding_stored:
                raise ValueError(f"PredictorConfig.embedding_stored must be false for kind {self.kind!r}")
            return
        if self.kind == "neural":
            self._check_backbone()
        modes = [mode.value for mode in InputMode]
        require_choice("PredictorConfig.input_mode", self.input_mode, modes if self.kind == "neural" else modes[:1])
        if self.head_rank is not None:
            _require_positive("head_rank", self.head_rank)
        if self.input_mode == InputMode.TARGET_EMBEDDING:
            _require_positive("embedding_size", self.embedding_size)
        elif self.embedding_size is not None or self.embedding_stored:
            name = "embedding_stored" if self.embedding_size is None else "embedding_size"
            raise ValueError(f"PredictorConfig.{name} must not be set with input_mode {self.input_mode!r}")

    def _check_backbone(self) -> None:
        _require_json("PredictorConfig.backbone", self.backbone)
        assert self.backbone is not None
        if not isinstance(self.backbone.get("model_type"), str):
            raise ValueError("PredictorConfig.backbone needs a model_type, the transformers family, e.g. 'qwen3'")

    def _check_temperature(self) -> None:
        """One positive temperature per MoE layer; an empty tuple becomes ones."""
        if not isinstance(self.temperature, tuple):
            raise ValueError(f"PredictorConfig.temperature must be a tuple, got {type(self.temperature).__name__}")
        if not self.temperature:
            object.__setattr__(self, "temperature", (1.0,) * self.spec.num_layers)
        if len(self.temperature) != self.spec.num_layers:
            raise ValueError(
                f"PredictorConfig.temperature has {len(self.temperature)} entries; "
                f"the target has {self.spec.num_layers} MoE layers"
            )
        for value in self.temperature:
            if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"PredictorConfig.temperature must hold positive finite numbers, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form drawn at the top of this file."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["spec"] = self.spec.to_dict()
        values["calibration"] = {"temperature": list(values.pop("temperature"))}
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "PredictorConfig") -> PredictorConfig:
        """Read the JSON form.

        Args:
            data: The JSON object.
            source: File named in error messages.

        Raises:
            ValueError: A field is unknown, missing or out of range.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{source}: a predictor config must be a JSON object, got {type(data).__name__}")
        if data.get("format_version") == 1 and "head_rank" not in data:
            data = {**data, "head_rank": None, "format_version": FORMAT_VERSION}
        names = {field.name for field in dataclasses.fields(cls)} - {"temperature"} | {"calibration"}
        if unknown := sorted(set(data) - names):
            raise ValueError(f"{source}: unknown predictor config field {unknown[0]!r}; allowed: {sorted(names)}")
        if missing := sorted(names - set(data)):
            raise ValueError(f"{source}: predictor config field {missing[0]!r} is missing")
        values = dict(data)
        calibration = values.pop("calibration")
        if not isinstance(calibration, Mapping) or set(calibration) != {"temperature"}:
            raise ValueError(f"{source}: predictor config field 'calibration' must be {{'temperature': [...]}}")
        temperature = calibration["temperature"]
        if not isinstance(temperature, list) or not temperature:
            raise ValueError(
                f"{source}: predictor config field 'calibration.temperature' must be a list of numbers"
            )
        values["temperature"] = tuple(temperature)
        values["spec"] = RoutingSpec.from_dict(values["spec"], f"{source}: spec")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> PredictorConfig:
        """Read a bundle's config.

        Args:
            folder: The bundle.

        Raises:
            FileNotFoundError: No config there.
            ValueError: Not a valid predictor config.
        """
        path = folder / CONFIG_NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} is no predictor bundle: it has no {CONFIG_NAME}; give an exported folder"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error}); export the predictor again") from error
        return cls.from_dict(data, str(path))

    def to_json(self) -> str:
        """The text of ``config.json``."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"PredictorConfig.{name} must be a positive integer, got {value!r}")


def _require_json(name: str, value: Any) -> None:
    """Refuse what would not come back equal from JSON (tuples, numeric keys, NaN, objects)."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {type(value).__name__}")
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from error
    if not same:
        raise ValueError(f"{name} changes when written as JSON; use string keys and lists instead of tuples")
