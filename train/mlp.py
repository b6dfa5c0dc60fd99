"""Fitting the perceptron baseline: AdamW over windows of traced tokens, then a temperature for each MoE layer.

Shapes: B windows of text, T tokens, L MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ecospec.predictor.mlp_predictor import MlpModel, MlpPredictor
from ecospec.train.arrays import TraceSource
from ecospec.train.batching import plan_epoch
from ecospec.train.calibration import TemperatureFit
from ecospec.train.data import Batch, BatchDataset
from ecospec.train.losses import selected_expert_cross_entropy
from ecospec.train.mlp_config import MlpTraining
from ecospec.train.schedule import learning_rate_factor

#: Tokens of a piece of text; only its first n - 1 tokens see less of what stands before them than in decoding.
_PIECE = 512
_WARMUP = 0.03
_BETAS = (0.9, 0.98)


def fit_mlp(
    training: TraceSource,
    embedding: Tensor,
    options: MlpTraining,
    *,
    calibration: TraceSource | None = None,
    training_data: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[int, float], None] | None = None,
) -> MlpPredictor:
    """Fit the perceptron; memory does not grow with the traces where the source reads them from files.

    Args:
        training: The traces to fit on.
        embedding: The target's embedding table ``[V, H]``.
        options: Options.
        calibration: Traces of other groups for the temperatures; None leaves them at 1.
        training_data: What the traces are, for the config.
        device: Where to compute.
        on_epoch: Called after every epoch with its number, from 1, and its mean loss in nats.

    Returns:
        The predictor, on the CPU, with the embedding by reference.

    Raises:
        ValueError: There is no token, or the loss is not finite.
    """
    if not training.lengths.sum():
        raise ValueError("the perceptron cannot be fitted on traces without a token; collect traces first")
    spec = training.spec
    torch.manual_seed(options.seed)
    model = MlpModel(
        spec,
        embedding_size=embedding.shape[1],
        window_tokens=options.window_tokens,
        hidden_size=options.hidden_size,
        hidden_layers=options.hidden_layers,
        target_embedding=embedding.to(device),
    ).to(device)
    optimizer = _optimizer(model, options)
    for epoch in range(options.epochs):
        loss = _train_epoch(model, optimizer, training, options, epoch)
        if on_epoch is not None:
            on_epoch(epoch + 1, loss)
    temperature = () if calibration is None else _temperatures(model, calibration, options)
    model.to("cpu").eval().requires_grad_(requires_grad=False)
    model.set_target_embedding(embedding)
    return MlpPredictor.from_model(
        model, temperature=temperature, options=_recorded(options), training_data=training_data
    )


def _recorded(options: MlpTraining) -> dict[str, Any]:
    """The options of the perceptron, without those that a command adds to them."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(MlpTraining)}


def _optimizer(model: MlpModel, options: MlpTraining) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=_BETAS)


def _pieces(source: TraceSource, options: MlpTraining, epoch: int | None) -> BatchDataset:
    """Batches of pieces of text, in an order of their own in every epoch; as they stand where that is None."""
    key = None if epoch is None else (options.seed, epoch)
    # A piece longer than a batch would be a batch of its own.
    length = min(_PIECE, options.batch_tokens)
    plan = plan_epoch(source.lengths, None, context_length=length, batch_tokens=options.batch_tokens, key=key)
    return BatchDataset(plan, source)


def _scored(model: MlpModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[B, T, L, E]``, experts and mask of a batch, on the model's device."""
    ids, experts, mask = (batch[name].to(model.head.weight.device) for name in ("input_ids", "experts", "mask"))
    return model(model.windows(ids)), experts, mask


def _train_epoch(
    model: MlpModel, optimizer: torch.optim.Optimizer, training: TraceSource, options: MlpTraining, epoch: int
) -> float:
    """Train on every token once; return the mean loss of a token."""
    batches = _pieces(training, options, epoch)
    summed = torch.zeros((), device=model.head.weight.device)
    for index in range(len(batches)):
        factor = learning_rate_factor((epoch + index / len(batches)) / options.epochs, _WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * factor
        scores, experts, mask = _scored(model, batches[index])
        # Every token of an epoch weighs the same: the few left of a bucket must not make a full step.
        loss = selected_expert_cross_entropy(scores, experts, mask) * mask.sum()
        optimizer.zero_grad()
        (loss / options.batch_tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        summed += loss.detach()
    mean = float(summed) / int(training.lengths.sum())
    if not math.isfinite(mean):
        raise ValueError(f"the loss is not finite in epoch {epoch + 1}; fit again with a lower --learning-rate")
    return mean


@torch.no_grad()
def _temperatures(model: MlpModel, calibration: TraceSource, options: MlpTraining) -> tuple[float, ...]:
    """One temperature for each MoE layer."""
    fit = TemperatureFit(model.spec.num_layers).to(model.head.weight.device)
    batches = _pieces(calibration, options, None)
    for index in range(len(batches)):
        fit.update(*_scored(model, batches[index]))
    return tuple(fit.compute().tolist())
