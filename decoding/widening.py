"""Widening and ballast: give a small target the cost structure of a big one without changing what it computes.

Experts of a demo-sized target fit in the processor's cache, so verifying more of them costs nothing and speed says
nothing. *Widening* grows every routed expert's FFN by a power of two r: r equal copies of each neuron, the
down-projection divided by r (exactly, as r is a power of two), all of it really stored. Routing and logits stay the
same up to the rounding of longer sums; the time of a step now follows the bytes of the experts it touches.

*Ballast* adds to every MoE layer a dense block whose output projection is zero: it reads its weights at every step
and adds exactly 0.0. It stands for what a bigger target reads whatever the routing (attention, embeddings, shared
experts), and is named as ballast wherever it appears.

Shared experts are not widened. Both changes are for measuring in memory; save the original, not the result.
Routers are not touched, so the result's RoutingSpec is its source's, and one that the model carries stays with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ecospec.decoding.experts_choice import use_fastest_experts
from ecospec.decoding.fused_experts import FusedExperts, fused_experts
from ecospec.decoding.measurement import available_bytes

_BALLAST = "ballast"


@dataclasses.dataclass(frozen=True, slots=True)
class ExtraMemory:
    """Memory that a change of a model takes.

    Attributes:
        extra_bytes: Bytes the model grows by.
        peak_bytes: Most bytes in use beyond today's while the change is made.
        available: Bytes free on the model's device; None where unknown.
    """

    extra_bytes: int
    peak_bytes: int
    available: int | None

    @property
    def fits(self) -> bool:
        """Whether the peak is below what is available; true where that is unknown."""
        return self.available is None or self.peak_bytes <= self.available


@dataclasses.dataclass(frozen=True, slots=True)
class WideningReport:
    """What `widen_` did.

    Attributes:
        factor: r.
        layers: MoE layers changed.
        width_before: Neurons of an expert before.
        width_after: And after.
        expert_bytes: Bytes of one expert after.
        memory: What it took, as stated before the change.
    """

    factor: int
    layers: int
    width_before: int
    width_after: int
    expert_bytes: int
    memory: ExtraMemory


def widening_memory(model: nn.Module, factor: int) -> ExtraMemory:
    """State what `widen_` will take.

    Args:
        model: The target.
        factor: r, a power of two.

    Raises:
        ValueError: ``factor`` is not a power of two, or the experts' layout is not supported.
    """
    return _widening_memory(fused_experts(model), _power_of_two(factor))


def _widening_memory(layers: Sequence[FusedExperts], factor: int) -> ExtraMemory:
    grown = [
        (factor - 1) * sum(t.numel() * t.element_size() for name, t in layer.weights.items() if _grows(name))
        for layer in layers
    ]
    # Each tensor is replaced by itself: while the last one is copied its old storage still exists.
    oldest = max(
        (t.numel() * t.element_size() for layer in layers for name, t in layer.weights.items() if _grows(name)),
        default=0,
    )
    peak = sum(grown) + oldest if factor > 1 else 0
    return ExtraMemory(sum(grown), peak, available_bytes(layers[0].device))


def _grows(name: str) -> bool:
    return name in {"gate_up_proj", "gate_up_proj_bias", "down_proj"}


@torch.no_grad()
def widen_(model: nn.Module, factor: int) -> WideningReport:
    """Grow the routed experts' FFN by a power of two, in place, keeping the function.

    Args:
        model: The target, without an optimizer holding its parameters.
        factor: r; 1 changes nothing.

    Returns:
        What was done. The config's expert width and the modules' own copies of it are updated too.

    Raises:
        ValueError: ``factor`` is not a power of two, the experts' layout is not supported, or memory is too small.
    """
    factor = _power_of_two(factor)
    layers = fused_experts(model)
    memory = _widening_memory(layers, factor)
    if not memory.fits:
        raise ValueError(
            f"widening by {factor} needs {memory.peak_bytes / 2**20:.0f} MiB, "
            f"{(memory.available or 0) / 2**20:.0f} MiB are available; choose a smaller factor"
        )
    if factor > 1:
        for layer in layers:
            _widen_layer(layer, factor)
        _update_widths(layers, factor)
    first = layers[0]
    width = first.width * factor
    return WideningReport(factor, len(layers), first.width, width, fused_experts(model)[0].expert_bytes, memory)


def _power_of_two(factor: int) -> int:
    if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1 or factor & (factor - 1):
        raise ValueError(f"the widening factor must be a power of two (1, 2, 4, ...), got {factor!r}")
    return factor


def _widen_layer(layer: FusedExperts, factor: int) -> None:
    module = layer.module
    out_axis, in_axis = (2, 1) if layer.transposed else (1, 2)
    # [g0 g1 u0 u1] -> [g0 g1 g0 g1 u0 u1 u0 u1]; interleaved pairs are copied as one run of 2I values.
    runs = 1 if layer.interleaved else 2
    _replace(module, "gate_up_proj", lambda weight: _repeat(weight, out_axis, runs, factor))
    if "gate_up_proj_bias" in layer.weights:
        _replace(module, "gate_up_proj_bias", lambda bias: _repeat(bias, 1, runs, factor))
    _replace(module, "down_proj", lambda weight: _repeat(weight, in_axis, 1, factor).div_(factor))


def _repeat(tensor: Tensor, axis: int, runs: int, factor: int) -> Tensor:
    """Cut an axis into equal runs and store each ``factor`` times in a row, contiguously."""
    cut = torch.unflatten(tensor, axis, (runs, 1, tensor.shape[axis] // runs))
    shape = list(cut.shape)
    shape[axis + 1] = factor
    return cut.expand(shape).flatten(axis, axis + 2).contiguous()


def _replace(module: nn.Module, name: str, change: Any) -> None:
    old = cast("nn.Parameter", getattr(module, name))
    setattr(module, name, nn.Parameter(change(old.detach()), requires_grad=old.requires_grad))


def _update_widths(layers: Sequence[FusedExperts], factor: int) -> None:
    """Update the numbers that name the experts' width: the modules' own, and the config's once per object."""
    configs: dict[int, Any] = {}
    for layer in layers:
        for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
            if getattr(layer.module, name, None) == layer.width:
                setattr(layer.module, name, layer.width * factor)
        if (config := getattr(layer.module, "config", None)) is not None:
            configs[id(config)] = config
    for config in configs.values():
        for name in ("moe_intermediate_size", "intermediate_size"):
            if getattr(config, name, None) == layers[0].width:
                setattr(config, name, layers[0].width * factor)
                break


class Ballast(nn.Module):
    """A dense block that reads its weights once per forward and returns zeros.

    Its weights are buffers outside the state dict, so saving, fingerprints and parameter counts do not see them. A
    compiler cannot fold them away either: they are inputs of the graph, not constants.

    Args:
        hidden: H.
        width: F, its inner width.
        device: Where it lives.
        dtype: Type of its weights.
        generator: Source of the input projection, on the CPU.
    """

    def __init__(
        self, hidden: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        super().__init__()
        up = torch.randn(width, hidden, generator=generator).mul_(hidden**-0.5)
        self.up: Tensor
        self.down: Tensor
        self.register_buffer("up", up.to(device=device, dtype=dtype), persistent=False)
        self.register_buffer("down", torch.zeros(hidden, width, device=device, dtype=dtype), persistent=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes read at every step."""
        return (self.up.numel() + self.down.numel()) * self.up.element_size()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return zeros of the shape of ``hidden_states [..., H]``."""
        # One row, however many tokens: dense weights on a GPU are bound by traffic, so their time does not grow
        # with a few more rows, while on a CPU four rows take twice as long as one. relu6 and nan_to_num bound the
        # inner values: infinity or NaN times a zero weight would be NaN.
        row = hidden_states.reshape(-1, hidden_states.shape[-1])[:1].nan_to_num()
        inner = nn.functional.relu6(nn.functional.linear(row, self.up))
        return nn.functional.linear(inner, self.down).expand(hidden_states.shape)


def add_ballast_(model: nn.Module, bytes_per_layer: int, *, seed: int = 0) -> ExtraMemory:
    """Attach a block of ballast to every MoE layer; logits and routing stay bitwise the same.

    It hangs on the MoE block as ``block.ballast`` with a forward hook, so every module keeps its name.

    Args:
        model: The target.
        bytes_per_layer: Weight bytes a layer's ballast reads per step, rounded down to whole groups of 16 neurons.
        seed: Of its random input projection.

    Returns:
        The memory it took.

    Raises:
        ValueError: It has ballast already, ``bytes_per_layer`` is below 16 neurons, or memory is too small.
    """
    layers = fused_experts(model)
    if any(hasattr(layer.block, _BALLAST) for layer in layers):
        raise ValueError("the target carries ballast already; call remove_ballast_ first")
    weight = cast("Tensor", layers[0].module.down_proj)
    neuron = 2 * layers[0].hidden * weight.element_size()
    width = bytes_per_layer // neuron // 16 * 16
    if width < 16:
        raise ValueError(f"ballast of {bytes_per_layer} bytes per layer is too small; the least is {16 * neuron}")
    extra = len(layers) * width * neuron
    memory = ExtraMemory(extra, extra + width * layers[0].hidden * 4, available_bytes(weight.device))
    if not memory.fits:
        raise ValueError(
            f"ballast needs {memory.peak_bytes / 2**20:.0f} MiB, {(memory.available or 0) / 2**20:.0f} MiB are "
            "available; choose less"
        )
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        place = cast("Tensor", layer.module.down_proj)
        ballast = Ballast(layer.hidden, width, place.device, place.dtype, generator)
        layer.block.add_module(_BALLAST, ballast)
        object.__setattr__(ballast, "handle", layer.block.register_forward_hook(_add_output, with_kwargs=True))
    return memory


def _add_output(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Add the ballast's zeros to what the MoE block returned (GPT-OSS returns a tuple)."""
    ballast = cast("Ballast", getattr(block, _BALLAST))
    zeros = ballast(args[0] if args else kwargs["hidden_states"])
    return (output[0] + zeros, *output[1:]) if isinstance(output, tuple) else output + zeros


def remove_ballast_(model: nn.Module) -> int:
    """Take the ballast off again.

    Returns:
        Number of layers that had any.
    """
    blocks = [module for module in model.modules() if isinstance(getattr(module, _BALLAST, None), Ballast)]
    for block in blocks:
        cast("Any", getattr(block, _BALLAST)).handle.remove()
        delattr(block, _BALLAST)
    return len(blocks)


@dataclasses.dataclass(frozen=True, slots=True)
class CostLevel:
    """A named cost structure for a target.

    Attributes:
        name: Name in tables.
        widening_factor: r, a power of two; 1 leaves the experts as they are.
        ballast_bytes_per_layer: Weight bytes of each MoE layer's ballast; 0 for none.

    Raises:
        ValueError: A field is out of range.
    """

    name: str
    widening_factor: int
    ballast_bytes_per_layer: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        _power_of_two(self.widening_factor)
        if self.ballast_bytes_per_layer < 0:
            raise ValueError(f"ballast_bytes_per_layer must not be negative, got {self.ballast_bytes_per_layer}")


# For the demo target (hidden 128, 6 layers of 64 experts, width 48) in float32: r = 64 makes an expert 4.7 MB and
# all of them 1.8 GB; the 24 experts of a single token are 113 MB, far beyond a 32 MB cache. The ballast is the size
# at which a step of `probability` at γ = 4, drafting included, takes about twice as long as plain decoding's, as on
# Qwen3-235B (`ecospec.decoding.calibration.suggest_ballast`).
COST_LEVELS: dict[str, CostLevel] = {
    level.name: level
    for level in (CostLevel("bare", 64), CostLevel("ballast", 64, ballast_bytes_per_layer=17 * 2**20))
}


def cost_level(name: str) -> CostLevel:
    """Look up a cost level.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in COST_LEVELS:
        raise ValueError(f"unknown cost level {name!r}; allowed: {', '.join(COST_LEVELS)}")
    return COST_LEVELS[name]


@dataclasses.dataclass(frozen=True, slots=True)
class CostLevelReport:
    """What `apply_cost_level_` did.

    Attributes:
        level: The level.
        widening: Report of the widening.
        ballast: Memory of the ballast; None for none.
        experts_implementation: Name of the experts implementation the target now runs.
    """

    level: CostLevel
    widening: WideningReport
    ballast: ExtraMemory | None
    experts_implementation: str


def apply_cost_level_(model: nn.Module, level: CostLevel) -> CostLevelReport:
    """Give a freshly loaded target a cost level: widen it, add ballast, and run the fastest experts implementation.

    Args:
        model: The target, neither widened nor ballasted. To go from ``bare`` to ``ballast``, call `add_ballast_`.
        level: What it shall cost.

    Raises:
        ValueError: The experts' layout is not supported, memory is too small, or there is ballast already.
    """
    widening = widen_(model, level.widening_factor)
    ballast = add_ballast_(model, level.ballast_bytes_per_layer) if level.ballast_bytes_per_layer else None
    return CostLevelReport(level, widening, ballast, use_fastest_experts(model))
