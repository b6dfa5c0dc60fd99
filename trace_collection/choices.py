"""Choices made inside a MoE block, for families that show no index at a module boundary.

Llama-4's router returns scores, and a block written in one piece returns hidden states only; the choice itself is
still a call of ``topk`` (``argmax``, ``max``) over the scores of E experts, which can be watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ChoiceWatcher(TorchFunctionMode):
    """Keeps the index of the last choice among E experts while a block runs.

    Register `begin` as forward pre-hook and `end` as forward hook (``always_call=True``) of the block.

    Args:
        num_experts: E; choices among another number of scores (groups of experts) are passed over.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._running = False
        self._by_top_k = False
        self.index: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function and note its index where it chooses among E scores."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "topk" or (name in ("argmax", "max") and not self._by_top_k):
            scores = args[0] if args else kwargs.get("input")
            index = _chosen(scores, result, self._num_experts)
            if index is not None:
                self.index, self._by_top_k = index, name == "topk"
        return result

    def begin(self, _block: nn.Module, _args: object) -> None:
        """Start watching."""
        self.index, self._by_top_k, self._running = None, False, True
        super().__enter__()  # type: ignore[no-untyped-call]

    def end(self, _block: nn.Module, _args: object, _output: object) -> None:
        """Stop watching, also where the block's forward raised."""
        if self._running:
            self._running = False
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _chosen(scores: object, result: object, num_experts: int) -> Tensor | None:
    """Index ``[tokens, K]`` that a function chose over the last dimension of scores of E experts, if it did."""
    index = result[1] if isinstance(result, tuple) and len(result) > 1 else result
    if not isinstance(scores, Tensor) or not isinstance(index, Tensor) or index.is_floating_point():
        return None
    if scores.ndim < 2 or scores.shape[-1] != num_experts:
        return None
    if index.shape == scores.shape[:-1]:
        return index.reshape(-1, 1)
    return index.reshape(-1, index.shape[-1]) if index.shape[:-1] == scores.shape[:-1] else None


class CallCounter:
    """Counts the rows that each expert of a list is called with: a witness of a choice.

    Args:
        experts: List of E experts.
    """

    def __init__(self, experts: nn.ModuleList) -> None:
        self.rows = [0] * len(experts)
        self._handles = [
            expert.register_forward_pre_hook(self._hook(slot), with_kwargs=True)
            for slot, expert in enumerate(experts)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, slot: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = next((value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)), None)
            if hidden is not None:
                self.rows[slot] += hidden.shape[:-1].numel()

        return hook
