"""Top-K overlap, the quality measure of every predictor: pure functions.

Shapes: T tokens, L MoE layers, E experts, K top-k. The overlap of a token in a layer is
``|predicted top-K ∩ true| / K``; reports take its mean over tokens and layers.
"""

from __future__ import annotations

from torch import Tensor


def overlap_counts(predicted: Tensor, true: Tensor) -> Tensor:
    """Number of true experts that were predicted.

    Args:
        predicted: Integer ``[..., K']``, expert ids, distinct along the last axis, any order.
        true: Integer ``[..., K]``, expert ids, distinct along the last axis, any order; other axes the same.

    Returns:
        int64 ``[...]``, between 0 and min(K', K).

    >>> import torch
    >>> overlap_counts(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[4, 9, 1, 7]]))
    tensor([2])
    """
    return (predicted.unsqueeze(-1) == true.unsqueeze(-2)).sum(dim=(-2, -1))


def topk_overlap_counts(scores: Tensor, true: Tensor) -> Tensor:
    """Number of true experts among the K best scored ones.

    Args:
        scores: Float ``[..., E]``.
        true: Integer ``[..., K]``, distinct expert ids; leading axes as ``scores``.

    Returns:
        int64 ``[...]``, between 0 and K. Divide by K for the top-K overlap.
    """
    return overlap_counts(scores.topk(true.shape[-1], dim=-1, sorted=False).indices, true)
