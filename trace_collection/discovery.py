"""Finding the MoE layers of a target by what its modules are and do, not by class name.

- An *experts* module holds expert weights of three or more dimensions, one slice per expert, and is called with
  ``(hidden, int index [tokens, K], weights [tokens, K])``.
- A *router* sits beside it, holds a weight of E rows, and returns a tuple with an integer index ``[tokens, K]``.

Shared experts have no expert dimension and are never counted; multi-token-prediction layers lie outside the
target's decoder layers and are skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a target.

    Attributes:
        layer_index: Its decoder layer number.
        name: Qualified name of the experts module, e.g. ``"model.layers.3.mlp.experts"``.
        router: Module that chooses the experts.
        experts: Module that holds and runs the routed experts.
        num_experts: Routed experts, E.
    """

    layer_index: int
    name: str
    router: nn.Module
    experts: nn.Module
    num_experts: int


def find_moe_layers(model: nn.Module) -> list[MoELayer]:
    """Find the MoE layers of a target's decoder, ascending by layer number.

    Args:
        model: A transformers causal language model, its base model, or a vision-language model (text tower only).

    Returns:
        One entry per MoE layer; dense layers are absent.

    Raises:
        ValueError: No MoE layer, several routers in one layer, layers of different size, an encoder-decoder model,
            or several decoders: the message says which.
    """
    return find_decoder(model)[1]


def find_decoder(model: nn.Module) -> tuple[nn.Module, list[MoELayer]]:
    """Find the module that owns the decoder layers, and its MoE layers; errors as in `find_moe_layers`."""
    kind = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model; only decoder-only targets are supported")
    modules = dict(model.named_modules())
    towers: dict[str, dict[int, list[str]]] = {}
    for name, module in modules.items():
        if _expert_counts(module) and (place := _place(name)):
            towers.setdefault(place[0], {}).setdefault(place[1], []).append(name)
    depth = _decoder_depth(config)
    container = _choose_tower(kind, modules, towers, depth)
    layers = []
    for index, names in sorted(towers[container].items()):
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


def _expert_counts(module: nn.Module) -> set[int]:
    """Possible numbers of experts of an experts module; empty for any other module."""
    sizes = {t.shape[0] for t in _own_tensors(module) if t.ndim >= 3}
    declared = getattr(module, "num_experts", None)
    if isinstance(declared, int) and sizes:
        return sizes | {declared}
    return set()


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _place(name: str) -> tuple[str, int] | None:
    """Split ``model.layers.3.mlp.experts`` into its layer list and layer number."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:position]), int(part)
    return None


def _decoder_depth(config: object) -> int | None:
    """Number of decoder layers according to the (text) config, where there is one."""
    get_text_config = getattr(config, "get_text_config", None)
    text = get_text_config(decoder=True) if callable(get_text_config) else config
    depth = getattr(text, "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None


def _choose_tower(
    kind: str, modules: dict[str, nn.Module], towers: dict[str, dict[int, list[str]]], depth: int | None
) -> str:
    """Name of the list of layers that is the target's decoder."""
    if not towers:
        raise ValueError(
            f"{kind} has no MoE layer (no module with num_experts and expert weights of three dimensions); "
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
    return full[0]


def _moe_layer(kind: str, modules: dict[str, nn.Module], name: str, index: int) -> MoELayer:
    """Find the router beside an experts module; where several modules could be it, try which one routes."""
    experts = modules[name]
    counts = _expert_counts(experts)
    prefix = name.rpartition(".")[0] + "."
    candidates = {
        other: module
        for other, module in modules.items()
        if other.startswith(prefix) and other != name and not other.startswith(name + ".")
        if (weight := _matrix(module)) is not None and weight.shape[0] in counts
    }
    if len(candidates) > 1:
        candidates = {other: module for other, module in candidates.items() if _routes(module)} or candidates
    if len(candidates) != 1:
        raise ValueError(
            f"{kind}: {len(candidates)} modules beside {name} look like its router "
            f"({', '.join(candidates) or 'none'}); exactly one must hold a weight with one row per expert"
        )
    router = next(iter(candidates.values()))
    weight = _matrix(router)
    assert weight is not None
    return MoELayer(index, name, router, experts, int(weight.shape[0]))


def _matrix(module: nn.Module) -> Tensor | None:
    """The module's own two-dimensional weight."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _routes(module: nn.Module) -> bool:
    """Whether the module, called with two hidden states, returns an index of two rows."""
    weight = _matrix(module)
    if weight is None or weight.is_meta:
        return False
    with torch.no_grad():
        try:
            output = module(torch.ones(2, weight.shape[1], device=weight.device, dtype=weight.dtype))
        except (RuntimeError, TypeError, ValueError):
            return False
    index, _ = index_and_weights(flat(output))
    return index is not None and index.shape[0] == 2


def flat(output: object) -> list[object]:
    """Return what a module returned, as a list."""
    return list(output) if isinstance(output, (tuple, list)) else [output]


def index_and_weights(values: Iterable[object]) -> tuple[Tensor | None, Tensor | None]:
    """Return the integer index ``[tokens, K]`` among values, and the last floating tensor of its shape."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    integer = [t for t in tensors if t.ndim >= 2 and not t.is_floating_point() and t.dtype != torch.bool]
    if not integer:
        return None, None
    index = integer[0]
    weights = [t for t in tensors if t.is_floating_point() and t.shape == index.shape]
    top_k = index.shape[-1]
    return index.reshape(-1, top_k), weights[-1].reshape(-1, top_k) if weights else None
