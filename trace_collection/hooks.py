"""Routing recorder: which experts a target executes, taken from forward hooks.

A MoE layer shows its choice at its router, at its experts or in the top-k call inside its block
(`ecospec.trace_collection.boundaries`); any of them can be recorded, so a test can hold one against the other.
The modules are found by behaviour (`ecospec.trace_collection.discovery`).

Shapes: N tokens of one forward (batch x time, padding included), L MoE layers, E routed experts, K top-k.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.boundaries import BOUNDARIES, NOT_FIRED, Boundary
from ecospec.trace_collection.discovery import MoELayer, find_decoder, find_moe_layers

__all__ = ["MoELayer", "RecordedRouting", "RoutingRecorder", "Source", "find_moe_layers"]

Source = Literal["auto", "router", "experts", "topk"]


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
        source: Boundary to record: what the routers return (``router``), what the experts modules are called with
            (``experts``) or the top-k call inside the blocks (``topk``, for families that show no index elsewhere).
            ``auto`` looks at all of them in the first forward and keeps the router if it shows an index and agrees
            with the experts, else the experts, else the call. Under expert parallelism only the routers' ids are
            global.
        weights: Also record the weights the experts' outputs are multiplied with; ``auto`` then prefers the
            experts, because a family may rescale the weights on the way to them.

    Raises:
        ValueError: The model has no MoE layers, its family is refused, it differs from ``spec``, or ``experts`` is
            asked for under expert parallelism; on entering or in a forward: the model is in training mode (router
            jitter), a layer recorded another number of rows than tokens, or wrong ids.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: RoutingSpec | None = None,
        *,
        source: Source = "auto",
        weights: bool = False,
    ) -> None:
        if source not in get_args(Source):
            raise ValueError(f"source must be one of {', '.join(get_args(Source))}; got {source!r}")
        self._owner, self.layers = find_decoder(model)
        self._kind = type(model).__name__
        self._spec = spec
        self._want_weights = weights
        self._sources = self._boundaries_of(source)
        self._boundaries: list[Boundary] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
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
    def source(self) -> str:
        """Boundary that is recorded; under ``auto`` the one kept after the first forward."""
        return self._sources[0]

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
            raise ValueError(f"{self._kind}: no forward was recorded; run one inside the recorder ({NOT_FIRED})")
        return self._last

    def __enter__(self) -> Self:
        """Register the hooks."""
        self._refuse_training()
        self._handles.append(self._owner.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(self._owner.register_forward_hook(self._finish))
        self._boundaries = [
            BOUNDARIES[source](self._kind, self.layers, want_weights=self._want_weights) for source in self._sources
        ]
        for boundary in self._boundaries:
            boundary.open()
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
        for boundary in self._boundaries:
            boundary.close()

    def _boundaries_of(self, source: Source) -> tuple[str, ...]:
        """Sources to open, best first."""
        parallel = any(layer.expert_parallel for layer in self.layers)
        if source == "experts" and parallel:
            raise ValueError(
                f"{self._kind} runs under expert parallelism, where the ids that reach its experts are local to a "
                "process; record with source='router'"
            )
        if source != "auto":
            return (source,)
        if not all(layer.experts_take_index for layer in self.layers):
            return ("router", "topk")
        if parallel:
            return ("router",)
        return ("experts", "router") if self._want_weights else ("router", "experts")

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._refuse_training()
        ids = kwargs.get("input_ids", args[0] if args else None)
        embeds = kwargs.get("inputs_embeds")
        shape = ids.shape if isinstance(ids, Tensor) else embeds.shape[:2] if isinstance(embeds, Tensor) else None
        if shape is None:
            raise ValueError(f"{self._kind} was called with neither input_ids nor inputs_embeds; pass one of them")
        self._tokens = shape.numel()
        for boundary in self._boundaries:
            boundary.begin()
        self._last = None

    def _finish(self, _module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        boundary = self._boundaries[0]
        if len(self._boundaries) > 1:
            boundary, record = self._settle()
        elif problem := boundary.problem(self._tokens):
            raise ValueError(problem)
        else:
            record = boundary.stacked()
        if not self._checked:
            self._check_first(record[0], boundary)
        self._last = record

    def _settle(self) -> tuple[Boundary, tuple[Tensor, Tensor | None]]:
        """Keep one boundary after the first forward: the best that shows what is executed."""
        readable = [boundary for boundary in self._boundaries if not boundary.silent]
        if not readable or any(boundary.problem(self._tokens) for boundary in readable):
            complaints = [boundary.complaint for boundary in self._boundaries]
            rows = [boundary.problem(self._tokens) for boundary in self._boundaries]
            raise ValueError(next(filter(None, complaints + rows)))
        records = [boundary.stacked() for boundary in readable]
        executed = [slot for slot, boundary in enumerate(readable) if boundary.source != "router"]
        kept = 0
        if executed and not torch.equal(records[0][0], records[executed[0]][0]):
            kept = executed[0]
        for boundary in self._boundaries:
            if boundary is not readable[kept]:
                boundary.close()
        self._boundaries = [readable[kept]]
        self._sources = (readable[kept].source,)
        return readable[kept], records[kept]

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

    def _check_first(self, experts: Tensor, boundary: Boundary) -> None:
        """Check K and the ids once; the only place that waits for the device."""
        top_k = experts.shape[-1]
        if self._spec is not None and self._spec.top_k != top_k:
            raise ValueError(
                f"{self._kind} routes to {top_k} experts, its RoutingSpec says top_k {self._spec.top_k}"
            )
        low, high = (int(bound) for bound in experts.aminmax())
        if low < 0 or high >= self.num_experts:
            raise ValueError(
                f"{self._kind}: the {boundary.source} index holds ids from {low} to {high}, allowed: 0 to "
                f"{self.num_experts - 1}; under expert parallelism record with source='router'"
            )
        if bool((experts[..., 1:] == experts[..., :-1]).any()):
            raise ValueError(
                f"{self._kind}: one token is routed to the same expert twice; this is not a top-k router"
            )
        if contradiction := boundary.witness(experts):
            raise ValueError(contradiction)
        self._checked = True
