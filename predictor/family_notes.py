"""What behaviour does not show about a MoE family: one small entry each, plain data, no imports of ours.

Routers and experts are found by what they do (`ecospec.trace_collection.discovery`), so a family needs an entry
only if it must be refused, or if its way of scoring is fixed in code rather than in its configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyNote:
    """One family.

    Attributes:
        model_types: The ``model_type`` values of its text configurations.
        refused: Why it does not fit one (L, E, K) with one router per layer; empty for a supported family.
        refused_if: Whether the refusal applies to a text configuration; by default to every one.
        scoring: How scores are made from router logits; part of the target's fingerprint.
    """

    model_types: tuple[str, ...]
    refused: str = ""
    refused_if: Callable[[Any], bool] = lambda _config: True
    scoring: str | None = None


NOTES = (
    FamilyNote(("deepseek_v3", "glm4_moe"), scoring="sigmoid"),
    FamilyNote(("gpt_oss",), scoring="softmax_after_top_k"),
    FamilyNote(("mixtral", "qwen2_moe", "qwen3_moe"), scoring="softmax"),
    FamilyNote(
        ("deepseek_v4",),
        refused="some of its layers are routed by a hash of the token, a table that no router weight describes",
        refused_if=lambda config: "hash_moe" in (getattr(config, "mlp_layer_types", None) or ["hash_moe"]),
    ),
    FamilyNote(
        ("doge",),
        refused="its experts are rows of an embedding picked by product keys (no router of E rows), and its router "
        "mixes the tokens of one forward",
    ),
    FamilyNote(
        ("inkling2_loop", "inkling2_loop_text"),
        refused="its layers run several times per token",
        refused_if=lambda config: getattr(config, "loop_num_passes", 2) > 1,
    ),
    FamilyNote(("jetmoe",), refused="its attention has experts of its own, so a layer has two routers"),
    FamilyNote(
        ("longcat_flash",),
        refused="it routes to zero experts, so the number of routed experts per token varies",
        refused_if=lambda config: getattr(config, "zero_expert_num", 1) not in (None, 0),
    ),
    FamilyNote(
        ("zaya",),
        refused="its router may pick a skip expert, so the number of routed experts per token varies",
    ),
)

_BY_TYPE = {name: note for note in NOTES for name in note.model_types}


def note_of(model_type: str) -> FamilyNote:
    """Return the entry of a family, an empty one where it needs none."""
    return _BY_TYPE.get(model_type, FamilyNote((model_type,)))


def text_config(config: Any) -> Any:
    """Return the text decoder's configuration of a possibly composite one (the thinker's of an omni model)."""
    config = getattr(config, "thinker_config", None) or config
    inner = getattr(config, "text_config", None)
    return config if inner is None else inner


def refusal(config: Any) -> str:
    """Why a target of this configuration is refused, naming its family; empty where it is not."""
    text = text_config(config)
    family = getattr(text, "model_type", "") or getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        return f"family {family!r} is encoder-decoder; only decoder-only targets are supported"
    note = note_of(family)
    if note.refused and note.refused_if(text):
        return f"family {family!r} is not supported: {note.refused}"
    return ""
