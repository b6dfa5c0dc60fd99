"""How far a predictor's probabilities can be believed: pure functions.

Shapes: E experts, K top-k; ``...`` stands for any leading axes, usually ``[T, L]``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def marginal_probabilities(scores: Tensor, top_k: int) -> Tensor:
    """Predicted probability that each expert is used: ``min(1, K · softmax(scores))``.

    Predictors are trained to put mass 1/K on each of the K used experts, so a calibrated softmax is the probability
    of use divided by K.

    Args:
        scores: float ``[..., E]`` logits.
        top_k: K.

    Returns:
        float32 ``[..., E]`` in 0 … 1.
    """
    return (torch.softmax(scores.float(), dim=-1) * top_k).clamp_(max=1.0)


def calibration_counts(probabilities: Tensor, outcomes: Tensor, bins: int = 15) -> Tensor:
    """Sums from which a reliability curve is drawn; the sums of several calls may be added.

    Args:
        probabilities: float, any shape, in 0 … 1.
        outcomes: bool, same shape: what happened.
        bins: Number of bins of equal width.

    Returns:
        float64 ``[bins, 3]``: per bin the number of predictions, the sum of their probabilities, the number of
        outcomes that were true. Bin b holds ``b/bins <= p < (b+1)/bins``, the last one 1 too.

    Raises:
        ValueError: The shapes differ.
    """
    if probabilities.shape != outcomes.shape:
        raise ValueError(f"shapes differ: {tuple(probabilities.shape)} and {tuple(outcomes.shape)}")
    flat = probabilities.reshape(-1)
    index = (flat * bins).long().clamp_(max=bins - 1)
    return torch.stack(
        [
            torch.bincount(index, minlength=bins).double(),
            torch.bincount(index, weights=flat.double(), minlength=bins),
            torch.bincount(index, weights=outcomes.reshape(-1).double(), minlength=bins),
        ],
        dim=-1,
    )


def expected_calibration_error(counts: Tensor) -> float:
    """Mean over predictions of |mean probability - share of true outcomes| of their bin.

    Args:
        counts: float64 ``[bins, 3]``, see `calibration_counts`.

    Returns:
        The error, 0 … 1; NaN without predictions.
    """
    total = counts[:, 0].sum()
    if total == 0:
        return float("nan")
    return float((counts[:, 1] - counts[:, 2]).abs().sum() / total)
