"""Every validation error of RoutingTrace and TreeTrace."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.tree_records import TreeTrace

SPEC = RoutingSpec(2, (0, 1), 8, 2, 50, "0" * 64, "tiny", "1" * 64)
WIDE = RoutingSpec(2, (0, 1), 300, 2, 50, "0" * 64, "tiny", "1" * 64)


def experts(rows, dtype=np.uint8):
    return np.tile(np.array([[1, 4], [0, 7]], dtype=dtype), (rows, 1, 1))


def trace(**changes):
    values = {
        "sequence_id": "s",
        "group_id": "g",
        "dataset": "d",
        "category": "",
        "token_ids": np.arange(6, dtype=np.int32),
        "prompt_length": 2,
        "origin": "generated",
        "experts": experts(5),
        "weights": None,
        "finish_reason": "length",
    }
    return RoutingTrace(**values | changes)


def tree(**changes):
    values = {
        "sequence_id": "s",
        "group_id": "g",
        "position": 9,
        "token": np.array([3, 4, 5, 6], dtype=np.int32),
        "parent": np.array([-1, 0, 0, 1], dtype=np.int16),
        "draft_logprob": np.array([0, -0.5, -1, -0.75], dtype=np.float32),
        "experts": experts(4),
        "target_logprob": np.array([0, -0.1, -3, -2], dtype=np.float32),
        "emitted": np.array([4, 9, 9, 9], dtype=np.int32),
        "accepted": np.array([True, True, False, False]),
        "temperature": 0.0,
        "seed": 0,
    }
    return TreeTrace(**values | changes)


def test_valid_traces_pass():
    trace().require(SPEC)
    trace(origin="teacher_forced", finish_reason="text", experts=experts(6), prompt_length=6).require(SPEC)
    trace(weights=np.zeros((5, 2, 2), np.float16)).require(SPEC)
    trace(experts=experts(5, np.uint16)).require(WIDE)
    assert (trace().num_tokens, trace().num_processed) == (6, 5)
    tree().require(SPEC)
    tree(accepted=np.array([True, True, False, True])).require(SPEC)
    assert tree().num_nodes == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_id": ""}, "sequence_id must be a non-empty string"),
        ({"group_id": None}, "sequence 's': group_id must be a non-empty string, got None"),
        ({"dataset": ""}, "dataset must be a non-empty string"),
        ({"category": None}, "category must be a string"),
        ({"origin": "copied"}, "origin must be one of generated, teacher_forced, got 'copied'"),
        ({"finish_reason": "tired"}, "finish_reason must be one of eos, length, text, got 'tired'"),
        ({"token_ids": np.arange(6)}, r"token_ids must be int32 \[n\] with n >= 1, got int64"),
        ({"token_ids": np.zeros(0, np.int32)}, "token_ids must be int32"),
        ({"prompt_length": 6}, "prompt_length must be an integer from 0 to 5, got 6"),
        ({"prompt_length": -1}, "prompt_length must be an integer from 0 to 5, got -1"),
        ({"prompt_length": 1.0}, "prompt_length must be an integer"),
        ({"experts": experts(5, np.int64)}, "experts must be uint8 or uint16"),
        ({"experts": experts(5)[:, 0]}, r"experts must be uint8 or uint16 \[t, L, K\]"),
        ({"experts": experts(6)}, "one row per processed token, 5 for 6 generated tokens, got 6"),
        ({"origin": "teacher_forced"}, "one row per processed token, 6 for 6 teacher_forced tokens, got 5"),
        ({"weights": np.zeros((5, 2, 2))}, "weights must be float16"),
        ({"weights": np.zeros((5, 2, 1), np.float16)}, r"weights must be float16 \(5, 2, 2\)"),
    ],
)
def test_malformed_traces_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        trace(**changes)


def with_value(value, place=(3, 1, 1)):
    changed = experts(5)
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.full(6, 50, np.int32)}, "token_ids must lie in 0 to 49, got 50 to 50"),
        ({"token_ids": np.full(6, -1, np.int32)}, "token_ids must lie in 0 to 49, got -1"),
        ({"experts": experts(5)[:, :1]}, r"experts must be \[t, 2, 2\], got \[5, 1, 2\]"),
        ({"experts": experts(5, np.uint16)}, "experts must be uint8 for 8 experts, got uint16"),
        ({"experts": with_value(8)}, "experts must lie in 0 to 7, got 8"),
        (
            {"experts": with_value(0)},
            r"unique and ascending within a layer, got \[0, 0\] at row 3, MoE layer 1",
        ),
        ({"experts": with_value(5, (2, 0, 0))}, r"ascending within a layer, got \[5, 4\] at row 2, MoE layer 0"),
    ],
)
def test_traces_of_another_target_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        trace(**changes).require(SPEC)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_id": ""}, "sequence_id must be a non-empty string"),
        ({"position": -1}, "position must be an integer >= 0, got -1"),
        ({"seed": True}, "seed must be an integer >= 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number >= 0"),
        ({"token": np.zeros((2, 2), np.int32)}, r"token must be \[N\]"),
        ({"token": np.zeros(4, np.int64)}, r"position 9: token must be int32 \[4\], got int64"),
        ({"parent": np.array([-1, 0, 0], np.int16)}, r"parent must be int16 \[4\], got int16 \[3\]"),
        ({"emitted": np.zeros(4, np.float32)}, "emitted must be int32"),
        ({"accepted": np.ones(4, np.int8)}, "accepted must be bool"),
        ({"experts": experts(3)}, r"experts must be \[4, L, K\], got \[3, 2, 2\]"),
        ({"parent": np.array([0, 0, 0, 1], np.int16)}, "parent must be -1 for the root"),
        ({"parent": np.array([-1, 2, 0, 1], np.int16)}, "an earlier index else"),
        ({"parent": np.array([-1, 0, -1, 1], np.int16)}, "an earlier index else"),
        ({"draft_logprob": np.array([-1, -2, -2, -3], np.float32)}, "draft_logprob must be 0 for the root"),
        ({"draft_logprob": np.array([0, -0.5, 1, -3], np.float32)}, "at most 0 else"),
        ({"draft_logprob": np.array([0, -2, -1, -1], np.float32)}, "must be cumulative"),
        ({"target_logprob": np.array([0, -2, np.nan, -1], np.float32)}, "target_logprob must be 0 for the root"),
        ({"accepted": np.array([False, True, False, False])}, "accepted must mark one path"),
        ({"accepted": np.array([True, True, True, False])}, "accepted must mark one path"),
        ({"accepted": np.array([True, False, False, True])}, r"one path from the root, got \[0, 3\]"),
    ],
)
def test_malformed_trees_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tree(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": np.full(4, 50, np.int32)}, "token must lie in 0 to 49"),
        ({"emitted": np.full(4, -2, np.int32)}, "emitted must lie in 0 to 49"),
        ({"experts": experts(4) + np.uint8(1)}, "experts must lie in 0 to 7, got 8"),
    ],
)
def test_trees_of_another_target_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tree(**changes).require(SPEC)
