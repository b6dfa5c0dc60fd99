"""Random traces, in memory and as stores on disk, for the tests of the training data."""

from __future__ import annotations

import numpy as np

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStoreWriter
from ecospec.train.arrays import TraceArrays

SPEC = RoutingSpec(2, (0, 1), 8, 2, 50, "a" * 64, "test", "b" * 64)


def random_experts(rng, rows, spec=SPEC):
    """Ids ascending within a layer, ``[rows, L, K]``."""
    noise = rng.random((rows, spec.num_layers, spec.num_experts))
    return np.sort(np.argsort(noise)[..., : spec.top_k]).astype(spec.expert_dtype)


def make_arrays(lengths, groups=None, datasets=None, seed=0, spec=SPEC):
    """Random sequences of given lengths."""
    rng = np.random.default_rng(seed)
    total = int(sum(lengths))
    return TraceArrays(
        spec,
        rng.integers(0, spec.vocab_size, total, dtype=np.int32),
        random_experts(rng, total, spec),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tuple(groups or [f"group{i}" for i in range(len(lengths))]),
        tuple(datasets or ["text"] * len(lengths)),
    )


def row_of(arrays, index, name="sequence"):
    """One sequence as a row of a store; every second one is generated, with a last token without experts."""
    rows = slice(arrays.offsets[index], arrays.offsets[index + 1])
    generated = index % 2 == 1
    tokens = np.append(arrays.tokens[rows], np.int32(7)) if generated else arrays.tokens[rows]
    return RoutingTrace(
        sequence_id=f"{name}{index}",
        group_id=arrays.group_ids[index],
        dataset=arrays.datasets[index],
        category="",
        token_ids=tokens,
        prompt_length=1,
        origin="generated" if generated else "teacher_forced",
        experts=arrays.experts[rows],
        weights=None,
        finish_reason="length" if generated else "text",
    )


def write_store(path, arrays, indices=None, name="sequence"):
    """A trace store of some of the sequences."""
    with TraceStoreWriter(path, arrays.spec) as writer:
        writer.append(
            [row_of(arrays, i, name) for i in (range(len(arrays.lengths)) if indices is None else indices)]
        )
    return path


def random_tree(arrays, index, position, nodes, rng):
    """A tree whose root is a token of a sequence."""
    parent = np.array([-1, *(rng.integers(0, node) for node in range(1, nodes))], np.int16)
    token = rng.integers(0, arrays.spec.vocab_size, nodes, dtype=np.int32)
    token[0] = arrays.tokens[arrays.offsets[index] + position] if position < arrays.lengths[index] else 7
    depth = np.zeros(nodes, np.float32)
    for node in range(1, nodes):
        depth[node] = depth[parent[node]] - 1
    return TreeTrace(
        sequence_id=f"sequence{index}",
        group_id=arrays.group_ids[index],
        position=int(position),
        token=token,
        parent=parent,
        draft_logprob=depth,
        experts=random_experts(rng, nodes, arrays.spec),
        target_logprob=np.where(parent < 0, 0, -1).astype(np.float32),
        emitted=np.zeros(nodes, np.int32),
        accepted=np.arange(nodes) == 0,
        temperature=0.0,
        seed=0,
    )


def write_trees(path, trees, spec=SPEC):
    """A draft-tree store."""
    with TreeStoreWriter(path, spec) as writer:
        writer.append(trees)
    return path
