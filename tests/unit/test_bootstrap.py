"""Bootstrap intervals against literal resampling, known coverage and their stated edge cases."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec.eval.bootstrap import (
    RESAMPLES,
    TOO_FEW_GROUPS,
    Interval,
    paired_difference,
    ratio_interval,
    resample_weights,
)


def _ends(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.high


def _literal_ratio_samples(numerator, denominator, resamples, seed):
    """The same bootstrap drawn group by group: expand each row of counts into the list of drawn groups."""
    values = []
    for counts in resample_weights(len(numerator), resamples=resamples, seed=seed):
        drawn = [group for group, count in enumerate(counts) for _ in range(count)]
        values.append(sum(numerator[g] for g in drawn) / sum(denominator[g] for g in drawn))
    return np.array(values)


def test_interval_equals_literal_resampling():
    generator = np.random.default_rng(5)
    denominator = generator.integers(1, 200, size=17).astype(float)
    numerator = denominator * generator.uniform(0.3, 0.9, size=17)
    found = ratio_interval(numerator, denominator)
    expected = np.quantile(_literal_ratio_samples(numerator, denominator, RESAMPLES, 0), [0.025, 0.975])
    assert found.mean == pytest.approx(numerator.sum() / denominator.sum())
    assert [found.low, found.high] == pytest.approx(list(expected))
    assert found.groups == 17


def test_paired_difference_equals_literal_resampling():
    generator = np.random.default_rng(6)
    denominator = generator.integers(1, 200, size=11).astype(float)
    first, second = (denominator * generator.uniform(0.3, 0.9, size=11) for _ in range(2))
    found = paired_difference(first, second, denominator)
    samples = _literal_ratio_samples(first, denominator, RESAMPLES, 0) - _literal_ratio_samples(
        second, denominator, RESAMPLES, 0
    )
    assert [found.low, found.high] == pytest.approx(list(np.quantile(samples, [0.025, 0.975])))


def test_pairing_removes_what_both_share():
    generator = np.random.default_rng(7)
    denominator = np.full(40, 100.0)
    shared = generator.uniform(20, 80, size=40)  # hard and easy groups
    first, second = shared + generator.normal(2.0, 0.5, size=40), shared
    paired = paired_difference(first, second, denominator)
    alone = ratio_interval(first, denominator)
    low, high = _ends(paired)
    assert 0 < low < 0.02 < high < 0.03
    assert (high - low) * 10 < _ends(alone)[1] - _ends(alone)[0]


def test_weights_are_multinomial_and_seeded():
    weights = resample_weights(9, resamples=4000, seed=3)
    assert weights.shape == (4000, 9)
    assert (weights.sum(axis=1) == 9).all()
    assert weights.mean(axis=0) == pytest.approx(np.ones(9), abs=0.1)
    assert weights.var(axis=0) == pytest.approx(np.full(9, 1 - 1 / 9), abs=0.15)
    assert (weights == resample_weights(9, resamples=4000, seed=3)).all()
    assert (weights != resample_weights(9, resamples=4000, seed=4)).any()


def test_coverage_is_near_the_stated_level():
    """400 samples of 60 groups from a known population: the 95 % interval holds the truth that often."""
    generator = np.random.default_rng(8)
    covered = 0
    for _ in range(400):
        denominator = generator.integers(20, 100, size=60).astype(float)
        numerator = denominator * np.clip(generator.normal(0.7, 0.1, size=60), 0, 1)
        found = ratio_interval(numerator, denominator, resamples=400)
        low, high = _ends(found)
        covered += low <= 0.7 <= high
    assert 0.90 <= covered / 400 <= 0.98


def test_groups_without_a_denominator_do_not_count():
    full = ratio_interval([1.0, 2.0, 3.0], [4.0, 4.0, 4.0])
    padded = ratio_interval([1.0, 0.0, 2.0, 3.0], [4.0, 0.0, 4.0, 4.0])
    assert padded == full


@pytest.mark.parametrize("numbers", [([3.0], [4.0]), ([3.0, 0.0], [4.0, 0.0])])
def test_one_group_gives_no_interval_and_says_so(numbers):
    found = ratio_interval(*numbers)
    assert (found.mean, found.low, found.high, found.groups) == (0.75, None, None, 1)
    assert found.to_dict()["note"] == TOO_FEW_GROUPS
    difference = paired_difference(numbers[0], numbers[0], numbers[1])
    assert (difference.mean, difference.low, difference.note) == (0.0, None, TOO_FEW_GROUPS)


def test_interval_collapses_when_all_groups_agree():
    found = ratio_interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))
    assert "note" not in found.to_dict()


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="equally long"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="not all zero"):
        ratio_interval([0.0, 0.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="finite"):
        ratio_interval([float("nan"), 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="same groups, got 2 and 3"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 1.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="at least 1 group"):
        resample_weights(0)
