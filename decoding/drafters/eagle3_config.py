"""The configuration of an EAGLE-3 draft head, read from and written to the ``config.json`` of a head's folder.

The file is third-party (SpecForge writes it, serving engines read it), so unknown entries are kept out of the way
rather than refused; entries that would change the computation and that this head does not implement are refused by
name::

    {
      "architectures": ["LlamaForCausalLMEagle3"],
      "model_type": "llama",
      "hidden_size": 128, "target_hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-06,
      "hidden_act": "silu", "attention_bias": false, "max_position_embeddings": 2048,
      "rope_theta": 10000.0, "rope_scaling": null, "tie_word_embeddings": false,
      "vocab_size": 2048, "draft_vocab_size": 1024, "torch_dtype": "bfloat16",
      "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": true},
      "ecospec": {"tokenizer_fingerprint": "...", "target_fingerprint": "..."}   # optional, ours
    }

``eagle_aux_hidden_state_layer_ids`` are layer **outputs** here, as in SpecForge: id 1 is what decoder layer 1
returns, that is ``hidden_states[2]`` of a transformers model. Files of EAGLE itself count layer inputs (one more).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"

#: Rotary scalings whose frequencies do not depend on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_FIXED = {"hidden_act": "silu", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 head.

    Attributes:
        hidden_size: Width of the head, H; equal to the width of the embedding it reads.
        target_hidden_size: Width of the target's hidden states.
        intermediate_size: Width of the feed-forward block.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, a divisor of the query heads.
        head_dim: Width of one head, even.
        vocab_size: Rows of the target's embedding, V.
        draft_vocab_size: Tokens the head can propose, at most V.
        aux_layers: Decoder layers of the target whose outputs are read, ascending; index 0 is the first layer.
        rms_norm_eps: Of every norm.
        max_position_embeddings: Longest sequence the head was made for; informational.
        rope_theta: Base of the rotary embedding.
        rope_scaling: Rotary scaling as in transformers, or None.
        identity: Optional ``tokenizer_fingerprint`` and ``target_fingerprint`` of the target the head was made for.

    Raises:
        ValueError: A field is out of range; the message names the field.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate every field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
            if field.type == "float" and (not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"{field.name} must be a positive number, got {value!r}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        layers = self.aux_layers
        if not layers or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in layers):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids must list layers >= 0, got {list(layers)!r}")
        if list(layers) != sorted(set(layers)):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids must be ascending and distinct, got {list(layers)!r}"
            )
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_scaling type {self.rope_type!r} is not supported; allowed: {', '.join(ROPE_TYPES)} "
                "(frequencies that depend on the length would make the tree depend on more than the prefix)"
            )

    @property
    def rope_type(self) -> str:
        """Kind of rotary scaling, ``"default"`` where there is none."""
        scaling = self.rope_scaling or {}
        return str(scaling.get("rope_type", scaling.get("type", "default")))

    @property
    def aux_size(self) -> int:
        """Width of the concatenated auxiliary hidden states."""
        return self.target_hidden_size * len(self.aux_layers)

    def require_target(
        self, target_config: Any, *, identity: Mapping[str, str] | None = None, source: str = "drafter"
    ) -> None:
        """Refuse a target this head was not made for.

        Args:
            target_config: The target's transformers configuration (``vocab_size``, ``hidden_size``,
                ``num_hidden_layers``).
            identity: ``tokenizer_fingerprint`` and ``target_fingerprint`` of the target, where known.
            source: What the head was read from, for the message.

        Raises:
            ValueError: Vocabulary, hidden size, number of layers or a fingerprint differ.
        """
        pairs = (
            ("vocabulary", self.vocab_size, "vocab_size"),
            ("hidden size", self.target_hidden_size, "hidden_size"),
        )
        for what, ours, name in pairs:
            theirs = getattr(target_config, name)
            if ours != theirs:
                raise ValueError(
                    f"{source} was made for a target of {what} {ours}, this target has {theirs}; "
                    "use the drafter that belongs to the target"
                )
        if self.aux_layers[-1] >= target_config.num_hidden_layers:
            raise ValueError(
                f"{source} reads the output of layer {self.aux_layers[-1]}, this target has layers 0 to "
                f"{target_config.num_hidden_layers - 1}; use the drafter that belongs to the target"
            )
        for name, value in self.identity.items():
            if identity is not None and name in identity and identity[name] != value:
                raise ValueError(
                    f"{source} was made for another target: {name} is {value} there, {identity[name]} here; "
                    "use the drafter that belongs to the target"
                )

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """Return the JSON form drawn at the top of this file.

        Args:
            dtype: Storage type of the weights, for the entry ``torch_dtype``.
        """
        data = dataclasses.asdict(self)
        layers, identity = data.pop("aux_layers"), data.pop("identity")
        result = {"architectures": [ARCHITECTURE], "model_type": "llama", **_FIXED, **data}
        result |= {"tie_word_embeddings": False, "torch_dtype": dtype}
        result["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
        if identity:
            result["ecospec"] = dict(identity)
        return result

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Eagle3Config:
        """Read the JSON form.

        Args:
            data: The JSON object.
            source: File named in error messages.

        Raises:
            ValueError: An entry is missing, out of range, or asks for something this head does not implement.
        """
        for name, value in _FIXED.items():
            if data.get(name, value) != value:
                raise ValueError(f"{source}: {name} {data[name]!r} is not supported; allowed: {value!r}")
        aux = data.get("eagle_config") or {}
        if not isinstance(aux, Mapping) or "eagle_aux_hidden_state_layer_ids" not in aux:
            raise ValueError(
                f"{source}: eagle_config.eagle_aux_hidden_state_layer_ids is missing; "
                "add the target layers whose outputs the head was trained on"
            )
        values: dict[str, Any] = {}
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            if name not in data:
                raise ValueError(f"{source}: {name} is missing")
            values[name] = _positive_integer(data[name], name, source)
        heads = values["num_attention_heads"]
        rope = data.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"{source}: rope_parameters must be an object, got {rope!r}")
        optional = {
            "target_hidden_size": values["hidden_size"],
            "draft_vocab_size": values["vocab_size"],
            "num_key_value_heads": heads,
            "head_dim": max(1, values["hidden_size"] // heads),
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_theta": rope.get("rope_theta", 10000.0),
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} or None,
        }
        values |= {name: default if data.get(name) is None else data[name] for name, default in optional.items()}
        layers = aux["eagle_aux_hidden_state_layer_ids"]
        if not isinstance(layers, list):
            raise ValueError(f"{source}: eagle_aux_hidden_state_layer_ids must be a list of layers, got {layers!r}")
        try:
            return cls(**values, aux_layers=tuple(layers), identity=dict(data.get("ecospec") or {}))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error


def _positive_integer(value: object, name: str, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {name} must be a positive integer, got {value!r}")
    return value
