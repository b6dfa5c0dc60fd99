"""The predictor's backbone: any causal LM of transformers whose attention sees the whole context.

A backbone is described by its transformers configuration (with ``model_type``), stored whole in the bundle. It is
built or loaded without its LM head, and without its token embedding unless the predictor reads that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from ecospec.predictor.choices import require_choice

# Keys of a transformers configuration that say how an object was made, not what the network is.
_INCIDENTAL_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Rotary variants whose frequencies do not depend on the longest position of the batch; with the others the rows of
# a KV cache would no longer match a forward pass over the longer sequence.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

# What the tree session passes to a backbone; families without one of these cannot take a tree's positions or mask.
_FORWARD_ARGUMENTS = ("inputs_embeds", "attention_mask", "position_ids", "cache")

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)

# The two pretrained ones are the fields of the published config.json that say what the network is. Those of
# qwen3-0.6b were compared with copies of that file; of deepseek-r1-distill-qwen-1.5b only the shapes were, the rest
# is to be checked. Training on the published weights (`load_backbone`) reads the hub's own file.
BACKBONE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # For the demo target: fast on a laptop CPU.
    "tiny": {
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 1,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "deepseek-r1-distill-qwen-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


def backbone_config(backbone: str | Mapping[str, Any]) -> dict[str, Any]:
    """Complete configuration of a backbone, as it is stored in a bundle.

    Args:
        backbone: A preset name (``tiny``, ``qwen3-0.6b``, ``deepseek-r1-distill-qwen-1.5b``) or a transformers
            configuration with its ``model_type``.

    Returns:
        The configuration with every default of the family filled in, without the keys that only say how the
        object was made.

    Raises:
        ValueError: Unknown preset or family, or one that cannot score trees (see `check_backbone`).
    """
    if isinstance(backbone, str):
        require_choice("backbone preset", backbone, BACKBONE_PRESETS)
        backbone = BACKBONE_PRESETS[backbone]
    return _clean(_transformers_config(backbone))


def backbone_hidden_size(config: Mapping[str, Any]) -> int:
    """Width of the backbone's states, d, whatever its family calls it.

    Args:
        config: As returned by `backbone_config`.
    """
    return int(_transformers_config(config).hidden_size)


def _clean(config: Any) -> dict[str, Any]:
    """The stored form of a transformers configuration object."""
    return {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL_KEYS}


def _transformers_config(backbone: Mapping[str, Any]) -> Any:
    """Build and check the transformers configuration object."""
    values = dict(backbone)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError("the backbone configuration has no model_type; name a transformers family, e.g. 'qwen3'")
    try:
        config = AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"backbone configuration of model_type {model_type!r}: {text}") from error
    check_backbone(config)
    return config


def require_known_fields(backbone: Mapping[str, Any]) -> None:
    """Refuse fields that the family does not have (transformers would keep and ignore them) and impossible sizes.

    Args:
        backbone: A transformers configuration with its ``model_type``, as a user wrote it.

    Raises:
        ValueError: A field is unknown or out of range; the message names it.
    """
    family = {key: value for key, value in backbone.items() if key == "model_type"}
    known = {*_transformers_config(family).to_dict(), "rope_theta", "rope_scaling"} - _INCIDENTAL_KEYS
    if unknown := sorted(set(backbone) - known):
        raise ValueError(
            f"backbone field {unknown[0]!r} is unknown to {backbone['model_type']!r}; allowed: "
            f"{', '.join(sorted(known))}"
        )
    for name in _SIZES:
        value = backbone.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"backbone field {name} must be a positive integer, got {value!r}")
    heads, shared = backbone.get("num_attention_heads"), backbone.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        raise ValueError(
            f"backbone field num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({shared})"
        )
    if (width := backbone.get("head_dim")) is not None and width % 2:
        raise ValueError(f"backbone field head_dim must be even (rotary positions turn pairs), got {width}")


def check_backbone(config: Any) -> None:
    """Refuse backbones on which a KV cache with a tree mask would be silently wrong.

    Args:
        config: A transformers configuration object.

    Raises:
        ValueError: Not a causal LM, no attention heads, a forward pass without positions or mask, a layer type
            other than full attention, or rotary frequencies that depend on the longest position.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"backbone family {name!r} is encoder-decoder; use a decoder-only causal model")
    if not getattr(config, "num_attention_heads", None) or not getattr(config, "hidden_size", None):
        raise ValueError(f"backbone family {name!r} has no attention heads; use a causal transformer such as qwen3")
    _require_causal(config)
    layer_types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if layer_types is None and getattr(config, "sliding_window", None):
        layer_types = ["sliding_attention"]
    if other := sorted(set(layer_types or ()) - {"full_attention", "global"}):
        raise ValueError(
            f"backbone family {name!r} has {other[0]} layers; only full attention can score draft trees"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type not in _ROPE_TYPES:
            raise ValueError(
                f"backbone rope_type {rope_type!r} depends on the longest position, so cached keys go stale; "
                f"allowed: {sorted(_ROPE_TYPES)}"
            )


def _require_causal(config: Any) -> None:
    """Refuse families that transformers does not offer as causal LM, or whose forward pass takes no tree.

    Some of those offered are encoders by default; `ecospec.predictor.tree_session.require_tree_scoring` finds them.
    """
    name = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"backbone family {name!r} is no causal LM; use a decoder-only model such as qwen3")
    accepted = inspect.signature(MODEL_MAPPING[type(config)].forward).parameters
    if missing := [argument for argument in _FORWARD_ARGUMENTS if argument not in accepted]:
        raise ValueError(
            f"backbone family {name!r} takes no {missing[0]}, so it cannot score draft trees; use e.g. qwen3"
        )


def _rope_types(parameters: Any) -> list[str]:
    """Rotary variants named in a configuration; families with several layer types nest one entry per type."""
    if not isinstance(parameters, Mapping):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [name for value in parameters.values() for name in _rope_types(value)]


def build_backbone(config: Mapping[str, Any], *, vocabulary: int | None = None) -> nn.Module:
    """Randomly initialised backbone.

    Args:
        config: As returned by `backbone_config`.
        vocabulary: Rows of its own token embedding; None drops the embedding.

    Raises:
        ValueError: See `backbone_config`.
    """
    built = _transformers_config(config)
    # An embedding that is dropped at once gets one row, which spares allocating hundreds of megabytes for it first.
    built.vocab_size = vocabulary or 1
    if (getattr(built, "pad_token_id", None) or 0) >= built.vocab_size:
        built.pad_token_id = None
    backbone: nn.Module = AutoModel.from_config(built)
    if vocabulary is None:
        _drop_embedding(backbone)
    return backbone


def _drop_embedding(backbone: Any) -> None:
    """Remove the backbone's own token embedding; the model always passes ``inputs_embeds``."""
    backbone.set_input_embeddings(None)


@dataclass(frozen=True)
class PretrainedBackbone:
    """A backbone with its trained weights.

    Attributes:
        module: The network, without LM head.
        config: Its configuration as stored in a bundle.
        embedding_rms: Root mean square of its token embedding, the scale its first layer is used to.
    """

    module: nn.Module
    config: dict[str, Any]
    embedding_rms: float


def load_backbone(path: str | Path, dtype: torch.dtype, *, keep_embedding: bool = False) -> PretrainedBackbone:
    """Pretrained causal LM without its LM head.

    Args:
        path: Folder, or hub id such as ``Qwen/Qwen3-0.6B`` (downloaded when it is not in the local cache).
        dtype: Parameter type.
        keep_embedding: Keep its token embedding; dropped otherwise.

    Raises:
        FileNotFoundError: Nothing there, the hub cannot be reached, or weights are missing or damaged.
        ValueError: Not a causal LM, or a family that cannot score trees.
    """
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(
            f"backbone {path} has no config.json; give a folder that holds a causal LM, or a hub id"
        )
    try:
        config = AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise FileNotFoundError(f"backbone {path}: {_reason(error)}") from error
    check_backbone(config)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would warn of the unused LM head; what is missing we say below
    try:
        backbone, info = AutoModel.from_pretrained(str(path), dtype=dtype, output_loading_info=True)
    except Exception as error:  # missing files, damaged safetensors, misshapen tensors: each loader its own class
        raise FileNotFoundError(f"backbone {path}: {_reason(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise FileNotFoundError(
            f"backbone {path}: the weights lack {missing[0]!r} ({len(missing)} are missing); download it again"
        )
    table = backbone.get_input_embeddings().weight
    embedding_rms = float(table.detach().float().square().mean().sqrt())
    if not keep_embedding:
        _drop_embedding(backbone)
    return PretrainedBackbone(backbone, _clean(backbone.config), embedding_rms)


def _reason(error: Exception) -> str:
    """One line of a loader's message, with advice where the network is missing."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "connect" in text or "offline" in text.lower() or "cached" in text:
        return f"{text.rstrip('.')}; download it where there is a network, then give the folder"
    return text
