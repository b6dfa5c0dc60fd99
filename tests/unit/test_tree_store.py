"""Round trip and refusals of draft-tree stores."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStore, TreeStoreWriter

SPEC = RoutingSpec(3, (1, 2, 3), 16, 2, 100, "0" * 64, "tiny", "1" * 64)


def tree(number):
    rng = np.random.default_rng(number)
    nodes = int(rng.integers(1, 12))
    parent = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))], dtype=np.int16)
    draft = np.zeros(nodes, np.float32)
    for node in range(1, nodes):
        draft[node] = draft[parent[node]] - rng.random()
    accepted = np.zeros(nodes, bool)
    node = nodes - 1
    while node >= 0:
        accepted[node] = True
        node = int(parent[node])
    ids = np.stack([np.sort(rng.permutation(16)[:2]) for _ in range(nodes * 3)]).astype(np.uint8)
    return TreeTrace(
        sequence_id=f"s{number // 3}",
        group_id=f"g{number // 6}",
        position=number,
        token=rng.integers(0, 100, nodes).astype(np.int32),
        parent=parent,
        draft_logprob=draft,
        experts=ids.reshape(nodes, 3, 2),
        target_logprob=np.where(np.arange(nodes) > 0, -rng.random(nodes), 0).astype(np.float32),
        emitted=rng.integers(0, 100, nodes).astype(np.int32),
        accepted=accepted,
        temperature=0.5,
        seed=2**40 + number,
    )


def test_round_trip(tmp_path):
    with TreeStoreWriter(tmp_path / "trees", SPEC, tokens_per_shard=40) as writer:
        for start in range(0, 20, 4):
            writer.append([tree(number) for number in range(start, start + 4)])
    store = TreeStore(tmp_path / "trees")
    store.verify()
    assert len(store.manifest.shards) > 1
    assert store.num_rows == 20
    assert store.num_tokens == sum(tree(number).num_nodes for number in range(20))
    for number, mine in enumerate(store.iter_trees()):
        for field in dataclasses.fields(TreeTrace):
            stored, original = getattr(mine, field.name), getattr(tree(number), field.name)
            if isinstance(original, np.ndarray):
                assert stored.dtype == original.dtype, field.name
                assert np.array_equal(stored, original), field.name
            else:
                assert stored == original, field.name
    chosen = [mine.position for mine in store.iter_trees(group_filter=lambda group: group == "g1")]
    assert chosen == list(range(6, 12))
    frame = pd.read_parquet(tmp_path / "trees" / "shard-00000.parquet")
    assert frame["token"][0].tolist() == tree(0).token.tolist()


def test_trees_of_another_target_are_refused(tmp_path):
    writer = TreeStoreWriter(tmp_path / "trees", dataclasses.replace(SPEC, vocab_size=3))
    with pytest.raises(ValueError, match="token must lie in 0 to 2"):
        writer.append([tree(5)])


def test_a_tree_store_is_no_trace_store(tmp_path):
    with TreeStoreWriter(tmp_path / "trees", SPEC) as writer:
        writer.append([tree(0)])
    with pytest.raises(ValueError, match="is a draft_tree_trace store, a routing_trace store is needed"):
        TraceStore(tmp_path / "trees")
