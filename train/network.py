"""The network that a run trains, made from its options or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ecospec.predictor.backbones import BACKBONE_PRESETS, require_known_fields
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.choices import require_choice
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.predictor_config import InputMode
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.tree_session import require_tree_scoring
from ecospec.train.config import Finetune, TrainPredictorConfig
from ecospec.train.lora import add_lora

# Of a trained backbone a wrong mask or position moves the scores by tenths of their spread.
_PRETRAINED_TOLERANCE = 1e-3


def new_model(spec: RoutingSpec, config: TrainPredictorConfig) -> RoutingPredictorModel:
    """The network at the start of a run, fresh weights initialised by the current random state.

    Args:
        spec: The target's routing.
        config: Its backbone, input mode, head and fine-tuning, and target.

    Returns:
        The network, target embedding included, on the CPU.

    Raises:
        FileNotFoundError: There is no target, or no causal LM at ``backbone_path``.
        ValueError: An unknown preset, changes that do not fit it, a backbone that cannot score draft trees, or one
            of another vocabulary in input mode ``backbone_embedding``.
    """
    inputs = _inputs(config.target, config.input_mode) | {"head_rank": config.head_rank}
    if config.backbone_path is not None:
        model = RoutingPredictorModel.from_pretrained_backbone(spec, config.backbone_path, **inputs)
        require_tree_scoring(model, _PRETRAINED_TOLERANCE)
    else:
        model = _from_scratch(spec, config, inputs)
    if config.finetune == Finetune.HEADS:
        model.backbone.requires_grad_(requires_grad=False)
    elif config.finetune == Finetune.LORA:
        add_lora(model, config.lora_rank, config.lora_alpha, config.lora_target_modules)
    if config.gradient_checkpointing:
        # The variant that works where only adapters, and nothing of the input, need a gradient.
        model.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        model.backbone.compile(dynamic=True)
    return model.train()


def _inputs(target: str | Path, input_mode: str) -> dict[str, Any]:
    """Arguments of the network that say what it reads."""
    if input_mode == InputMode.BACKBONE_EMBEDDING:
        return {"input_mode": input_mode}
    embedding = load_target_embedding(target, dtype=torch.float32)
    return {"input_mode": input_mode, "embedding_size": embedding.shape[1], "target_embedding": embedding}


def _from_scratch(
    spec: RoutingSpec, config: TrainPredictorConfig, inputs: Mapping[str, Any]
) -> RoutingPredictorModel:
    require_choice("backbone preset", config.preset, BACKBONE_PRESETS)
    if not config.backbone:
        return RoutingPredictorModel(spec, backbone=config.preset, **inputs)
    backbone = {**BACKBONE_PRESETS[config.preset], **config.backbone}
    require_known_fields(backbone)
    if config.input_mode == InputMode.BACKBONE_EMBEDDING:
        backbone["vocab_size"] = spec.vocab_size
    try:
        model = RoutingPredictorModel(spec, backbone=backbone, **inputs)
    except ValueError:
        raise
    except Exception as error:  # whatever the family's code raises for values nobody checks
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--backbone {config.backbone} does not work with the preset: {reason}") from error
    require_tree_scoring(model)  # sizes that do not fit each other show here too
    return model


def rebuilt_model(
    spec: RoutingSpec, run: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: str | Path
) -> RoutingPredictorModel:
    """The network of a checkpoint as it was trained, LoRA matrices apart.

    Args:
        spec: The target's routing.
        run: Facts of the run (`ecospec.train.fit`); what older runs did not record had one value then.
        weights: State of the network.
        target: Folder of the target.
    """
    options = run["options"]
    inputs = _inputs(target, run.get("input_mode", InputMode.TARGET_EMBEDDING))
    model = RoutingPredictorModel(spec, backbone=run["backbone"], head_rank=run.get("head_rank"), **inputs)
    if options.get("finetune") == Finetune.LORA:
        add_lora(model, options["lora_rank"], options["lora_alpha"], options["lora_target_modules"])
    model.load_state_dict(dict(weights))
    return model.float().eval()
