"""A tiny random model of any MoE family of the installed transformers, built from its own configuration class.

Sizes are set by the names that configurations share; where layers differ in kind (attention, recurrent, dense, MoE)
one layer of each kind is kept. What a family needs beyond that stands in `ecospec.predictor.family_notes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecospec.predictor.family_notes import note_of

_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")

#: Experts per layer and experts per token of a tiny target.
EXPERTS, TOP_K = 16, 2
LAYERS, VOCAB = 4, 97

#: Names that configurations give the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_COUNTS = " ".join(EXPERT_COUNTS)
_TOP_K_COUNTS = "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts"

_SIZES = {
    "vocab_size vocab_size_per_layer_input unpadded_vocab_size": VOCAB,
    "num_hidden_layers num_layers n_layers": LAYERS,
    _EXPERT_COUNTS: EXPERTS,
    _TOP_K_COUNTS: TOP_K,
    "hidden_size d_model moe_hidden_size encoder_ffn_dim decoder_ffn_dim d_ff": 32,
    # what joins towers: as wide as the text decoder
    "out_hidden_size text_hidden_size output_dim vision_output_dim projector_input_dim projector_output_dim": 32,
    "adapter_in_dim adapter_out_dim projector_hidden_size projection_hidden_dim mlp_dim": 32,
    "intermediate_size dense_intermediate_size intermediate_size_mlp": 48,
    "moe_intermediate_size expert_ffn_hidden_size ffn_hidden_size shared_expert_intermediate_size": 16,
    "shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size": 16,
    "share_expert_dim router_hidden_size projection_intermediate_size downsample_hidden_size": 16,
    "q_lora_rank index_head_dim sliding_window sliding_window_size": 16,
    "head_dim swa_head_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim index_topk d_kv": 8,
    "linear_head_dim linear_key_head_dim linear_value_head_dim kv_channels o_lora_rank hc_lowrank": 8,
    "mamba_d_head mamba_n_heads mamba_d_state mamba_dt_rank mamba_head_dim mamba_num_heads": 8,
    "ssm_state_size mamba_chunk_size": 8,
    "num_attention_heads n_heads num_heads num_key_value_heads swa_num_attention_heads": 4,
    "swa_num_key_value_heads num_sliding_attention_heads linear_num_heads linear_num_value_heads": 4,
    "encoder_attention_heads decoder_attention_heads n_group num_expert_group": 4,
    "topk_group decoder_layers index_n_heads linear_num_key_heads n_groups mamba_n_groups": 2,
    "o_groups layer_group_size": 2,
    "depth encoder_layers first_k_dense_replace num_dense_layers": 1,
    "max_position_embeddings max_seq_len": 128,
    "num_nextn_predict_layers pad_token_id": 0,
}
_VALUES = {name: value for names, value in _SIZES.items() for name in names.split()}
_OPTIONAL = {*_EXPERT_COUNTS.split(), *_TOP_K_COUNTS.split(), "moe_intermediate_size", "head_dim"}


def tiny_config(model_type: str) -> Any:
    """Build the tiny configuration of a family.

    Args:
        model_type: As registered with transformers' ``AutoConfig``.

    Raises:
        Exception: Whatever the family's configuration class raises for these sizes.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - the module imports without transformers

    default = AutoConfig.for_model(model_type)
    return type(default)(**_tiny_values(default, note_of(model_type).tiny))


def _tiny_values(default: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a configuration class that make it tiny."""
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        if _is_config(value):
            values[name] = _tiny_values(value, changes.get(name) or {})
        elif name in _VALUES and _scalar(value, name):
            values[name] = _VALUES[name]
    values |= _kept_layers(default)
    return values | {name: value for name, value in changes.items() if not _is_config(getattr(default, name, None))}


def _is_config(value: object) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _scalar(value: object, name: str) -> bool:
    """Whether a default is a number to be set; experts have no default in some families."""
    if value is None:
        return name in _OPTIONAL
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kept_layers(default: Any) -> dict[str, Any]:
    """Per-layer lists of a default configuration cut to one layer of each kind, in their order."""
    depth = getattr(default, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list) and len(value) == depth and value and not name.startswith("_")
    }
    kinds = {name: value for name, value in lists.items() if isinstance(value[0], str)}
    if not kinds:
        return {}
    seen: dict[tuple[str, ...], int] = {}
    for layer in range(len(next(iter(kinds.values())))):
        seen.setdefault(tuple(str(value[layer]) for value in kinds.values()), layer)
    rest = [layer for layer in range(depth or 0) if layer not in seen.values()]
    kept = sorted([*seen.values(), *rest][:LAYERS])
    return {name: [value[layer] for layer in kept] for name, value in lists.items()} | (
        {"num_hidden_layers": len(kept)} if len(kept) < LAYERS else {}
    )


def model_class(model_type: str) -> Any:
    """Class that transformers' auto classes load for a family: the whole model of a composite family.

    Raises:
        KeyError: No auto class generates text with it.
    """
    import transformers  # noqa: PLC0415
    from transformers.models.auto import modeling_auto  # noqa: PLC0415
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    # Auto classes may map a composite configuration to the text model alone.
    for task in _TASKS[1:3] + _TASKS if "text_config" in CONFIG_MAPPING[model_type].sub_configs else _TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if model_type in names:
            name = names[model_type]
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(model_type)


def tiny_model(model_type: str, seed: int = 0) -> Any:
    """Build a tiny random model of a family, float32, in eval mode, with routers and biases that decide clearly.

    Args:
        model_type: As registered with transformers' ``AutoConfig``.
        seed: Of the weights.

    Raises:
        Exception: Whatever transformers raises, e.g. ``ImportError`` for a missing optional package.
    """
    config = tiny_config(model_type)
    torch.manual_seed(seed)
    model: nn.Module = model_class(model_type)(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rpartition(".")[2]
            if tensor.ndim == 2 and re.search(r"gate\.weight|router|gate\.(?:gate|classifier)", name):
                tensor.normal_()  # the initial router weights of many families are zero: all ties
            elif re.search(r"correction_bias|expert_bias", leaf) and tensor.is_floating_point():
                tensor.copy_(torch.linspace(-0.3, 0.3, tensor.numel()).view_as(tensor))  # changes choices
    return model


def moe_families() -> list[str]:
    """Families of the installed transformers that generate text and may be MoE.

    Returns:
        Sorted ``model_type`` values: those whose modelling files mention experts, and those that reuse such a
        family, its model class or its name as default of their text configuration. Read from transformers' own
        files and auto mappings, so a family that a new release adds shows up.
    """
    from transformers.models.auto import modeling_auto  # noqa: PLC0415
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name  # noqa: PLC0415

    root = Path(modeling_auto.__file__).parents[1]
    classes: dict[str, str] = {}
    for task in _TASKS:
        for name, cls in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            classes.setdefault(name, cls if isinstance(cls, str) else cls[0])

    def text(model_type: str, kind: str) -> str:
        folder = root / model_type_to_module_name(model_type)
        return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"{kind}_*.py")))

    known = sorted(name for name in classes if name in CONFIG_MAPPING)
    found = {name for name in known if "expert" in text(name, "modeling").lower()}
    reused = {classes[name] for name in found}
    named = re.compile("|".join(f'"{name}"' for name in sorted(found)))
    return sorted(
        name
        for name in known
        if name in found or classes[name] in reused or named.search(text(name, "configuration"))
    )
