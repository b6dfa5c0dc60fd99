"""Draft trees in training: what a row sees is what the predictor's session sees, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

from ecospec.train.arrays import open_stores
from ecospec.train.cache import open_cache, stores_key
from ecospec.train.data import TraceDataModule
from ecospec.train.tree_batches import additive_mask, own_path, read_row, tree_batch
from ecospec.train.tree_cache import open_tree_stores, open_trees, tree_rows
from tests.predictor_fakes import SPEC, tiny_model, tiny_predictor
from tests.trace_files import make_arrays, random_tree, write_store, write_trees

LENGTHS = [30, 12, 45]


@pytest.fixture
def arrays():
    return make_arrays(LENGTHS, spec=SPEC)


@pytest.fixture
def trees(arrays):
    """At every position of two sequences, also behind the last token that has experts, but not of the first one."""
    rng = np.random.default_rng(3)
    return [
        random_tree(arrays, index, position, int(rng.integers(1, 7)), rng)
        for index in (1, 2)
        for position in range(LENGTHS[index] + 1)
    ]


def open_all(tmp_path, arrays, trees, context_length):
    stores = open_stores([write_store(tmp_path / "traces", arrays)])
    cache = open_cache(stores, tmp_path / "cache")
    tree_stores = open_tree_stores([write_trees(tmp_path / "trees", trees, SPEC)], SPEC, "target x")
    files = open_trees(tree_stores, cache, stores_key(stores), tmp_path / "cache" / "trees")
    return tree_rows(cache, files, context_length)


def test_rows_hold_every_tree_once_behind_its_own_text(tmp_path, arrays, trees):
    rows = open_all(tmp_path, arrays, trees, context_length=16)
    assert rows.num_trees == len(trees)
    assert rows.num_nodes == sum(tree.num_nodes for tree in trees)
    assert rows.table[:, 5].max() <= 16
    seen = 0
    for number, (first, count, sequence, start, window, nodes) in enumerate(rows.table.tolist()):
        assert first == seen
        seen += count
        row, own = read_row(rows, number), trees[first : first + count]
        assert window <= 16
        assert {tree.sequence_id for tree in own} == {f"sequence{sequence}"}
        text = arrays.tokens[arrays.offsets[sequence] :][start : start + window]
        np.testing.assert_array_equal(row.ids, np.concatenate([text, *(tree.token for tree in own)]))
        np.testing.assert_array_equal(row.experts[window:], np.concatenate([tree.experts for tree in own]))
        assert row.counted.tolist() == [False] * window + [True] * nodes
        contexts = row.attention[window:, :window].sum(axis=1)
        least = [min(tree.position, 12) for tree in own for _ in range(tree.num_nodes)]
        assert (contexts >= least).all(), "three quarters of a window, where the text holds as much"
    assert len(rows.table) < len(trees) / 2, "trees share rows"


@pytest.mark.parametrize("context_length", [64, 16])
def test_scores_of_a_batch_equal_the_sessions(tmp_path, arrays, trees, context_length):
    rows = open_all(tmp_path, arrays, trees, context_length)
    model, predictor = tiny_model().double(), tiny_predictor()
    predictor.model.double()
    batch = tree_batch(rows, np.arange(len(rows.table)))
    mask = additive_mask(batch["attention"], torch.float64)
    with torch.no_grad():
        scores = model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"])
    compared = 0
    for number, (first, count, sequence, start, window, _) in enumerate(rows.table.tolist()):
        place = window
        for tree in trees[first : first + count]:
            session = predictor.session()
            text = arrays.tokens[arrays.offsets[sequence] + start : arrays.offsets[sequence] + tree.position]
            session.prefill(torch.from_numpy(text.astype(np.int64)))
            expected = session.score(
                *(torch.from_numpy(part.astype(np.int64)) for part in (tree.token, tree.parent))
            )
            found = scores[number, place : place + tree.num_nodes]
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
            place += tree.num_nodes
            compared += tree.num_nodes
    assert compared == rows.num_nodes == int(batch["mask"].sum())


def test_own_path():
    path = own_path(np.array([-1, 0, 0, 2, 3], np.int16))
    assert [np.flatnonzero(row).tolist() for row in path] == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4]]


def test_epochs_mix_text_and_trees(tmp_path, arrays, trees):
    rows = open_all(tmp_path, arrays, trees, context_length=16)
    keep = np.array([True, True, False])
    options = {"training_trees": rows.select(keep), "context_length": 16, "batch_tokens": 64}
    both = list(TraceDataModule(arrays, arrays, **options).train_dataloader())
    alone = list(TraceDataModule(arrays, arrays, **options, trees_only=True).train_dataloader())
    nodes = sum(tree.num_nodes for tree in trees if tree.sequence_id == "sequence1")
    assert sum(int(batch["mask"].sum()) for batch in alone) == nodes
    assert sum(int(batch["mask"].sum()) for batch in both) == nodes + sum(LENGTHS)
    assert all(set(batch) >= {"attention", "position_ids"} for batch in alone)
    validation = list(TraceDataModule(arrays, arrays, **options, validation_trees=rows).val_dataloader())
    assert sum(int(batch["mask"].sum()) for batch in validation if "attention" in batch) == rows.num_nodes
    empty = tree_batch(rows, np.zeros(0, np.int64))
    assert empty["input_ids"].shape == (1, 1)
    assert not empty["mask"].any()


def test_trees_that_do_not_fit_the_text_are_refused(tmp_path, arrays, trees):
    def refused(change, match, number=[0]):  # noqa: B006 - a counter
        number[0] += 1
        changed = [dataclasses.replace(trees[5], **change)]
        with pytest.raises(ValueError, match=match):
            open_all(tmp_path / str(number[0]), arrays, changed, 16)

    refused(
        {"sequence_id": "elsewhere"}, r"--tree_traces .*trees holds trees of sequence 'elsewhere', which --traces"
    )
    refused({"position": 6}, r"at position 6 does not continue the text of that sequence in --traces")
    refused({"position": 13}, r"at position 13 does not continue the text")
    refused({"group_id": "other"}, r"sequence 'sequence1' is of group 'other', in --traces it is of another")
    write_trees(tmp_path / "trees", trees, SPEC)
    with pytest.raises(ValueError, match=r"trees was made for another target than target x: top_k"):
        open_tree_stores([tmp_path / "trees"], dataclasses.replace(SPEC, top_k=3), "target x")
    with pytest.raises(ValueError, match="trees is named twice"):
        open_tree_stores([tmp_path / "trees"] * 2, SPEC, "target x")
    write_store(tmp_path / "text", arrays)
    with pytest.raises(ValueError, match=r"text is a routing_trace store, a draft_tree_trace store is needed"):
        open_tree_stores([tmp_path / "text"], SPEC, "target x")
