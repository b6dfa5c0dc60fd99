"""The neural predictor's session: one forward per draft tree on top of a KV cache.

Shapes: T context tokens, N tree nodes, L MoE layers, E experts. After ``score`` the cache holds the context's rows
and then the tree's N rows; ``commit`` moves the rows of the committed path up behind the context and forgets the
rest. Positions and masks come from tensor operations and lengths from shapes, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ecospec.predictor.model import RoutingPredictorModel

_FIRST_CAPACITY = 256


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in storage that doubles when full.

    transformers' own dynamic layer copies the whole context at every update; here a step writes only its new rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._storage: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append rows ``[1, heads, n, head_dim]`` and return all of them."""
        del args, kwargs
        end = self.length + key_states.shape[-2]
        storage = self._reserve(end, key_states, value_states)
        for stored, new in zip(storage, (key_states, value_states), strict=True):
            stored[..., self.length : end, :] = new
        self._set_length(end)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _reserve(self, length: int, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Storage with room for ``length`` rows."""
        if self._storage is None or self._storage[0].shape[-2] < length:
            capacity = max(_FIRST_CAPACITY, 1 << (length - 1).bit_length())
            grown = tuple(new.new_empty((*new.shape[:-2], capacity, new.shape[-1])) for new in states)
            if self._storage is not None:
                for stored, old in zip(grown, self._storage, strict=True):
                    stored[..., : self.length, :] = old[..., : self.length, :]
            self._storage = (grown[0], grown[1])
            self.is_initialized = True
        return self._storage

    def _set_length(self, length: int) -> None:
        """Say how many rows are in use."""
        assert self._storage is not None
        self.length = length
        self.keys, self.values = (stored[..., :length, :] for stored in self._storage)

    def truncate(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        if self._storage is not None:
            self._set_length(length)

    def keep(self, start: int, rows: Tensor) -> None:
        """Move rows ``start + rows`` (int64 ``[n]``) to ``start``… and forget what follows them."""
        assert self._storage is not None
        end = start + rows.shape[0]
        for stored in self._storage:
            stored[..., start:end, :] = stored.index_select(-2, rows + start)
        self._set_length(end)

    def get_seq_length(self) -> int:
        """Rows in use."""
        return self.length


def ancestors(parents: Tensor) -> Tensor:
    """Who lies on each node's path.

    Args:
        parents: int64 ``[N]``, -1 for the root, else an index below the node's own.

    Returns:
        bool ``[N, N]``; row i is true at i and at its ancestors.
    """
    nodes = parents.shape[0]
    index = torch.arange(nodes, device=parents.device)
    # Path reachability by repeated squaring of (identity + parent): after k squarings it spans 2^k edges.
    reach = ((parents.unsqueeze(1) == index) | (index.unsqueeze(1) == index)).float()
    for _ in range(max(nodes - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


class TreeSession:
    """Session of the neural predictor; see `ecospec.predictor.session.PredictorSession`.

    Args:
        model: The network, with its target embedding.
        calibrate: From logits ``[N, L, E]`` to scores.
    """

    def __init__(self, model: RoutingPredictorModel, calibrate: Callable[[Tensor], Tensor]) -> None:
        self._model = model
        self._calibrate = calibrate
        self._device = model.head.weight.device
        self._layers = [GrowingLayer() for _ in range(int(model.backbone.config.num_hidden_layers))]
        self._cache: Cache | None = Cache(layers=self._layers)
        self._length = 0
        self._pending: Tensor | None = None  # parents of the last scored tree, whose rows are in the cache

    @property
    def context_length(self) -> int:
        """Tokens in the context."""
        return self._length

    @torch.no_grad()
    def prefill(self, ids: Tensor, experts: Tensor | None = None) -> None:
        """Append tokens to the context; ``experts`` are not looked at.

        Args:
            ids: int64 ``[T]``; may be empty.
            experts: Ignored.

        Raises:
            ValueError: Wrong shape, or the session is closed.
        """
        del experts
        cache = self._open_cache()
        if ids.ndim != 1:
            raise ValueError(f"prefill takes token ids of shape [T], got {tuple(ids.shape)}")
        self._drop_tree()
        if ids.shape[0]:
            self._model.hidden_states(ids.to(self._device).unsqueeze(0), cache=cache)
            self._length += ids.shape[0]

    @torch.no_grad()
    def score(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Score every node of a draft tree in one forward; the context is not changed.

        Args:
            tokens: int64 ``[N]``, node 0 the root.
            parents: int64 ``[N]``, -1 for the root, else an index below the node's own.

        Returns:
            ``[N, L, E]`` calibrated logits, float32 (float64 for a float64 predictor).

        Raises:
            ValueError: Wrong shapes, or the session is closed.
        """
        cache = self._open_cache()
        if tokens.ndim != 1 or tokens.shape != parents.shape or not tokens.shape[0]:
            raise ValueError(
                f"score takes tokens and parents of one shape [N], N > 0, got {tuple(tokens.shape)} "
                f"and {tuple(parents.shape)}"
            )
        self._drop_tree()
        tokens, parents = tokens.to(self._device), parents.to(self._device)
        on_path = ancestors(parents)
        positions = on_path.sum(dim=-1) - 1 + self._length
        states = self._model.hidden_states(
            tokens.unsqueeze(0),
            attention_mask=self._tree_mask(on_path),
            position_ids=positions.unsqueeze(0),
            cache=cache,
        )
        self._pending = parents
        return self._calibrate(self._model.heads(states[0]))

    def _tree_mask(self, on_path: Tensor) -> Tensor:
        """Additive mask ``[1, 1, N, T + N]``: every node sees the context and its own path."""
        dtype = self._model.head.weight.dtype
        nodes = on_path.shape[0]
        mask = torch.zeros((nodes, self._length + nodes), dtype=dtype, device=self._device)
        # Additive, because eager attention takes a boolean mask for numbers.
        mask[:, self._length :].masked_fill_(~on_path, torch.finfo(dtype).min)
        return mask[None, None]

    @torch.no_grad()
    def commit(self, path: Tensor, experts: Tensor | None = None) -> None:
        """Move nodes of the last scored tree into the context; ``experts`` are not looked at.

        Args:
            path: int64 ``[n]``, node indices from the root downwards, each the parent of the next. Its content is
                checked only on the CPU, where looking at it costs no wait.
            experts: Ignored.

        Raises:
            ValueError: No scored tree, not a path from its root, or the session is closed.
        """
        del experts
        self._open_cache()
        if self._pending is None:
            raise ValueError("commit needs a scored tree; call score first")
        if path.ndim != 1 or not 0 < path.shape[0] <= self._pending.shape[0]:
            raise ValueError(
                f"commit takes a path of shape [n] n <= {self._pending.shape[0]}, got {tuple(path.shape)}"
            )
        if path.device.type == "cpu" and self._pending.device.type == "cpu":
            _require_path(path, self._pending)
        rows = path.to(self._device)
        for layer in self._layers:
            layer.keep(self._length, rows)
        self._length += path.shape[0]
        self._pending = None

    def close(self) -> None:
        """Release the cache; the session cannot be used afterwards."""
        self._cache = None
        self._layers = []
        self._pending = None

    def _open_cache(self) -> Cache:
        """The cache of an open session."""
        if self._cache is None:
            raise ValueError("this predictor session is closed; open another with predictor.session()")
        return self._cache

    def _drop_tree(self) -> None:
        """Forget the rows of a tree that was scored and not committed."""
        if self._pending is not None:
            for layer in self._layers:
                layer.truncate(self._length)
            self._pending = None


@torch.no_grad()
def require_tree_scoring(model: RoutingPredictorModel, tolerance: float = 2e-5) -> None:
    """Refuse a backbone whose tree scores over a KV cache are not those of a forward pass over each path.

    Families differ in what they do with positions, masks and caches, and a wrong one raises nothing. Two small
    trees and a look at later tokens show it.

    Args:
        model: The network, with its target embedding.
        tolerance: Largest difference, in units of the scores' spread. With fresh weights, where attention hardly
            moves the scores, float32 rounding makes 1e-6 and a wrong mask 1e-4; with trained ones both are larger.

    Raises:
        ValueError: It cannot score trees; the message names the family.
    """
    family, training = model.backbone.config.model_type, model.training
    ids = torch.randint(model.spec.vocab_size, (8,), generator=torch.Generator().manual_seed(0))
    tokens, parents = ids[4:], torch.tensor([-1, 0, 0, 1])
    paths = ([4], [4, 5], [4, 6], [4, 5, 7])
    try:
        session = TreeSession(model.eval(), lambda scores: scores)
        session.prefill(ids[:4])
        found = session.score(tokens, parents)
        session.commit(torch.tensor([0, 2]))
        found = torch.cat([found, session.score(ids[:1], parents[:1])])
        rows = [torch.cat([ids[:4], ids[path]]) for path in paths] + [torch.cat([ids[:5], ids[6:7], ids[:1]])]
        expected = torch.stack([model(row.unsqueeze(0))[0, -1] for row in rows])
        found = torch.cat([found, model(ids.unsqueeze(0))[0, :4]])
        expected = torch.cat([expected, model(ids[:4].unsqueeze(0))[0]])
    except Exception as error:  # whatever the family's code raises for a cache or mask it was not made for
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"backbone family {family!r} cannot score draft trees: {reason[:200]}") from error
    finally:
        model.train(training)
    difference = float((found - expected).abs().max() / expected.std())
    if not difference < tolerance:
        raise ValueError(
            f"backbone family {family!r} cannot score draft trees: with a tree mask and a KV cache scores differ "
            f"by {difference:.1e} of their spread from those of plain forward passes; use e.g. qwen3 or llama"
        )


def _require_path(path: Tensor, parents: Tensor) -> None:
    """Refuse node indices that are not a path from the root."""
    nodes = path.tolist()
    if any(not 0 <= node < parents.shape[0] for node in nodes) or parents[path].tolist() != [-1, *nodes[:-1]]:
        raise ValueError(f"commit takes a path from the root, each node the parent of the next; got {nodes}")
