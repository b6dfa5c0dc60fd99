"""Forced routing: let a step touch exactly as many distinct experts as a measurement asks for.

Shapes: n tokens, K experts per token, E experts, U distinct experts of a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecospec.trace_collection.hooks import MoELayer


class ForcedRouting:
    """Replaces the index that experts modules are called with; a context manager.

    Args:
        layers: The target's MoE layers.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._routes: list[Tensor] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Register the hooks for the duration of a block."""
        handles = [
            layer.experts.register_forward_pre_hook(self._hook(slot), with_kwargs=True)
            for slot, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def set(self, routes: list[Tensor] | None) -> None:
        """Choose the routing of the next forwards: int64 ``[n, K]`` per layer, or None for the target's own."""
        self._routes = routes

    def _hook(self, slot: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._routes is None:
                return None
            route = self._routes[slot]

            def swap(value: Any) -> Any:
                is_index = isinstance(value, Tensor) and not value.is_floating_point()
                return route.to(value.device, value.dtype) if is_index and value.shape == route.shape else value

            return tuple(swap(value) for value in args), {name: swap(value) for name, value in kwargs.items()}

        return hook


def forced_routes(tokens: int, top_k: int, unique: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Draw an index with exactly ``unique`` distinct experts, each token's own K distinct.

    Args:
        tokens: n.
        top_k: K.
        unique: U, from K to min(E, n * K).
        num_experts: E.
        generator: On the CPU.

    Returns:
        int64 ``[n, K]``.
    """
    assert top_k <= unique <= min(num_experts, tokens * top_k)
    chosen = torch.randperm(num_experts, generator=generator)[:unique]
    return chosen[torch.arange(tokens * top_k) % unique].view(tokens, top_k)


def unique_grid(tokens: int, top_k: int, num_experts: int, points: int) -> list[int]:
    """Return the values of U to measure for n tokens: from K to min(E, n * K), both ends included, evenly spaced.

    >>> unique_grid(4, top_k=4, num_experts=64, points=4)
    [4, 8, 12, 16]
    >>> unique_grid(1, top_k=4, num_experts=64, points=4)
    [4]
    """
    low, high = top_k, min(num_experts, tokens * top_k)
    count = min(points, high - low + 1)
    if count == 1:
        return [low]
    return sorted({round(low + (high - low) * step / (count - 1)) for step in range(count)})
