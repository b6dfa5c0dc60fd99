"""What behaviour does not show about a MoE family: one small entry each, plain data, no imports of ours.

Routers and experts are found by what they do (`ecospec.trace_collection.discovery`), so a family needs an entry
only if it must be refused, or if its way of scoring is fixed in code rather than in its configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyNote:
    """One family.

    Attributes:
        model_types: The ``model_type`` values of its text configurations.
        refused: Why it does not fit one (L, E, K) with one router per layer; empty for a supported family.
        no_moe: Why its code mentions experts although its models have none; empty for MoE families.
        refused_if: Whether the refusal applies to a text configuration; None: to every one.
        scoring: How scores are made from router logits; part of the target's fingerprint.
        bias_is_correction: Whether its files call the router's correction bias ``bias``.
        decoder_only: Why checks call its decoder instead of the whole model; empty: they call the whole.
        tiny: Configuration values that a tiny model of it needs beside the general ones
            (`ecospec.trace_collection.tiny_targets`); nested for composite configurations.
    """

    model_types: tuple[str, ...]
    refused: str = ""
    no_moe: str = ""
    refused_if: Callable[[Any], bool] | None = None
    scoring: str | None = None
    bias_is_correction: bool = False
    decoder_only: str = ""
    tiny: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "swa_kv_lora_rank": 8,
    "swa_q_lora_rank": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

NOTES = (
    FamilyNote(("bamba",), no_moe="every layer has one dense MLP"),
    FamilyNote(
        ("cosmos3_omni",), no_moe="a comment in its code speaks of a diffusion expert; its text model is dense"
    ),
    FamilyNote(("dbrx",), tiny={"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}),
    FamilyNote(
        ("deepseek_ocr2",),
        tiny={
            "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            "vision_config": {"sam_config": {"downsample_channels": [16, 32], "output_channels": 8}},
        },
    ),
    FamilyNote(("deepseek_v3", "glm4_moe"), scoring="sigmoid"),
    FamilyNote(
        ("deepseek_v4",),
        refused="some of its layers are routed by a hash of the token, a table that no router weight describes",
        refused_if=lambda config: "hash_moe" in (getattr(config, "mlp_layer_types", None) or ["hash_moe"]),
    ),
    FamilyNote(
        ("diffusion_gemma", "diffusion_gemma_text"),
        refused="it denoises blocks of text with an encoder and a decoder instead of predicting the next token",
    ),
    FamilyNote(
        ("doge",),
        refused="its experts are rows of an embedding picked by product keys (no router of E rows), and its router "
        "mixes the tokens of one forward",
        refused_if=lambda config: getattr(config, "is_moe", True),
        tiny={"is_moe": True},
    ),
    FamilyNote(("dots1",), tiny={"n_shared_experts": 1}),
    FamilyNote(("dots3_note",), tiny={"text_config": _SLIDING, "audio_config": {"adapter_input_size": 32}}),
    FamilyNote(("dots3_note_text",), tiny=_SLIDING),
    FamilyNote(
        ("ernie4_5_vl_moe",),
        tiny={"text_config": {"head_dim": 8, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}}},
    ),
    FamilyNote(("evolla",), no_moe="a prompt in its documentation speaks of an expert; the model is dense"),
    FamilyNote(("gemma4",), tiny={"text_config": {"enable_moe_block": True}}),
    FamilyNote(("gemma4_text",), tiny={"enable_moe_block": True}),
    FamilyNote(("gemma4_assistant",), refused="it is a drafter for Gemma 4, not a target"),
    FamilyNote(
        ("glm4v_moe",),
        tiny={"text_config": {"head_dim": 16, "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}}},
    ),
    FamilyNote(("glm5_next",), tiny={"text_config": {"index_topk": 16, "qk_rope_head_dim": 0, "head_dim": 0}}),
    FamilyNote(("gpt_oss",), scoring="softmax_after_top_k"),
    FamilyNote(("granitemoehybrid",), tiny={"layer_types": ["linear_attention", "full_attention"] * 2}),
    FamilyNote(("hy_v4_vl",), tiny={"text_config": {"rope_parameters": _MROPE}}),
    FamilyNote(("inkling2", "inkling2_text", "inkling_text"), bias_is_correction=True),
    FamilyNote(
        ("inkling2_loop", "inkling2_loop_text"),
        refused="its layers run several times per token",
        refused_if=lambda config: getattr(config, "loop_num_passes", 2) > 1,
    ),
    FamilyNote(("jamba",), tiny={"attn_layer_offset": 1, "attn_layer_period": 2}),
    FamilyNote(("jetmoe",), refused="its attention has experts of its own, so a layer has two routers"),
    FamilyNote(("llama4",), decoder_only="its text-only forward asks for images"),
    FamilyNote(("lfm2_moe",), tiny={"layer_types": ["conv", "full_attention"] * 2}),
    FamilyNote(
        ("longcat_flash",),
        refused="it routes to zero experts, so the number of routed experts per token varies",
        refused_if=lambda config: getattr(config, "zero_expert_num", 1) not in (None, 0),
    ),
    FamilyNote(("mimo_v2_flash",), tiny={"head_dim": 24, "num_key_value_heads": 2}),
    FamilyNote(("mistral4",), tiny={"head_dim": 16}),
    FamilyNote(("mixtral", "qwen2_moe", "qwen3_moe"), scoring="softmax"),
    FamilyNote(
        ("muse_spark",),
        tiny={"audio_config": {"hidden_sizes": (8, 8, 8, 8), "depths": (1, 1, 1, 1)}},
    ),
    FamilyNote(
        ("nemo_speechlm",),
        tiny={
            "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
            "word_timestamp_config": {"vocab_size": 97, "blank_token_id": 96},
            "text_config": {
                "n_routed_experts": 16,
                "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            },
        },
    ),
    FamilyNote(("nemotron_h_omni",), tiny={"vision_config": {"video_temporal_patch_size": 2}}),
    FamilyNote(("pi0",), no_moe="a robot policy; its action expert is one dense model"),
    FamilyNote(
        ("qwen3_omni_moe",),
        refused="it writes and speaks with two decoders and has no forward of its own; take its thinker",
    ),
    FamilyNote(("qwen3_omni_moe_thinker",), tiny={"vision_start_token_id": 90}),
    FamilyNote(("qwen4_exp",), tiny={"text_config": _INDEXER}),
    FamilyNote(("qwen4_exp_text",), tiny=_INDEXER),
    FamilyNote(("step3p7",), tiny={"text_config": {"sliding_window": 16}}),
    FamilyNote(
        ("zaya",),
        refused="its router may pick a skip expert, so the number of routed experts per token varies",
        tiny={"num_experts_per_tok": 1},
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
    for name in dict.fromkeys((getattr(config, "model_type", ""), family)):
        note = note_of(name)
        if note.refused and (note.refused_if is None or note.refused_if(text)):
            return f"family {name!r} is not supported: {note.refused}"
    return ""
