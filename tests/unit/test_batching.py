"""Windows and batches: coverage, padding, determinism, shares of ranks."""

import numpy as np
import pytest

from ecospec.train.batching import cut_windows, make_batches, plan_epoch, rank_share


def coverage(windows, lengths):
    seen = [np.zeros(n, int) for n in lengths]
    for sequence, start, size in windows.tolist():
        assert size > 0
        seen[sequence][start : start + size] += 1
    return seen


@pytest.mark.parametrize("rng", [None, np.random.default_rng(3)])
@pytest.mark.parametrize("context", [8, 10, 16, 17])
def test_windows_cover_every_token_once(rng, context):
    lengths = np.arange(12 * context)  # every remainder, and a sequence of no token
    windows = cut_windows(lengths, context, rng)
    assert windows[:, 2].max() == context
    assert all((count == 1).all() for count in coverage(windows, lengths))
    assert windows.tolist() == sorted(windows.tolist())
    long = windows[lengths[windows[:, 0]] > context]
    assert long[:, 2].min() >= context // 4, "shorter contexts teach little"


def test_short_sequences_stay_whole_and_long_cuts_move_with_the_epoch():
    lengths = np.array([16, 100])
    first, second = (cut_windows(lengths, 16, np.random.default_rng(i)) for i in range(2))
    assert first[0].tolist() == second[0].tolist() == [0, 0, 16]
    assert first.tolist() != second.tolist()


def padding_of(sizes, batch):
    return 1 - sizes[batch].sum() / (len(batch) * sizes[batch].max())


@pytest.mark.parametrize("key", [None, (0, 1)])
def test_batches_hold_every_window_once_with_little_padding(key):
    lengths = np.random.default_rng(0).integers(1, 700, 6000)
    plan = plan_epoch(lengths, context_length=256, batch_tokens=2048, key=key)
    sizes, batches = plan.windows[:, 2], list(plan.window_batches)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(plan.windows)))
    assert all(len(batch) * sizes[batch].max() <= 2048 for batch in batches)
    assert all(padding_of(sizes, batch) < 0.10 for batch in batches)
    area = sum(len(batch) * sizes[batch].max() for batch in batches)
    assert plan.padding_share() == pytest.approx(1 - sizes.sum() / area)
    assert 0 < plan.padding_share() < 0.10
    assert len(batches) < 1.25 * sizes.sum() / 2048, "batches must be nearly full"


def test_epochs_are_a_pure_function_of_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(1, 700, 200)

    def order(seed, epoch):
        plan = plan_epoch(lengths, lengths, context_length=256, batch_tokens=1024, key=(seed, epoch))
        return [(trees, rows.tolist()) for trees, rows in map(plan.batch, range(len(plan)))]

    assert order(0, 3) == order(0, 3)
    assert order(0, 3) != order(0, 4)
    assert order(0, 3) != order(1, 3)
    kinds = [trees for trees, _ in order(0, 3)]
    assert kinds != sorted(kinds), "batches of text and of trees are mixed"
    assert sorted(row for trees, rows in order(0, 3) if trees for row in rows) == list(range(200))


def test_a_row_longer_than_a_batch_is_a_batch_of_its_own():
    assert [len(batch) for batch in make_batches(np.array([30, 30]), 20)] == [1, 1]
    nothing = plan_epoch(np.zeros(0, np.int64), context_length=8, batch_tokens=8)
    assert len(nothing) == 0
    assert nothing.padding_share() == 0.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_of_ranks_are_disjoint_and_together_the_batch(world_size):
    plan = plan_epoch(np.arange(1, 120), context_length=32, batch_tokens=128, key=(0, 0))
    for index in range(len(plan)):
        _, rows = plan.batch(index)
        shares = [rank_share(rows, rank, world_size) for rank in range(world_size)]
        assert sorted(np.concatenate(shares).tolist()) == sorted(rows.tolist())
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(ValueError, match=rf"rank must lie in 0 to {world_size - 1}, got {world_size}"):
        rank_share(rows, world_size, world_size)
