"""Low-rank adaptation of the backbone through peft, which is imported here only, and only when it is used."""

from __future__ import annotations

from typing import Any

from torch import nn

from ecospec.predictor.model import RoutingPredictorModel


def add_lora(model: RoutingPredictorModel, rank: int, alpha: float, target_modules: str) -> None:
    """Freeze the backbone and put low-rank matrices beside its linear layers; the model computes what it did.

    Args:
        model: The network; projection and head stay trainable.
        rank: Rank of the matrices.
        alpha: Their product is multiplied by alpha / rank.
        target_modules: ``all-linear``, or names of linear layers separated by commas.

    Raises:
        ValueError: A name is not among the backbone's linear layers.
    """
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - see the top of this file

    backbone = model.backbone
    linear = {name.rpartition(".")[2] for name, layer in backbone.named_modules() if isinstance(layer, nn.Linear)}
    names = sorted(linear) if target_modules == "all-linear" else [n.strip() for n in target_modules.split(",")]
    if unknown := [name for name in names if name not in linear]:
        raise ValueError(
            f"--lora_target_modules names {unknown[0]!r}, which is no linear layer of the backbone; allowed: "
            f"all-linear, or of {', '.join(sorted(linear))}"
        )
    backbone.requires_grad_(requires_grad=False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), backbone)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_("lora_" in name)


def merge_lora(model: RoutingPredictorModel) -> None:
    """Fold the low-rank matrices into the layers they stand beside; nothing of peft is left in the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - see the top of this file

    for name, found in list(model.backbone.named_modules()):
        if isinstance(found, BaseTunerLayer):
            layer: Any = found
            layer.merge(safe_merge=True)
            model.backbone.set_submodule(name, layer.get_base_layer())
