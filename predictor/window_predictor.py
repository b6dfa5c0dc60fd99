"""Predictors that look at a few tokens and no further: the base of all baselines, and their session.

What such a predictor knows of a node of a draft tree is its token, the C tokens before it (found along its
ancestors and then in the context), its position, and the experts of the last token whose experts are known.

Shapes: N nodes, C context tokens, T tokens, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from ecospec.predictor.bundle_files import PredictorBundle


class WindowPredictor(PredictorBundle):
    """Base of the predictors whose scores depend on a few tokens."""

    @property
    def context_size(self) -> int:
        """C, how many tokens before a node it looks at."""
        return 1

    @abc.abstractmethod
    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """Uncalibrated scores of some nodes.

        Args:
            tokens: int64 ``[N]``.
            context: int64 ``[N, C]``, the tokens before each, the nearest first, -1 where there is none.
            positions: int64 ``[N]``, position in the sequence.
            last_experts: int64 ``[N, L, K]``, experts of the last token whose experts are known; None where no
                experts are known.

        Returns:
            ``[N, L, E]``.
        """

    def session(self) -> WindowSession:
        """Open a session for one sequence.

        Raises:
            ValueError: The predictor lacks something that it reads.
        """
        return WindowSession(self)

    @torch.no_grad()
    def score_sequence(self, ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """See `PredictorBundle.score_sequence`."""
        ids = ids.to(self.device)
        context = tokens_before(ids, self.context_size)
        positions = torch.arange(ids.shape[0], device=ids.device)
        if experts is None or not self.needs_experts or not ids.shape[0]:
            return self.calibrated(self.node_scores(ids, context, positions, None))
        experts = experts.to(device=self.device, dtype=torch.int64)
        first = self.node_scores(ids[:1], context[:1], positions[:1], None)
        others = self.node_scores(ids[1:], context[1:], positions[1:], experts[:-1])
        return self.calibrated(torch.cat([first, others]))


def tokens_before(ids: Tensor, count: int) -> Tensor:
    """The tokens before every token of a sequence.

    Args:
        ids: int64 ``[..., T]``.
        count: C, how many.

    Returns:
        int64 ``[..., T, C]``, the nearest first, -1 before the start.

    >>> tokens_before(torch.tensor([7, 8, 9]), 2).tolist()
    [[-1, -1], [7, -1], [8, 7]]
    """
    padded = torch.nn.functional.pad(ids, (count, 0), value=-1)
    places = torch.arange(ids.shape[-1], device=ids.device).unsqueeze(-1)
    return padded[..., places + torch.arange(count - 1, -1, -1, device=ids.device)]


class WindowSession:
    """Session of a `WindowPredictor`; see `ecospec.predictor.session.PredictorSession`."""

    def __init__(self, predictor: WindowPredictor) -> None:
        self._predictor: WindowPredictor | None = predictor
        self._length = 0
        # The last C tokens, the nearest last.
        self._recent = torch.full((predictor.context_size,), -1, dtype=torch.int64, device=predictor.device)
        self._last_experts: Tensor | None = None
        self._tree: Tensor | None = None

    def prefill(self, ids: Tensor, experts: Tensor | None = None) -> None:
        """Append tokens to the context; see the protocol.

        Raises:
            ValueError: Wrong shape, or the session is closed.
        """
        predictor = self._open()
        if ids.ndim != 1:
            raise ValueError(f"prefill takes token ids of shape [T], got {tuple(ids.shape)}")
        self._tree = None
        self._append(ids.to(predictor.device), experts)

    @torch.no_grad()
    def score(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Score every node of a draft tree; see the protocol.

        Raises:
            ValueError: Wrong shapes, or the session is closed.
        """
        predictor = self._open()
        if tokens.ndim != 1 or tokens.shape != parents.shape or not tokens.shape[0]:
            raise ValueError(
                f"score takes tokens and parents of one shape [N], N > 0, got {tuple(tokens.shape)} "
                f"and {tuple(parents.shape)}"
            )
        tokens, parents = tokens.to(predictor.device), parents.to(predictor.device)
        self._tree = tokens
        positions = tree_depths(parents) + self._length
        last = self._last_experts
        experts = None if last is None else last.expand(tokens.shape[0], *last.shape)
        return predictor.calibrated(
            predictor.node_scores(tokens, self._context(tokens, parents), positions, experts)
        )

    def commit(self, path: Tensor, experts: Tensor | None = None) -> None:
        """Move nodes of the last scored tree into the context; see the protocol.

        Raises:
            ValueError: No scored tree, wrong shape, or the session is closed.
        """
        predictor = self._open()
        if self._tree is None:
            raise ValueError("commit needs a scored tree; call score first")
        if path.ndim != 1 or not 0 < path.shape[0] <= self._tree.shape[0]:
            raise ValueError(
                f"commit takes a path of shape [n] with 1 to {self._tree.shape[0]} nodes, got {tuple(path.shape)}"
            )
        tokens = self._tree[path.to(predictor.device)]
        self._tree = None
        self._append(tokens, experts)

    def close(self) -> None:
        """Release the session; it cannot be used afterwards."""
        self._predictor = None
        self._tree = None
        self._last_experts = None

    def _context(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """The tokens before every node, int64 ``[N, C]``: its ancestors', then the context's."""
        size = self._recent.shape[0]
        places = parents.new_empty((parents.shape[0], size))
        place = torch.arange(parents.shape[0], device=parents.device)
        for step in range(size):
            # Nodes count up from 0, the context's tokens down from -1, which is what the root calls its parent.
            place = torch.where(place >= 0, parents[place.clamp(min=0)], place - 1)
            places[:, step] = place
        return torch.cat([self._recent, tokens])[places + size]

    def _append(self, tokens: Tensor, experts: Tensor | None) -> None:
        """Remember the last tokens and, where known, the last one's experts."""
        predictor = self._open()
        count = tokens.shape[0]
        if not count:
            return
        self._length += count
        self._recent = torch.cat([self._recent, tokens])[count:]
        if experts is not None:
            expected = (count, predictor.spec.num_layers, predictor.spec.top_k)
            if tuple(experts.shape) != expected:
                raise ValueError(f"experts must be [tokens, L, K] = {expected}, got {tuple(experts.shape)}")
            self._last_experts = experts[-1].to(device=predictor.device, dtype=torch.int64)

    def _open(self) -> WindowPredictor:
        """The predictor of an open session."""
        if self._predictor is None:
            raise ValueError("this predictor session is closed; open another with predictor.session()")
        return self._predictor


def tree_depths(parents: Tensor) -> Tensor:
    """Edges between each node and its root.

    Args:
        parents: int64 ``[N]``, -1 for the root.

    Returns:
        int64 ``[N]``.

    >>> tree_depths(torch.tensor([-1, 0, 0, 1, 3])).tolist()
    [0, 1, 1, 2, 3]
    """
    above, depths = parents, (parents >= 0).long()
    # Pointer doubling: after k rounds 2^k edges are counted; a path has fewer than N, known from the shape.
    for _ in range((parents.shape[0] - 1).bit_length()):
        climbed = above.clamp(min=0)
        depths = depths + torch.where(above >= 0, depths[climbed], 0)
        above = torch.where(above >= 0, above[climbed], above)
    return depths
