"""A KV cache that grows in place.

transformers' dynamic cache copies all keys and values at every step; for a small target and a wide batch that takes
longer than the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer as views of a buffer ``[B, heads, capacity, head_dim]`` that is filled in place.

    Args:
        capacity: Positions to reserve; the buffer doubles where that is too little.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Append keys and values ``[B, heads, new, head_dim]`` and return all of them."""
        past = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        total = past + key_states.shape[-2]
        if self._buffers is None or total > self._capacity:
            self._grow(key_states, value_states, past, total)
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., past:total, :] = new
        self.keys, self.values = (buffer[..., :total, :] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences."""
        if self._buffers is not None:
            total = self.get_seq_length()
            keys, values = self._buffers
            self._buffers = keys, values = keys[indices], values[indices]
            self.keys, self.values = keys[..., :total, :], values[..., :total, :]

    def _grow(self, key_states: Tensor, value_states: Tensor, past: int, total: int) -> None:
        if self._buffers is not None:
            self._capacity = max(total, 2 * self._capacity)
        self._capacity = max(total, self._capacity)
        buffers = []
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            buffer = new.new_empty(*new.shape[:-2], self._capacity, new.shape[-1])
            if past:
                buffer[..., :past, :] = old
            buffers.append(buffer)
        self._buffers = (buffers[0], buffers[1])


def make_cache(model: torch.nn.Module, capacity: int) -> Cache:
    """Make a cache for the target: ours where every layer attends to everything, else transformers' own.

    Args:
        model: transformers causal language model.
        capacity: Positions that will be needed.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    if all(kind == "full_attention" for kind in kinds) and (kinds or not getattr(text, "sliding_window", None)):
        return Cache(layers=[GrowingLayer(capacity) for _ in range(text.num_hidden_layers)])
    return DynamicCache(config=config)
