"""Windows, batches, splits and the data module."""

import numpy as np
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.arrays import TraceArrays, open_stores, read_arrays, read_split, split_groups
from ecospec.train.batching import cut_windows, epoch_batches, make_batches, padding_share
from ecospec.train.data import TraceDataModule

SPEC = RoutingSpec(2, (0, 1), 8, 2, 50, "a" * 64, "test", "b" * 64)


def make_arrays(lengths, groups=None, seed=0):
    rng = np.random.default_rng(seed)
    total = int(sum(lengths))
    experts = np.sort(rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (total, 2, 1)), axis=-1)[..., :2], axis=-1)
    names = groups or [f"group{i}" for i in range(len(lengths))]
    return TraceArrays(
        SPEC,
        rng.integers(0, 50, total, dtype=np.int32),
        experts,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tuple(names),
        tuple("text" for _ in lengths),
    )


def coverage(windows, lengths):
    seen = [np.zeros(n, int) for n in lengths]
    for sequence, start, size in windows.tolist():
        assert size > 0
        seen[sequence][start : start + size] += 1
    return seen


@pytest.mark.parametrize("rng", [None, np.random.default_rng(3)])
def test_windows_cover_every_token_once(rng):
    lengths = np.array([1, 16, 17, 40, 160])
    windows = cut_windows(lengths, 16, rng)
    assert windows[:, 2].max() <= 16
    assert all((count == 1).all() for count in coverage(windows, lengths))


def test_short_sequences_stay_whole_and_long_cuts_move_with_the_epoch():
    lengths = np.array([16, 100])
    first, second = (cut_windows(lengths, 16, np.random.default_rng(i)) for i in range(2))
    assert first[0].tolist() == second[0].tolist() == [0, 0, 16]
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_hold_every_window_once_with_little_padding(shuffled):
    lengths = np.random.default_rng(0).integers(1, 700, 2000)
    rng = np.random.default_rng(1) if shuffled else None
    windows = cut_windows(lengths, 256, rng)
    batches = make_batches(windows, 2048, rng)
    together = np.concatenate(batches)
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, windows.tolist()))
    assert all(len(batch) * batch[:, 2].max() <= 2048 for batch in batches)
    assert padding_share(batches) < 0.10
    assert all(padding_share([batch]) < 0.10 for batch in batches)
    assert len(batches) < 1.25 * windows[:, 2].sum() / 2048, "batches must be nearly full"


def test_epochs_are_a_pure_function_of_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(1, 700, 200)

    def order(seed, epoch):
        batches = epoch_batches(lengths, context_length=256, batch_tokens=1024, seed=seed, epoch=epoch)
        return [batch.tolist() for batch in batches]

    assert order(0, 3) == order(0, 3)
    assert order(0, 3) != order(0, 4)
    assert order(0, 3) != order(1, 3)


def test_a_window_longer_than_a_batch_is_a_batch_of_its_own():
    batches = make_batches(np.array([[0, 0, 30], [1, 0, 30]]), 20)
    assert [len(batch) for batch in batches] == [1, 1]
    assert make_batches(np.zeros((0, 3), np.int64), 20) == []
    assert padding_share([]) == 0.0


def test_groups_never_straddle_the_split():
    groups = [f"document{i % 40}" for i in range(200)]
    arrays = make_arrays([5] * 200, groups)
    held_out = split_groups(arrays, fraction=0.2, seed=0)
    inside = {g for g, h in zip(groups, held_out, strict=True) if h}
    outside = {g for g, h in zip(groups, held_out, strict=True) if not h}
    assert not inside & outside
    assert 2 <= len(inside) <= 16
    assert (split_groups(arrays, fraction=0.2, seed=0) == held_out).all()
    assert (split_groups(arrays, fraction=0.2, seed=1) != held_out).any()


def test_empty_split_is_refused():
    arrays = make_arrays([5, 5], ["one", "one"])
    with pytest.raises(ValueError, match=r"the (validation|training) split is empty: 1 groups"):
        split_groups(arrays, fraction=0.5, seed=0)


def test_subset_keeps_tokens_with_their_experts():
    arrays = make_arrays([3, 4, 5])
    part = arrays.subset(np.array([True, False, True]))
    assert part.lengths.tolist() == [3, 5]
    assert part.group_ids == ("group0", "group2")
    np.testing.assert_array_equal(part.tokens, np.concatenate([arrays.tokens[:3], arrays.tokens[7:]]))
    np.testing.assert_array_equal(part.experts, np.concatenate([arrays.experts[:3], arrays.experts[7:]]))
    assert part.experts.dtype == np.uint8
    assert part.fingerprint() != arrays.fingerprint()
    assert arrays.fingerprint() == make_arrays([3, 4, 5]).fingerprint()


def test_stores_are_read_into_memory_or_mapped_files(tmp_path):
    traces = make_arrays([3, 4, 5, 6], ["a", "b", "a", "c"])
    paths = [tmp_path / "one", tmp_path / "two"]
    for number, path in enumerate(paths):
        with TraceStoreWriter(path, SPEC) as writer:
            writer.append([row_of(traces, 2 * number), row_of(traces, 2 * number + 1)])
    with pytest.raises(ValueError, match="one is named twice; name every store once"):
        open_stores([*paths, tmp_path / "two" / ".." / "one"])
    stores = open_stores(paths)
    whole = read_arrays(stores)
    assert whole.fingerprint() == traces.fingerprint()
    assert whole.experts.dtype == np.uint8
    training, validation = read_split(stores, fraction=0.5, seed=1)
    held_out = split_groups(whole, fraction=0.5, seed=1)
    assert training.fingerprint() == whole.subset(~held_out).fingerprint()
    assert validation.fingerprint() == whole.subset(held_out).fingerprint()
    mapped, _ = read_split(stores, fraction=0.5, seed=1, memory_map=tmp_path / "arrays")
    assert isinstance(mapped.experts, np.memmap)
    assert mapped.fingerprint() == training.fingerprint()


def row_of(arrays, index):
    rows = slice(arrays.offsets[index], arrays.offsets[index + 1])
    generated = index % 2 == 1  # its last token was sampled and has no experts
    tokens = np.append(arrays.tokens[rows], np.int32(7)) if generated else arrays.tokens[rows]
    return RoutingTrace(
        sequence_id=f"sequence{index}",
        group_id=arrays.group_ids[index],
        dataset="text",
        category="",
        token_ids=tokens,
        prompt_length=1,
        origin="generated" if generated else "teacher_forced",
        experts=arrays.experts[rows],
        weights=None,
        finish_reason="length" if generated else "text",
    )


def test_batches_carry_the_tokens_and_uint8_experts_of_their_windows():
    arrays = make_arrays([9, 10, 23, 3])
    module = TraceDataModule(arrays, arrays, context_length=10, batch_tokens=40, seed=0)
    tokens = 0
    for windows, batch in zip(module.training_batches(0), module.train_dataloader(), strict=True):
        assert str(batch["experts"].dtype) == "torch.uint8"
        assert str(batch["input_ids"].dtype) == "torch.int64"
        for row, (sequence, start, size) in enumerate(windows.tolist()):
            first = arrays.offsets[sequence] + start
            np.testing.assert_array_equal(batch["input_ids"][row, :size], arrays.tokens[first : first + size])
            np.testing.assert_array_equal(batch["experts"][row, :size], arrays.experts[first : first + size])
            assert batch["mask"][row].tolist() == [True] * size + [False] * (batch["mask"].shape[1] - size)
        tokens += int(batch["mask"].sum())
    assert tokens == 45
    assert sum(int(batch["mask"].sum()) for batch in module.val_dataloader()) == 45


def test_more_than_256_experts_travel_as_int32():
    arrays = make_arrays([4, 4])
    wide = TraceArrays(
        SPEC,
        arrays.tokens,
        arrays.experts.astype(np.uint16) + 300,
        arrays.offsets,
        arrays.group_ids,
        arrays.datasets,
    )
    batch = next(iter(TraceDataModule(wide, wide, context_length=8, batch_tokens=8).val_dataloader()))
    assert str(batch["experts"].dtype) == "torch.int32"
    assert int(batch["experts"].max()) > 256
