"""Finding the MoE layers of a target by what its modules are and do, not by class name.

An *experts* module holds the routed experts of one layer. It is one of

- a module that says ``num_experts`` and holds weights of three or more dimensions, one slice per expert, of any
  dtype (FP8 and MXFP4 classes included), or whose forward takes index and weights beside the hidden states (DBRX);
- a module with two or more such weights that agree in their first dimension, even if it says nothing;
- a list of equal submodules, one per expert.

Its *router* is the submodule beside it, or inside it where a block holds its expert weights itself, that has a
matrix of E rows or, called with hidden states, returns an index. Shared experts have no expert dimension and are
never counted; layers behind the decoder's depth (multi-token prediction) and other towers are skipped.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ecospec.predictor.family_notes import refusal, text_config

# Experts of another modality in a layer (ERNIE-4.5-VL), decoders beside the target's: text passes neither.
_OTHER_MODALITY = re.compile(r"vision|visual|image|audio|speech|talker|(?:^|[._])mtp")
_ROUTER_NAME = re.compile(r"gate(?!_up)|gating|router")


@dataclasses.dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a target.

    Attributes:
        layer_index: Its decoder layer number.
        name: Qualified name of the experts module, e.g. ``"model.layers.3.mlp.experts"``.
        router: Module that chooses the experts.
        experts: Module that holds and runs the routed experts; a list where every expert is a module.
        num_experts: Routed experts, E.
        block: Module around router and experts.
    """

    layer_index: int
    name: str
    router: nn.Module
    experts: nn.Module
    num_experts: int
    block: nn.Module

    @property
    def experts_take_index(self) -> bool:
        """Whether the experts module is called with more than the hidden states."""
        called = self.experts is not self.block and not isinstance(self.experts, nn.ModuleList)
        return called and _arguments(self.experts) >= 2

    @property
    def expert_parallel(self) -> bool:
        """Whether other processes hold a part of the experts."""
        return bool(getattr(self.experts, "_is_expert_parallel", False))


def find_moe_layers(model: nn.Module) -> list[MoELayer]:
    """Find the MoE layers of a target's decoder, ascending by layer number.

    Args:
        model: A transformers causal language model, its base model, or a vision-language model (text tower only).

    Returns:
        One entry per MoE layer; dense layers are absent.

    Raises:
        ValueError: No MoE layer, several routers in one layer, layers of different size, an encoder-decoder model,
            a refused family, or several decoders: the message says which.
    """
    return find_decoder(model)[1]


def find_decoder(model: nn.Module) -> tuple[nn.Module, list[MoELayer]]:
    """Find the module that owns the decoder layers, and its MoE layers; errors as in `find_moe_layers`."""
    kind = type(model).__name__
    config = getattr(model, "config", None)
    if reason := refusal(config):
        raise ValueError(f"{kind}: {reason}")
    modules = dict(model.named_modules())
    depth = _decoder_depth(config)
    container, places = _choose_tower(kind, modules, _towers(modules), depth)
    layers = []
    for index, names in sorted(places.items()):
        if depth is not None and index >= depth:
            continue  # multi-token-prediction layers are stored behind the decoder layers
        if len(names) > 1:
            raise ValueError(
                f"{kind}: layer {index} has {len(names)} experts modules ({', '.join(names)}); targets with more "
                "than one router per layer are not supported"
            )
        layers.append(_moe_layer(kind, modules, names[0], index))
    if len(sizes := {layer.num_experts for layer in layers}) > 1:
        raise ValueError(
            f"{kind}: layers have {sorted(sizes)} experts; targets with one E for all layers are supported"
        )
    return modules[container.rpartition(".")[0]], layers


def _towers(modules: Mapping[str, nn.Module]) -> dict[str, dict[int, list[str]]]:
    """Names of experts modules by layer list and layer number; in each layer only the surest kind."""
    towers: dict[str, dict[int, list[str]]] = {}
    for find in (_says_experts, _holds_experts, _lists_experts):
        found: dict[str, dict[int, list[str]]] = {}
        for name, module in modules.items():
            if (place := _place(name)) is None or not find(module):
                continue
            container, index, inner = place
            if index in towers.get(container, {}) or _OTHER_MODALITY.search(f"{container}.{inner}"):
                continue
            if find is _says_experts or _candidates(modules, name):
                found.setdefault(container, {}).setdefault(index, []).append(name)
        for container, layers in found.items():
            towers.setdefault(container, {}).update(layers)
    return towers


def _says_experts(module: nn.Module) -> set[int]:
    """Sizes of a module that says num_experts and holds stacked weights or takes an index and weights."""
    declared = getattr(module, "num_experts", None)
    if not isinstance(declared, int):
        return set()
    stacked = _stacked(module)
    return {*stacked, declared} if stacked or _arguments(module) >= 3 else set()


def _holds_experts(module: nn.Module) -> set[int]:
    """Sizes that two or more stacked weights of a module share."""
    stacked = _stacked(module)
    return {size for size in stacked if size > 1 and stacked.count(size) > 1}


def _lists_experts(module: nn.Module) -> set[int]:
    """Length of a list of submodules whose weights have the same shapes."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return set()
    shapes = [[(name, tensor.shape) for name, tensor in child.named_parameters()] for child in module]
    return {len(module)} if shapes[0] and all(shape == shapes[0] for shape in shapes) else set()


def _sizes(module: nn.Module) -> set[int]:
    """Possible numbers of experts of an experts module."""
    return _says_experts(module) or _holds_experts(module) or _lists_experts(module)


def _stacked(module: nn.Module) -> list[int]:
    """First dimensions of the module's own tensors of three or more dimensions."""
    own: Iterator[Tensor] = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return [tensor.shape[0] for tensor in own if tensor.ndim >= 3]


def _arguments(module: nn.Module) -> int:
    """Number of tensors the module's forward takes by position."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3  # a wrapper that passes on whatever it gets
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def _place(name: str) -> tuple[str, int, str] | None:
    """Split ``model.layers.3.mlp.experts`` into its layer list, layer number and the name inside the layer."""
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[:position]), int(part), ".".join(parts[position + 1 :])
    return None


def _decoder_depth(config: object) -> int | None:
    """Number of decoder layers according to the (text) config, where there is one."""
    depth = getattr(text_config(config), "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None


def _choose_tower(
    kind: str, modules: Mapping[str, nn.Module], towers: dict[str, dict[int, list[str]]], depth: int | None
) -> tuple[str, dict[int, list[str]]]:
    """Name of the list of layers that is the target's decoder, and its experts modules by layer."""
    if not towers:
        raise ValueError(
            f"{kind} has no MoE layer (no module with a slice or a submodule per expert and a router beside it); "
            "use a mixture-of-experts target"
        )

    def size(name: str) -> int:
        container = modules[name]
        return len(container) if isinstance(container, nn.ModuleList) else 0

    full = [name for name in towers if depth is None or size(name) >= depth]
    if len(full) != 1:
        raise ValueError(
            f"{kind} has MoE layers in {sorted(towers)}, of which {len(full)} have the decoder's {depth} layers; "
            "pass the target alone"
        )
    return full[0], towers[full[0]]


def _candidates(modules: Mapping[str, nn.Module], name: str) -> dict[str, int]:
    """Submodules that may be the router of an experts module, with their rows: beside it, else inside."""
    experts = modules[name]
    sizes = _sizes(experts)
    shared = bool(getattr(experts, "_is_expert_parallel", False))
    beside = name.rpartition(".")[0] + "."
    for prefix, own in ((beside, name), (name + ".", None)):
        found: dict[str, int] = {}
        for other, module in modules.items():
            if not other.startswith(prefix) or other == own or other.startswith(f"{own}."):
                continue
            for rows in _rows(module):
                # Under expert parallelism a process holds a part of the experts, and its router chooses among all.
                if rows in sizes or (shared and any(rows % size == 0 for size in sizes)):
                    found.setdefault(prefix + other.removeprefix(prefix).partition(".")[0], rows)
        if found:
            return found
    return {}


def _rows(module: nn.Module) -> list[int]:
    """Rows of the module's own matrices."""
    return [tensor.shape[0] for tensor in module.parameters(recurse=False) if tensor.ndim == 2]


def _moe_layer(kind: str, modules: Mapping[str, nn.Module], name: str, index: int) -> MoELayer:
    """Find the router of an experts module; where several modules could be it, try which one routes."""
    experts = modules[name]
    base = name.rpartition(".")[0]
    found = _candidates(modules, name)
    if not found:  # a router may score shared experts as well (Inkling): more rows than routed experts
        found = {
            other: max(_sizes(experts))
            for other, module in modules.items()
            if other.rpartition(".")[0] == base and other != name and _routes(module)
        }
    if len(found) > 1:
        found = {other: rows for other, rows in found.items() if _routes(modules[other])} or found
    if len(found) > 1:
        found = {other: rows for other, rows in found.items() if _ROUTER_NAME.search(other.rpartition(".")[2])}
    if len(found) != 1:
        raise ValueError(
            f"{kind}: {len(found)} modules beside {name} look like its router "
            f"({', '.join(found) or 'none'}); exactly one must hold a weight with one row per expert"
        )
    ((router, rows),) = found.items()
    block = experts if router.startswith(f"{name}.") else modules[base]
    return MoELayer(index, name, modules[router], experts, rows, block)


def _routes(module: nn.Module) -> bool:
    """Whether the module, called with two hidden states, returns an index of two rows."""
    matrix = next((tensor for tensor in module.parameters() if tensor.ndim == 2), None)
    if matrix is None or matrix.is_meta:
        return False
    hidden = torch.ones(2, matrix.shape[1], device=matrix.device, dtype=matrix.dtype)
    with torch.no_grad():
        try:
            output = module(hidden)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
    index, _ = index_and_weights(flat(output))
    return index is not None and index.shape[0] == 2


def flat(output: object) -> list[object]:
    """Return what a module returned, as a list."""
    return list(output) if isinstance(output, (tuple, list)) else [output]


def index_and_weights(values: Iterable[object]) -> tuple[Tensor | None, Tensor | None]:
    """Return the integer index ``[tokens, K]`` among values, and the floating tensor of its shape nearest to it.

    Nearest, because routers that weight shared experts as well return those weights, too (Inkling).
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    places = [
        place
        for place, tensor in enumerate(tensors)
        if tensor.ndim >= 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool
    ]
    if not places:
        return None, None
    index = tensors[places[0]]
    top_k = index.shape[-1]
    weights = [
        (abs(place - places[0]), place)
        for place, tensor in enumerate(tensors)
        if tensor.is_floating_point() and tensor.shape == index.shape
    ]
    return index.reshape(-1, top_k), tensors[min(weights)[1]].reshape(-1, top_k) if weights else None
