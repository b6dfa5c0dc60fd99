"""The places where a MoE layer shows which experts it runs: its router, its experts, the choice inside its block.

A boundary hooks every MoE layer of a target and keeps what one forward showed, on the model's devices; it copies
nothing to the host. Shapes: N tokens of one forward, L MoE layers, E routed experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecospec.trace_collection.choices import CallCounter, ChoiceWatcher
from ecospec.trace_collection.discovery import MoELayer, flat, index_and_weights


class Boundary:
    """What one place of every MoE layer showed during one forward.

    Args:
        kind: Class name of the target, for messages.
        layers: The target's MoE layers.
        want_weights: Keep the weights beside the index, too.
    """

    source = ""

    def __init__(self, kind: str, layers: Sequence[MoELayer], *, want_weights: bool) -> None:
        self._kind = kind
        self._layers = layers
        self._want_weights = want_weights
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.complaint: str | None = None
        self.indices: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []

    def open(self) -> None:
        """Register the hooks."""
        for slot, layer in enumerate(self._layers):
            self._handles += self._hook(slot, layer)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """Forget what the forward before showed."""
        self.complaint = None
        self.indices = [[] for _ in self._layers]
        self.weights = [[] for _ in self._layers]

    @property
    def silent(self) -> bool:
        """Whether this place shows no choice: no index, no weights, or its modules are never called."""
        return self.complaint is not None or not any(self.indices)

    def problem(self, tokens: int) -> str | None:
        """Why what was seen cannot be the routing of a forward over ``tokens`` tokens; None if it can."""
        if self.complaint is not None:
            return self.complaint
        for layer, parts in zip(self._layers, self.indices, strict=True):
            rows = sum(part.shape[0] for part in parts)
            if rows != tokens:
                return (
                    f"{self._kind}: layer {layer.layer_index} recorded {rows} rows for {tokens} tokens; every "
                    f"token must pass its router exactly once ({NOT_FIRED})"
                )
            if len({part.shape[1] for part in [*self.indices[0], *parts]}) > 1:
                return f"{self._kind}: its layers route to different numbers of experts; targets need one K"
        return None

    def witness(self, experts: Tensor) -> str | None:
        """Why the ids ``[N, L, K]`` of a first forward contradict what the experts ran; None if they do not."""
        del experts
        return None

    def stacked(self) -> tuple[Tensor, Tensor | None]:
        """Ids, int64 ascending ``[N, L, K]``, and the weights beside them, on the last layer's device."""
        experts, order = _stack(self.indices).long().sort(dim=-1)
        weights = _stack(self.weights).gather(-1, order) if self._want_weights else None
        self.indices, self.weights = [], []
        return experts, weights

    def _hook(self, slot: int, layer: MoELayer) -> list[torch.utils.hooks.RemovableHandle]:
        raise NotImplementedError

    def _note(self, slot: int, index: Tensor | None, weights: Tensor | None) -> None:
        layer = self._layers[slot]
        if index is None:
            other = self._other(layer)
            self._complain(
                f"the {self.source} of layer {layer.layer_index} shows no [tokens, K] index of experts", other
            )
            return
        self.indices[slot].append(index.detach())
        if self._want_weights and weights is None:
            other = f"{self._other(layer)} or without weights"
            self._complain(
                f"the {self.source} of layer {layer.layer_index} shows no weights beside its index", other
            )
        elif self._want_weights and weights is not None:
            self.weights[slot].append(weights.detach())

    def _other(self, layer: MoELayer) -> str:
        """Another source that may show more."""
        source = "router" if self.source != "router" else "experts" if layer.experts_take_index else "topk"
        return f"source={source!r}"

    def _complain(self, what: str, other: str) -> None:
        self.complaint = self.complaint or f"{self._kind}: {what}; record with {other}"


class RouterBoundary(Boundary):
    """What routers return."""

    source = "router"

    def _hook(self, slot: int, layer: MoELayer) -> list[torch.utils.hooks.RemovableHandle]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
            self._note(slot, *index_and_weights(flat(output)))

        return [layer.router.register_forward_hook(hook)]


class ExpertsBoundary(Boundary):
    """What experts modules are called with."""

    source = "experts"

    def _hook(self, slot: int, layer: MoELayer) -> list[torch.utils.hooks.RemovableHandle]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._note(slot, *index_and_weights([*args, *kwargs.values()]))

        return [layer.experts.register_forward_pre_hook(hook, with_kwargs=True)]


class ChoiceBoundary(Boundary):
    """The top-k call inside the block."""

    source = "topk"

    def open(self) -> None:
        """Register the hooks, and until the first forward is over count the calls of lists of experts."""
        super().open()
        lists = [layer.experts for layer in self._layers if isinstance(layer.experts, nn.ModuleList)]
        self._counters = [CallCounter(experts) for experts in lists] if len(lists) == len(self._layers) else []

    def close(self) -> None:
        """Remove the hooks."""
        super().close()
        for counter in self._counters:
            counter.close()

    def witness(self, experts: Tensor) -> str | None:
        """Compare with the rows that the submodules of a list of experts were called with."""
        for slot, (layer, counter) in enumerate(zip(self._layers, self._counters, strict=False)):
            counter.close()
            chosen = experts[:, slot].flatten().bincount(minlength=layer.num_experts).tolist()
            dense = len(set(counter.rows)) == 1 and counter.rows[0] == len(experts)
            if chosen != counter.rows and not dense:
                return (
                    f"{self._kind}: the experts of layer {layer.layer_index} ran {counter.rows} rows, its top-k "
                    f"chose {chosen}; the choice inside this block is not what it executes"
                )
        return None

    def _hook(self, slot: int, layer: MoELayer) -> list[torch.utils.hooks.RemovableHandle]:
        watcher = ChoiceWatcher(layer.num_experts)

        def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            watcher.end(module, args, output)
            self._note(slot, watcher.index, None)

        return [
            layer.block.register_forward_pre_hook(watcher.begin),
            layer.block.register_forward_hook(hook, always_call=True),
        ]


BOUNDARIES: dict[str, type[Boundary]] = {
    boundary.source: boundary for boundary in (RouterBoundary, ExpertsBoundary, ChoiceBoundary)
}

NOT_FIRED = (
    "hooks do not fire in modules compiled or captured in a CUDA graph before the recorder was opened; "
    "record the uncompiled model"
)


def _stack(parts: list[list[Tensor]]) -> Tensor:
    """Stack per-layer pieces to ``[N, L, K]`` on the device of the last layer."""
    device = parts[-1][-1].device
    rows = [(layer[0] if len(layer) == 1 else torch.cat(layer)).to(device, non_blocking=True) for layer in parts]
    return torch.stack(rows, dim=1)
