"""The routed experts of a target, where they are stored fused: one tensor per projection, one slice per expert.

Shapes: E routed experts, I neurons of an expert (its FFN width), H hidden size.

Layouts that exist in transformers, told apart by shape and by what the module's gate does with its input:

==================  ================  ==============  ============================
family              gate_up_proj      down_proj       order of gate and up
==================  ================  ==============  ============================
Qwen3-MoE and most  ``[E, 2I, H]``    ``[E, H, I]``   all gates, then all ups
GPT-OSS             ``[E, H, 2I]``    ``[E, I, H]``   interleaved, with biases
==================  ================  ==============  ============================
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ecospec.trace_collection.hooks import find_moe_layers

_ALLOWED = (
    "supported are fused floating-point experts: gate_up_proj [E, 2I, H] with down_proj [E, H, I] (Qwen3-MoE, "
    "DeepSeek-V3) or transposed (GPT-OSS)"
)


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """Routed experts of one MoE layer.

    Attributes:
        layer_index: Decoder layer number.
        name: Qualified name of the experts module.
        module: The experts module.
        block: The MoE block around it, called with hidden states ``[..., H]``.
        num_experts: E.
        hidden: H.
        width: I, neurons of an expert.
        transposed: Weights are stored ``[E, in, out]`` instead of ``[E, out, in]``.
        interleaved: Gate and up neurons alternate instead of following each other.
    """

    layer_index: int
    name: str
    module: nn.Module
    block: nn.Module
    num_experts: int
    hidden: int
    width: int
    transposed: bool
    interleaved: bool

    @property
    def weights(self) -> dict[str, Tensor]:
        """The module's own parameters by name, each with E slices."""
        return dict(self.module.named_parameters(recurse=False))

    @property
    def device(self) -> torch.device:
        """Device of the experts."""
        return self.weights["down_proj"].device

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, biases included."""
        return sum(t.numel() * t.element_size() for t in self.weights.values()) // self.num_experts


def fused_experts(model: nn.Module) -> list[FusedExperts]:
    """Describe the routed experts of every MoE layer.

    Args:
        model: A transformers causal language model, its weights in memory.

    Returns:
        One entry per MoE layer, ascending by layer number.

    Raises:
        ValueError: A layer stores its experts otherwise; the message names module and class.
    """
    modules = dict(model.named_modules())
    return [
        _describe(layer.layer_index, layer.name, layer.experts, modules[layer.name.rpartition(".")[0]])
        for layer in find_moe_layers(model)
    ]


def _describe(layer_index: int, name: str, module: nn.Module, block: nn.Module) -> FusedExperts:
    kind = f"{name} ({type(module).__name__})"
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)):
        raise ValueError(f"{kind} has no gate_up_proj and down_proj; {_ALLOWED}")
    if gate_up.ndim != 3 or down.ndim != 3 or not (gate_up.is_floating_point() and down.is_floating_point()):
        raise ValueError(
            f"{kind} stores {gate_up.dtype} {list(gate_up.shape)} and {down.dtype} {list(down.shape)}; {_ALLOWED}"
        )
    if gate_up.itemsize < 2 or down.itemsize < 2:
        raise ValueError(f"{kind} is quantised ({down.dtype}); load the target in bfloat16 or float32")
    if gate_up.is_meta or down.is_meta:
        raise ValueError(f"{kind} is offloaded; load the whole target into memory")
    experts, rows, columns = gate_up.shape
    if tuple(down.shape) == (experts, columns, rows // 2) and rows % 2 == 0:
        transposed, hidden, width = False, columns, rows // 2
    elif tuple(down.shape) == (experts, columns // 2, rows) and columns % 2 == 0:
        transposed, hidden, width = True, rows, columns // 2
    else:
        raise ValueError(
            f"{kind}: gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)} do not fit; {_ALLOWED}"
        )
    return FusedExperts(
        layer_index, name, module, block, experts, hidden, width, transposed, _is_interleaved(kind, module, width)
    )


@torch.no_grad()
def _is_interleaved(kind: str, module: nn.Module, width: int) -> bool:
    """Find the order of gate and up neurons by changing the second input of the gate and looking what moves."""
    gate = getattr(module, "_apply_gate", None)
    if gate is None:
        raise ValueError(f"{kind} does not follow transformers' experts interface (no _apply_gate); {_ALLOWED}")
    # Values between 0.1 and 1 lie in the moving part of every activation in use, clamped ones included.
    base = torch.linspace(0.1, 1.0, 2 * width, dtype=torch.float32)[None]
    moved = base.clone()
    moved[0, 1] += 0.25
    before, after = gate(base), gate(moved)
    if tuple(before.shape) != (1, width):
        raise ValueError(f"{kind}: its gate maps {2 * width} values to {list(before.shape)}; {_ALLOWED}")
    changed = (before != after)[0].nonzero().flatten().tolist()
    # Input 1 is the second gate neuron where gates come first, and the first up neuron where they alternate.
    if width == 1 or changed == [1]:
        return False
    if changed == [0]:
        return True
    raise ValueError(f"{kind}: its neurons depend on each other, so they cannot be copied; {_ALLOWED}")
