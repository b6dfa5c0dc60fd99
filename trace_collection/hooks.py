"""Routing recorder: which experts a target executes, taken from forward hooks.

Either boundary of a MoE layer can be recorded, what its router returns or what its experts are called with, so a
test can hold one against the other. Which modules those are is found by behaviour
(`ecospec.trace_collection.discovery`).

Shapes: N tokens of one forward (batch x time, padding included), L MoE layers, E routed experts, K top-k.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.discovery import (
    MoELayer,
    find_decoder,
    find_moe_layers,
    flat,
    index_and_weights,
)

__all__ = ["MoELayer", "RecordedRouting", "RoutingRecorder", "Source", "find_moe_layers"]

Source = Literal["router", "experts"]

_NOT_FIRED = (
    "hooks do not fire in modules compiled or captured in a CUDA graph before the recorder was opened; "
    "record the uncompiled model"
)


@dataclasses.dataclass(frozen=True)
class RecordedRouting:
    """Routing of one forward, on the model's device.

    Attributes:
        experts: uint8 (int16 above 256 experts) ``[N, L, K]``, ids ascending within a layer.
        weights: float16 ``[N, L, K]`` aligned with ``experts``: what the experts' outputs were multiplied with;
            None unless asked for.
    """

    experts: Tensor
    weights: Tensor | None


class RoutingRecorder:
    """Records the experts of every token of a forward; a context manager around any use of the model.

    Nothing is copied to the host and nothing waits for the device, except that the first forward's ids are checked.
    Each forward replaces the record of the one before::

        with RoutingRecorder(model) as recorder:
            model(input_ids)
            routing = recorder.take()      # [N, L, K], padding rows included, in the order of the flattened input

    Args:
        model: The target, in eval mode.
        spec: Its RoutingSpec, where known: layers, E and K are compared with it.
        source: Boundary to record: what the routers return or what the experts modules are called with. Under
            expert parallelism only the routers' ids are global.
        weights: Also record the weights. Where a family rescales them between router and experts, take
            ``source="experts"``.

    Raises:
        ValueError: The model has no MoE layers or differs from ``spec``; on entering or in a forward: the model is
            in training mode (router jitter), a layer recorded another number of rows than tokens, or wrong ids.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: RoutingSpec | None = None,
        *,
        source: Source = "router",
        weights: bool = False,
    ) -> None:
        if source not in ("router", "experts"):
            raise ValueError(f"source must be 'router' or 'experts', got {source!r}")
        self._owner, self.layers = find_decoder(model)
        self._kind = type(model).__name__
        self._spec = spec
        self._source: Source = source
        self._want_weights = weights
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._indices: list[list[Tensor]] = []
        self._weights: list[list[Tensor]] = []
        self._tokens = 0
        self._checked = False
        self._last: tuple[Tensor, Tensor | None] | None = None
        if spec is not None:
            self._compare(spec)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers, L."""
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Routed experts per layer, E."""
        return self.layers[0].num_experts

    @property
    def last_experts(self) -> Tensor:
        """int64 ``[N, L, K]`` on the model's device: experts of the last forward, ids ascending within a layer.

        Raises:
            ValueError: No forward has been recorded.
        """
        return self._require()[0]

    def take(self) -> RecordedRouting:
        """Return the routing of the last forward in storage types and forget it.

        Raises:
            ValueError: No forward has been recorded since the recorder was opened or last taken from.
        """
        experts, weights = self._require()
        self._last = None
        small = torch.uint8 if self.num_experts <= 256 else torch.int16
        return RecordedRouting(experts.to(small), None if weights is None else weights.to(torch.float16))

    def _require(self) -> tuple[Tensor, Tensor | None]:
        if self._last is None:
            raise ValueError(f"{self._kind}: no forward was recorded; run one inside the recorder ({_NOT_FIRED})")
        return self._last

    def __enter__(self) -> Self:
        """Register the hooks."""
        self._refuse_training()
        self._handles.append(self._owner.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(self._owner.register_forward_hook(self._finish))
        for slot, layer in enumerate(self.layers):
            if self._source == "router":
                handle = layer.router.register_forward_hook(self._router_hook(slot))
            else:
                handle = layer.experts.register_forward_pre_hook(self._experts_hook(slot), with_kwargs=True)
            self._handles.append(handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the hooks; a taken record stays valid."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._refuse_training()
        ids = kwargs.get("input_ids", args[0] if args else None)
        embeds = kwargs.get("inputs_embeds")
        shape = ids.shape if isinstance(ids, Tensor) else embeds.shape[:2] if isinstance(embeds, Tensor) else None
        if shape is None:
            raise ValueError(f"{self._kind} was called with neither input_ids nor inputs_embeds; pass one of them")
        self._tokens = shape.numel()
        self._indices = [[] for _ in self.layers]
        self._weights = [[] for _ in self.layers]
        self._last = None

    def _router_hook(self, slot: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
            self._note(slot, flat(output))

        return hook

    def _experts_hook(self, slot: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._note(slot, [*args, *kwargs.values()])

        return hook

    def _note(self, slot: int, values: list[object]) -> None:
        index, weights = index_and_weights(values)
        other = "experts" if self._source == "router" else "router"
        layer = self.layers[slot].layer_index
        if index is None:
            raise ValueError(
                f"{self._kind}: the {self._source} of layer {layer} shows no [tokens, K] index of experts; "
                f"record with source={other!r}"
            )
        self._indices[slot].append(index.detach())
        if self._want_weights:
            if weights is None:
                raise ValueError(
                    f"{self._kind}: the {self._source} of layer {layer} shows no weights beside its index; "
                    f"record with source={other!r} or without weights"
                )
            self._weights[slot].append(weights.detach())

    def _finish(self, _module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        for layer, parts in zip(self.layers, self._indices, strict=True):
            rows = sum(part.shape[0] for part in parts)
            if rows != self._tokens:
                raise ValueError(
                    f"{self._kind}: layer {layer.layer_index} recorded {rows} rows for {self._tokens} tokens; "
                    f"every token must pass its router exactly once ({_NOT_FIRED})"
                )
        experts, order = _stack(self._indices).long().sort(dim=-1)
        weights = _stack(self._weights).gather(-1, order) if self._want_weights else None
        self._indices, self._weights = [], []
        if not self._checked:
            self._check_first(experts)
        self._last = (experts, weights)

    def _refuse_training(self) -> None:
        training = self._owner.training or any(layer.router.training for layer in self.layers)
        if training:
            raise ValueError(
                f"{self._kind} is in training mode, where routers may add noise; call model.eval() first"
            )

    def _compare(self, spec: RoutingSpec) -> None:
        mine = {
            "layer_indices": tuple(layer.layer_index for layer in self.layers),
            "num_experts": self.num_experts,
        }
        for name, value in mine.items():
            if getattr(spec, name) != value:
                raise ValueError(
                    f"{self._kind} has {name} {value}, its RoutingSpec says {getattr(spec, name)}; "
                    "use the spec of this target"
                )

    def _check_first(self, experts: Tensor) -> None:
        """Check K and the ids once; the only place that waits for the device."""
        top_k = experts.shape[-1]
        if self._spec is not None and self._spec.top_k != top_k:
            raise ValueError(
                f"{self._kind} routes to {top_k} experts, its RoutingSpec says top_k {self._spec.top_k}"
            )
        low, high = (int(bound) for bound in experts.aminmax())
        if low < 0 or high >= self.num_experts:
            raise ValueError(
                f"{self._kind}: the {self._source} index holds ids from {low} to {high}, allowed: 0 to "
                f"{self.num_experts - 1}; under expert parallelism record with source='router'"
            )
        if bool((experts[..., 1:] == experts[..., :-1]).any()):
            raise ValueError(
                f"{self._kind}: one token is routed to the same expert twice; this is not a top-k router"
            )
        self._checked = True


def _stack(parts: list[list[Tensor]]) -> Tensor:
    """Stack per-layer pieces to ``[N, L, K]`` on the device of the last layer."""
    device = parts[-1][-1].device
    rows = [(layer[0] if len(layer) == 1 else torch.cat(layer)).to(device, non_blocking=True) for layer in parts]
    return torch.stack(rows, dim=1)
