"""Learning rate as a pure function of a run's progress."""

from __future__ import annotations

import math


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Linear rise, then a cosine to zero.

    Args:
        progress: Share of the run that is done; values outside 0 to 1 are clamped.
        warmup: Share of the run in which the factor rises from near 0 to 1.

    Returns:
        Factor on the peak learning rate, between 0 and 1.

    >>> [round(learning_rate_factor(p, 0.1), 3) for p in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.01, 0.5, 1.0, 0.5, 0.0]
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
