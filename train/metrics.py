"""Stateful metrics around the pure functions of `ecospec.predictor.overlap`."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from ecospec.predictor.overlap import topk_overlap_counts


class TopKOverlap(Metric):
    """Top-K overlap per layer, accumulated over batches and reduced over processes.

    Args:
        num_layers: L.
        top_k: K.
    """

    full_state_update = False
    higher_is_better = True
    hits: Tensor
    tokens: Tensor

    def __init__(self, num_layers: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.add_state("hits", torch.zeros(num_layers, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, experts: Tensor, mask: Tensor) -> None:
        """Count one batch.

        Args:
            scores: Float ``[B, T, L, E]``.
            experts: Integer ``[B, T, L, K]``.
            mask: Bool ``[B, T]``, true where a token counts.
        """
        counts = topk_overlap_counts(scores, experts.long())
        self.hits += (counts * mask.unsqueeze(-1)).sum(dim=(0, 1))
        self.tokens += mask.sum()

    def compute(self) -> Tensor:
        """Overlap per layer, float32 ``[L]``, between 0 and 1; its mean is the overlap of the predictor."""
        return self.hits.float() / (self.tokens.clamp_min(1) * self.top_k).float()
