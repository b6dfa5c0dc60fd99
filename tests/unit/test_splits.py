"""Splits by group: stable, apart, and what is held out."""

import dataclasses

import numpy as np
import pytest

from ecospec.train.splits import (
    CALIBRATION,
    HELD_OUT,
    LEFT_OUT,
    TRAINING,
    VALIDATION,
    SplitConfig,
    group_position,
    split_arrays,
)
from tests.trace_files import make_arrays

CONFIG = SplitConfig(0.2, 0.1)


def groups_of(arrays, codes, code):
    return {group for group, found in zip(arrays.group_ids, codes, strict=True) if found == code}


def test_groups_never_straddle_splits_and_shares_are_as_asked():
    groups = [f"document{i % 400}" for i in range(2000)]
    arrays = make_arrays([5] * 2000, groups)
    codes = split_arrays(arrays, CONFIG)
    sizes = [len(groups_of(arrays, codes, code)) for code in (TRAINING, VALIDATION, CALIBRATION)]
    assert sum(sizes) == 400, "no group is in two splits"
    np.testing.assert_allclose(np.array(sizes) / 400, [0.7, 0.2, 0.1], atol=0.05)
    assert (split_arrays(arrays, CONFIG) == codes).all()
    assert (split_arrays(arrays, dataclasses.replace(CONFIG, seed=1)) != codes).any()


def test_more_stores_move_no_group():
    small = make_arrays([5] * 60, [f"document{i}" for i in range(60)])
    large = make_arrays([5] * 200, [f"document{i % 100}" for i in range(200)])
    before = dict(zip(small.group_ids, split_arrays(small, CONFIG).tolist(), strict=True))
    after = dict(zip(large.group_ids, split_arrays(large, CONFIG).tolist(), strict=True))
    assert all(after[group] == code for group, code in before.items())


def test_calibration_is_taken_from_the_training_part():
    arrays = make_arrays([5] * 200)
    without = split_arrays(arrays, dataclasses.replace(CONFIG, calibration_fraction=0.0))
    codes = split_arrays(arrays, CONFIG)
    assert ((codes == VALIDATION) == (without == VALIDATION)).all()
    assert (without[codes == CALIBRATION] == TRAINING).all()


def test_without_a_wish_few_groups_go_without_calibration():
    many, few = make_arrays([5] * 400), make_arrays([5] * 30, [f"g{i}" for i in range(30)])
    default = dataclasses.replace(CONFIG, calibration_fraction=None)
    assert (
        split_arrays(many, default) == split_arrays(many, dataclasses.replace(CONFIG, calibration_fraction=0.05))
    ).all()
    few = few.subset(np.array([not 0.2 <= group_position(group, 0) < 0.25 for group in few.group_ids]))
    assert set(split_arrays(few, default).tolist()) == {TRAINING, VALIDATION}


def test_held_out_datasets_take_their_groups_with_them():
    groups = [f"document{i // 2}" for i in range(200)]
    datasets = [("docs" if i % 2 and i // 2 < 20 else "code") for i in range(200)]
    arrays = make_arrays([5] * 200, groups, datasets)
    codes = split_arrays(arrays, dataclasses.replace(CONFIG, hold_out_datasets=("docs",)))
    held = np.array([name == "docs" for name in datasets])
    assert ((codes == HELD_OUT) == held).all()
    siblings = np.array([int(group[8:]) < 20 for group in groups]) & ~held
    assert ((codes == LEFT_OUT) == siblings).all(), "the rest of the documents must not be trained on"


def test_held_out_lengths():
    lengths = [5] * 150 + [50] * 50
    arrays = make_arrays(lengths, [f"document{i % 100}" for i in range(200)])
    codes = split_arrays(arrays, dataclasses.replace(CONFIG, hold_out_length=49))
    assert ((codes == HELD_OUT) == (np.array(lengths) > 49)).all()
    assert (np.array(lengths)[codes == LEFT_OUT] == 5).all()
    assert not groups_of(arrays, codes, HELD_OUT) & groups_of(arrays, codes, TRAINING)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"validation_fraction": 1e-9}, r"the validation split is empty: 20 groups at --validation_fraction 1e-09"),
        ({"validation_fraction": 0.899999}, r"the training split is empty: 20 groups at .* hold out less"),
        (
            {"calibration_fraction": 1e-9},
            r"the calibration split is empty: .*--calibration_fraction 1e-09 .0 does without. and",
        ),
        (
            {"hold_out_datasets": ("texts",)},
            r"--hold_out_dataset names 'texts', .* did you mean 'text'\? datasets .*: te",
        ),
        ({"hold_out_datasets": ("text",)}, r"the validation split is empty: 0 groups"),
        ({"hold_out_length": 9}, r"--hold_out_length 9 holds nothing out: the longest sequence has 9 tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused(change, match):
    groups = [name for name in (f"document{i}" for i in range(200)) if group_position(name, 0) > 0.001][:20]
    arrays = make_arrays([9] * 20, groups)
    if "training" in match:
        arrays = make_arrays([9] * 20, [g for g in map(str, range(999)) if group_position(g, 0) < 0.99][:20])
    with pytest.raises(ValueError, match=match):
        split_arrays(arrays, dataclasses.replace(CONFIG, **change))
