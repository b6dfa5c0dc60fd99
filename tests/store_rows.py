"""Random rows of routing trace stores, and writing and comparing them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter

SPEC = RoutingSpec(3, (1, 2, 3), 16, 2, 100, "0" * 64, "tiny", "1" * 64)
WIDE = dataclasses.replace(SPEC, num_experts=300)


def trace(number, spec=SPEC, *, weights=False):
    rng = np.random.default_rng(number)
    size = int(rng.integers(2, 40))
    teacher = number % 3 == 0
    rows = size if teacher else size - 1
    ids = np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(rows * spec.num_layers)])
    experts = np.sort(ids, axis=1).astype(spec.expert_dtype).reshape(rows, spec.num_layers, spec.top_k)
    return RoutingTrace(
        sequence_id=f"s{number}",
        group_id=f"g{number // 2}",
        dataset=("code", "docs")[number % 2],
        category="ä" if teacher else "",
        token_ids=rng.integers(0, 100, size).astype(np.int32),
        prompt_length=size if teacher else 1,
        origin="teacher_forced" if teacher else "generated",
        experts=experts,
        weights=rng.random(experts.shape).astype(np.float16) if weights else None,
        finish_reason="text" if teacher else "eos",
    )


def write(path, numbers=range(10), spec=SPEC, *, weights=False, **options):
    with TraceStoreWriter(path, spec, weights=weights, **options) as writer:
        for number in numbers:
            writer.append([trace(number, spec, weights=weights)])
    return path


def same(left, right):
    for field in dataclasses.fields(RoutingTrace):
        mine, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(other, np.ndarray):
            assert mine.dtype == other.dtype, field.name
            assert np.array_equal(mine, other), field.name
        else:
            assert mine == other, field.name


def interrupted(path, **options):
    """A run that dies after five of ten units, with two of them in no shard."""

    def run():
        with TraceStoreWriter(path, SPEC, **options) as writer:
            for number in range(5):
                writer.append([trace(number)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    (path / "shard-00009.parquet.tmp").write_bytes(b"torn")


def same_rows(left, right):
    """Whether two stores hold the same rows in the same order."""
    for mine, other in zip(TraceStore(left).iter_sequences(), TraceStore(right).iter_sequences(), strict=True):
        same(mine, other)
