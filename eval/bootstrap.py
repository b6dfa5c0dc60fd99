"""Confidence intervals by resampling groups: the one place where an interval of this project is computed.

Every reported number is a *ratio of sums*: something counted per group (overlapping experts, seconds) over
something else counted per group (routed experts, seconds of the other policy). Samples of one prompt and chunks of
one file share a group, so groups, not tokens, are resampled. Two predictors or policies are compared on the *same*
resamples (paired).

Drawing G groups out of G with replacement is the same as giving the groups multinomial counts, so all resamples are
one matrix of weights and every statistic is a matrix product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
LEVEL = 0.95
SEED = 0

#: Why an interval is missing; shown wherever the interval would stand.
TOO_FEW_GROUPS = "no interval: it needs at least 2 groups"

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A point value with its bootstrap interval.

    Attributes:
        mean: The ratio of sums (or the difference of two) over all groups.
        low: Lower end, None if there were fewer than two groups.
        high: Upper end, None if there were fewer than two groups.
        groups: Number of groups with a denominator above zero.
    """

    mean: float
    low: float | None
    high: float | None
    groups: int

    @property
    def note(self) -> str | None:
        """Why ``low`` and ``high`` are None, or None if they are there."""
        return TOO_FEW_GROUPS if self.low is None else None

    def to_dict(self) -> dict[str, Any]:
        """Return the four fields, and ``note`` where the interval is missing."""
        found: dict[str, Any] = {"mean": self.mean, "low": self.low, "high": self.high, "groups": self.groups}
        return found if self.note is None else found | {"note": self.note}


def resample_weights(groups: int, *, resamples: int = RESAMPLES, seed: int = SEED) -> npt.NDArray[np.int64]:
    """How often each group is drawn in each resample.

    Args:
        groups: Number of groups, G.
        resamples: Number of resamples, R.
        seed: Seed of the generator; equal arguments give equal weights.

    Returns:
        int64 ``[R, G]``; every row adds up to G.

    Raises:
        ValueError: ``groups`` or ``resamples`` is below 1.
    """
    if groups < 1 or resamples < 1:
        raise ValueError(f"a bootstrap needs at least 1 group and 1 resample, got {groups} and {resamples}")
    generator = np.random.default_rng(seed)
    return generator.multinomial(groups, np.full(groups, 1.0 / groups), size=resamples)


def _checked(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> tuple[Array, Array]:
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    if top.ndim != 1 or top.shape != bottom.shape or not top.size:
        raise ValueError(
            f"numerator and denominator must be two equally long vectors, one entry a group, got shapes "
            f"{top.shape} and {bottom.shape}"
        )
    if not (np.isfinite(top).all() and np.isfinite(bottom).all()) or (bottom < 0).any() or bottom.sum() <= 0:
        raise ValueError("numerators must be finite, denominators finite, not negative and not all zero")
    return top, bottom


def _bounds(samples: Array, level: float) -> tuple[float, float]:
    tail = (1.0 - level) / 2.0
    # A resample that drew only groups without a denominator has no value.
    low, high = np.nanquantile(samples, [tail, 1.0 - tail])
    return float(low), float(high)


def _resampled_ratio(top: Array, bottom: Array, resamples: int, seed: int) -> Array:
    weights = resample_weights(top.size, resamples=resamples, seed=seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: Array = (weights @ top) / (weights @ bottom)
    return ratio


def ratio_interval(
    numerator: npt.ArrayLike,
    denominator: npt.ArrayLike,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = SEED,
) -> Interval:
    """Ratio of sums with a percentile bootstrap interval over groups.

    Args:
        numerator: ``[G]``, per group.
        denominator: ``[G]``, per group, not negative. Groups with 0 (nothing counted) are left out.
        resamples: Number of resamples.
        level: Coverage wanted, e.g. 0.95.
        seed: Seed of the resampling.

    Returns:
        ``sum(numerator) / sum(denominator)`` and its interval; fewer than two groups give no interval (its ``note``
        says so).

    Raises:
        ValueError: Shapes differ, a value is not finite, or all denominators are 0.

    >>> ratio_interval([1.0, 2.0], [2.0, 2.0]).mean
    0.75
    >>> ratio_interval([1.0], [2.0]).note
    'no interval: it needs at least 2 groups'
    """
    top, bottom = _checked(numerator, denominator)
    counted = bottom > 0
    top, bottom = top[counted], bottom[counted]
    mean = float(top.sum() / bottom.sum())
    if top.size < 2:
        return Interval(mean, None, None, int(top.size))
    return Interval(mean, *_bounds(_resampled_ratio(top, bottom, resamples, seed), level), int(top.size))


def paired_difference(
    numerator: npt.ArrayLike,
    other_numerator: npt.ArrayLike,
    denominator: npt.ArrayLike,
    other_denominator: npt.ArrayLike | None = None,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = SEED,
) -> Interval:
    """Difference of two ratios of sums over the same groups, both taken on the same resamples.

    Args:
        numerator: ``[G]``, per group, of the first.
        other_numerator: ``[G]``, per group, of the second, which is subtracted.
        denominator: ``[G]``, of the first.
        other_denominator: ``[G]``, of the second; default: the same as of the first.
        resamples: Number of resamples.
        level: Coverage wanted.
        seed: Seed of the resampling.

    Returns:
        The difference and its interval, None below two groups.

    Raises:
        ValueError: As `ratio_interval`.
    """
    top, bottom = _checked(numerator, denominator)
    other_top, other_bottom = _checked(
        other_numerator, denominator if other_denominator is None else other_denominator
    )
    if top.size != other_top.size:
        raise ValueError(f"paired comparisons need the same groups, got {top.size} and {other_top.size}")
    counted = (bottom > 0) | (other_bottom > 0)
    top, bottom, other_top, other_bottom = (a[counted] for a in (top, bottom, other_top, other_bottom))
    mean = float(top.sum() / bottom.sum() - other_top.sum() / other_bottom.sum())
    if top.size < 2:
        return Interval(mean, None, None, int(top.size))
    samples = _resampled_ratio(top, bottom, resamples, seed) - _resampled_ratio(
        other_top, other_bottom, resamples, seed
    )
    return Interval(mean, *_bounds(samples, level), int(top.size))
