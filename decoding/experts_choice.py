"""Which implementation of the experts a target runs on this machine: decided by a short measurement.

No implementation is the fastest everywhere. For four tokens on ten experts of the widened demo target, one thread,
ours takes 29 ms against 51 (``grouped_mm``) and 62 (``eager``) on an AMD Zen 4, and 46 against 31 and 36 on an
Intel Xeon, where MKL's narrow products need no help.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ecospec.decoding.experts_kernel import IMPLEMENTATION, register_grouped_experts, use_grouped_experts
from ecospec.decoding.fused_experts import FusedExperts, fused_experts
from ecospec.decoding.measurement import interleaved, measure_seconds

CANDIDATES = (IMPLEMENTATION, "grouped_mm", "eager")

Stopwatch = Callable[[Callable[[], object], torch.device], float]


def use_experts(model: nn.Module, implementation: str) -> str:
    """Run the experts by a named implementation, ours included.

    Args:
        model: A transformers model.
        implementation: ``ecospec_grouped``, ``eager``, ``grouped_mm``, ...

    Returns:
        The name.

    Raises:
        ValueError: The model does not follow transformers' experts interface, or the name is unknown to it.
    """
    if implementation == IMPLEMENTATION:
        return use_grouped_experts(model)
    cast("Any", model).set_experts_implementation(implementation)
    return implementation


@torch.no_grad()
def use_fastest_experts(
    model: nn.Module, *, tokens: int = 4, repeats: int = 7, stopwatch: Stopwatch = measure_seconds
) -> str:
    """Time every implementation on the first MoE layer, on a CPU, and keep the fastest; elsewhere change nothing.

    Args:
        model: A transformers model, widened already where it will be.
        tokens: Rows of a step; each gets experts of its own as far as there are enough.
        repeats: Measurements of each implementation, interleaved; the median counts.
        stopwatch: Seconds of a call.

    Returns:
        The name of the implementation now in use.

    Raises:
        ValueError: The model does not follow transformers' experts interface, or its experts' layout is unknown.
    """
    if cast("Any", model).device.type != "cpu":
        return use_grouped_experts(model)
    layer = fused_experts(model)[0]
    register_grouped_experts()
    steps = [_step(layer, tokens, seed) for seed in range(repeats)]
    seconds: dict[str, list[float]] = {}
    for name in interleaved(CANDIDATES, repeats + 1, seed=0):
        taken = seconds.setdefault(name, [])
        use_experts(model, name)
        hidden, index, weights = steps[max(0, len(taken) - 1)]
        try:
            taken.append(stopwatch(lambda: layer.module(hidden, index, weights), layer.device))  # noqa: B023 - called at once
        except RuntimeError:  # grouped_mm knows no float64
            taken.append(float("inf"))
    # The first measurement of each warms up.
    return use_experts(model, min(CANDIDATES, key=lambda name: statistics.median(seconds[name][1:])))


def _step(layer: FusedExperts, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[tokens, H]``, experts ``[tokens, K]`` and weights of a made-up step."""
    generator = torch.Generator().manual_seed(seed)
    top_k = max(1, min(4, layer.num_experts // tokens))
    dtype = layer.weights["down_proj"].dtype
    hidden = torch.randn(tokens, layer.hidden, generator=generator).to(dtype)
    order = torch.randperm(layer.num_experts, generator=generator)
    index = order[torch.arange(tokens * top_k) % layer.num_experts].view(tokens, top_k)
    return hidden, index, torch.full((tokens, top_k), 1 / top_k, dtype=dtype)
