"""Which trees are collected from a store, and what a summary of them says."""

import dataclasses

import numpy as np
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from ecospec.trace_collection.tree_plan import make_tree_plan, roots_of
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStore, TreeStoreWriter
from ecospec.trace_collection.tree_summary import summarise_trees

SPEC = RoutingSpec(1, (0,), 4, 2, 50, "0" * 64, "tiny", "1" * 64)


def trace(name, tokens=8, prompt=3, origin="generated", reason="length"):
    processed = tokens - (origin == "generated")
    return RoutingTrace(
        sequence_id=name,
        group_id=f"g-{name}",
        dataset="d",
        category="",
        token_ids=np.arange(tokens, dtype=np.int32),
        prompt_length=tokens if origin == "teacher_forced" else prompt,
        origin=origin,
        experts=np.tile(np.array([[0, 2]], np.uint8), (processed, 1, 1)),
        weights=None,
        finish_reason="text" if origin == "teacher_forced" else reason,
    )


def store_of(path, traces, collection=None):
    with TraceStoreWriter(
        path, SPEC, collection={"temperature": 0.0} if collection is None else collection
    ) as writer:
        if traces:
            writer.append(traces)
    return TraceStore(path)


def test_roots():
    assert list(roots_of(trace("a"))) == [3, 4, 5, 6, 7]
    assert list(roots_of(trace("a", reason="eos"))) == [3, 4, 5, 6]  # nothing follows the end of a text
    assert list(roots_of(trace("a", prompt=0))) == [1, 2, 3, 4, 5, 6, 7]
    assert list(roots_of(trace("a", tokens=4, prompt=3, reason="eos"))) == []
    assert list(roots_of(trace("a", tokens=4, origin="teacher_forced"))) == [1, 2, 3]


def test_sequences_are_chosen_by_hash_and_what_has_no_tree_is_counted(tmp_path):
    store = store_of(tmp_path / "s", [trace("c"), trace("a"), trace("d", tokens=4, reason="eos"), trace("b")])
    plan = make_tree_plan(store, at="positions")
    assert [t.sequence_id for t in plan.sequences] == ["a", "b", "c"]
    assert plan.skipped == {"without a position for a tree": 1}
    assert plan.origin == "generated"
    assert [t.sequence_id for t in make_tree_plan(store, at="positions", limit=2).sequences] == ["a", "b"]
    other = store_of(tmp_path / "t", [trace("a", tokens=4), trace("b", prompt=0), trace("c", tokens=5)])
    plan = make_tree_plan(other, at="steps")
    assert [t.sequence_id for t in plan.sequences] == ["c"]
    assert plan.skipped == {"without a step": 1, "without a prompt": 1}


def test_digest_depends_on_place_and_text(tmp_path):
    store = store_of(tmp_path / "s", [trace("a"), trace("b")])
    same = store_of(tmp_path / "t", [trace("b"), trace("a")])
    longer = store_of(tmp_path / "u", [trace("a", tokens=9), trace("b")])
    digests = {make_tree_plan(s, at=at).digest() for s in (store, same, longer) for at in ("positions", "steps")}
    assert len(digests) == 4


def test_text_of_another_origin(tmp_path):
    store = store_of(tmp_path / "s", [trace("a"), trace("b", origin="teacher_forced")])
    with pytest.raises(ValueError, match=r"holds 1 teacher-forced texts: .* --allow-teacher-forced"):
        make_tree_plan(store, at="positions")
    plan = make_tree_plan(store, at="positions", allow_teacher_forced=True)
    assert plan.origin == "teacher_forced"  # replay refuses the whole store
    with pytest.raises(ValueError, match="which have no prompt to run from"):
        make_tree_plan(store, at="steps", allow_teacher_forced=True)
    read = store_of(tmp_path / "t", [trace("b", origin="teacher_forced")], {"mode": "teacher_forced"})
    assert len(make_tree_plan(read, at="positions", allow_teacher_forced=True).sequences) == 1


@pytest.mark.parametrize(
    ("collection", "message"),
    [
        ({"temperature": 0.7}, "was sampled at temperature 0.7; draft trees need greedy text"),
        ({"merged": [{"temperature": 0}, {"temperature": 1.0}]}, "was sampled at temperature 1.0"),
        ({"temperature": None}, "was sampled at temperature None"),
        ({"mode": "generate"}, "does not say at which temperature"),
    ],
)
def test_sampled_text_is_refused(tmp_path, collection, message):
    with pytest.raises(ValueError, match=message):
        make_tree_plan(store_of(tmp_path / "s", [trace("a")], collection), at="positions")


def test_nothing_to_collect(tmp_path):
    with pytest.raises(ValueError, match="holds no sequences; collect traces first"):
        make_tree_plan(store_of(tmp_path / "s", []), at="positions")
    short = store_of(tmp_path / "t", [trace("a", tokens=4)])
    with pytest.raises(ValueError, match=r"nothing to collect \(1 without a step\); collect longer texts"):
        make_tree_plan(short, at="steps")


def test_summary_counts_trees_by_depth(tmp_path):
    base = TreeTrace(
        sequence_id="a",
        group_id="g",
        position=4,
        token=np.arange(5, dtype=np.int32),
        parent=np.array([-1, 0, 0, 2, 3], np.int16),
        draft_logprob=np.array([0, -1, -2, -3, -4], np.float32),
        experts=np.tile(np.array([[0, 2]], np.uint8), (5, 1, 1)),
        target_logprob=np.array([0, -1, -1, -1, -1], np.float32),
        emitted=np.arange(5, dtype=np.int32),
        accepted=np.array([True, False, True, True, False]),
        temperature=0.0,
        seed=0,
    )
    rejected = dataclasses.replace(base, accepted=np.arange(5) == 0, position=5)
    other = dataclasses.replace(base, accepted=np.arange(5) < 2, position=6)
    with TreeStoreWriter(tmp_path / "trees", SPEC) as writer:
        writer.append([base, rejected, other])
        writer.append([base])
    found = summarise_trees(TreeStore(tmp_path / "trees"))
    assert (found.trees, found.nodes) == (4, 20)
    assert found.accepted == (3 / 4, 2 / 4, 0.0)
    assert found.num_bytes == (tmp_path / "trees" / "shard-00000.parquet").stat().st_size
