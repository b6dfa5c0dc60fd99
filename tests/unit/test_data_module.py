"""The data module: what batches hold, on every rank, with every number of workers, from any position."""

from typing import Any

import numpy as np
import pytest
import torch

from ecospec.train.arrays import open_stores
from ecospec.train.cache import open_cache
from ecospec.train.data import BatchDataset, TraceDataModule
from tests.trace_files import SPEC, make_arrays, write_store


def assert_same(one, two):
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert torch.equal(value, right[name]), name
            assert value.dtype == right[name].dtype


def test_batches_carry_the_tokens_and_uint8_experts_of_their_windows():
    arrays = make_arrays([9, 10, 23, 3])
    module = TraceDataModule(arrays, arrays, context_length=10, batch_tokens=40, seed=0)
    plan, tokens = module.training_plan(0), 0
    for index, batch in enumerate(module.train_dataloader()):
        assert batch["experts"].dtype == torch.uint8
        assert batch["input_ids"].dtype == torch.int64
        for row, (sequence, start, size) in enumerate(plan.windows[plan.batch(index)[1]].tolist()):
            first = arrays.offsets[sequence] + start
            np.testing.assert_array_equal(batch["input_ids"][row, :size], arrays.tokens[first : first + size])
            np.testing.assert_array_equal(batch["experts"][row, :size], arrays.experts[first : first + size])
            assert batch["mask"][row].tolist() == [True] * size + [False] * (batch["mask"].shape[1] - size)
        tokens += int(batch["mask"].sum())
    assert tokens == 45
    assert sum(int(batch["mask"].sum()) for batch in module.val_dataloader()) == 45


def test_more_than_256_experts_travel_as_int32():
    spec = SPEC.__class__(**{**SPEC.to_dict(), "layer_indices": (0, 1), "num_experts": 400})
    arrays = make_arrays([40, 40], spec=spec)
    batch = next(iter(TraceDataModule(arrays, arrays, context_length=40, batch_tokens=80).val_dataloader()))
    assert batch["experts"].dtype == torch.int32
    np.testing.assert_array_equal(batch["experts"].flatten(0, 1), arrays.experts)
    assert int(batch["experts"].max()) > 256


def test_order_depends_neither_on_workers_nor_on_where_the_traces_lie(tmp_path):
    arrays = make_arrays(np.random.default_rng(0).integers(1, 60, 40).tolist())
    cache = open_cache(open_stores([write_store(tmp_path / "store", arrays)]), tmp_path / "cache")
    options: dict[str, Any] = {"context_length": 32, "batch_tokens": 128, "seed": 5}
    expected = list(TraceDataModule(arrays, arrays, **options).train_dataloader())
    assert_same(list(TraceDataModule(cache, cache, **options).train_dataloader()), expected)
    assert_same(list(TraceDataModule(cache, cache, **options, workers=2).train_dataloader()), expected)
    before = torch.random.get_rng_state()
    list(TraceDataModule(cache, cache, **options).train_dataloader())
    assert torch.equal(torch.random.get_rng_state(), before), "reading must not shift the global random state"


def test_a_resumed_epoch_goes_on_after_the_last_batch():
    arrays = make_arrays([20] * 30)
    first, second = (TraceDataModule(arrays, arrays, context_length=8, batch_tokens=40) for _ in range(2))
    expected = list(first.train_dataloader())
    first.mark(0, 7)
    second.load_state_dict(first.state_dict())
    loader = second.train_dataloader()
    assert len(loader) == len(expected), "the trainer counts batches of the whole epoch"
    assert_same(list(loader), expected[7:])
    first.mark(1, 0)
    second.load_state_dict(first.state_dict())
    assert_same(list(second.train_dataloader()), expected)


@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_together_hold_the_single_process_batches(world_size):
    arrays = make_arrays(np.random.default_rng(0).integers(1, 60, 40).tolist())
    plan = TraceDataModule(arrays, arrays, context_length=32, batch_tokens=128).training_plan(0)
    whole = BatchDataset(plan, arrays)
    ranks = [BatchDataset(plan, arrays, rank=rank, world_size=world_size) for rank in range(world_size)]

    def rows(batch):
        counted = [ids[keep].tolist() for ids, keep in zip(batch["input_ids"], batch["mask"], strict=True)]
        return [row for row in counted if row]

    for index in range(len(plan)):
        parts = [rank[index] for rank in ranks]
        assert all(part["input_ids"].numel() for part in parts), "no rank goes without a step"
        assert sorted(row for part in parts for row in rows(part)) == sorted(rows(whole[index]))
    assert all(len(rank) == len(whole) for rank in ranks)


def test_calibration_needs_a_split():
    arrays = make_arrays([9, 10])
    module = TraceDataModule(arrays, arrays, calibration=arrays, context_length=10, batch_tokens=40)
    assert sum(int(batch["mask"].sum()) for batch in module.calibration_dataloader()) == 19
    with pytest.raises(ValueError, match=r"no calibration split; .* raise --calibration_fraction"):
        TraceDataModule(arrays, arrays).calibration_dataloader()
