"""Learning rate as a pure function of a run's progress."""

from __future__ import annotations

import math


def learning_rate_factor(progress: float, warmup: float, cycles: int = 1) -> float:
    """Linear rise, then a cosine to zero; repeated in every cycle.

    Args:
        progress: Share of the run that is done; values outside 0 to 1 are clamped.
        warmup: Share of a cycle in which the factor rises from near 0 to 1.
        cycles: Equal parts of the run that each rise and fall, at least 1.

    Returns:
        Factor on the peak learning rate, between 0 and 1.

    >>> [round(learning_rate_factor(p, 0.1), 3) for p in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.01, 0.5, 1.0, 0.5, 0.0]
    >>> [round(learning_rate_factor(p, 0.1, cycles=2), 3) for p in (0.025, 0.275, 0.4999, 0.5, 0.55, 1.0)]
    [0.5, 0.5, 0.0, 0.01, 1.0, 0.0]
    """
    progress = min(max(progress, 0.0), 1.0) * cycles
    progress -= min(int(progress), cycles - 1)
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
