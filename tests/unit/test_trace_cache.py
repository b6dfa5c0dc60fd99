"""Traces as files: the same content as in memory, built once, built anew when stale."""

import dataclasses
import pickle

import numpy as np
import pytest

from ecospec.train.arrays import open_stores, read_arrays
from ecospec.train.cache import open_cache
from ecospec.train.splits import SplitConfig, assign_splits, split_arrays
from tests.trace_files import SPEC, make_arrays, write_store

LENGTHS = [3, 40, 5, 6, 17, 1]
GROUPS = ["a", "b", "a", "c", "ä", "b"]


def stores_of(tmp_path, arrays):
    paths = [write_store(tmp_path / "one", arrays, range(2)), write_store(tmp_path / "two", arrays, range(2, 6))]
    return open_stores(paths)


@pytest.mark.parametrize("num_experts", [8, 300])
def test_files_hold_what_the_stores_hold(tmp_path, num_experts):
    spec = dataclasses.replace(SPEC, num_experts=num_experts)
    arrays = make_arrays(LENGTHS, GROUPS, list("xxyyzz"), spec=spec)
    stores = stores_of(tmp_path, arrays)
    cache = open_cache(stores, tmp_path / "cache")
    assert cache.fingerprint() == arrays.fingerprint() == read_arrays(stores).fingerprint()
    loaded = cache.load()
    assert loaded.experts.dtype == arrays.experts.dtype == np.dtype("uint8" if num_experts == 8 else "uint16")
    np.testing.assert_array_equal(loaded.experts, arrays.experts)
    assert (loaded.group_ids, loaded.datasets) == (arrays.group_ids, arrays.datasets)
    keep = np.array([False, True, False, True, True, False])
    part = cache.select(keep)
    assert part.fingerprint() == arrays.subset(keep).fingerprint()
    assert list(part.names("sequence_id")) == ["sequence1", "sequence3", "sequence4"]
    for source in (arrays.subset(keep), part, pickle.loads(pickle.dumps(part))):
        tokens, experts = source.window(2, 4, 10)
        np.testing.assert_array_equal(tokens, arrays.tokens[58:68])
        np.testing.assert_array_equal(experts, arrays.experts[58:68])
    config = SplitConfig(0.5, seed=3)
    np.testing.assert_array_equal(assign_splits(cache.table(3), config), split_arrays(arrays, config))


def test_many_sequences_need_several_pages(tmp_path):
    arrays = make_arrays([2] * 9000, [f"g{i % 4500}" for i in range(9000)])
    cache = open_cache(open_stores([write_store(tmp_path / "store", arrays)]), tmp_path / "cache")
    keep = np.random.default_rng(0).random(9000) < 0.3
    assert cache.select(keep).fingerprint() == arrays.subset(keep).fingerprint()
    few = cache.select(keep).load(max_tokens=100)
    assert len(few.tokens) == 100
    assert len(set(few.group_ids)) > 45, "spread over all, not the first ones"
    assert few.fingerprint() == cache.select(keep).load(max_tokens=100).fingerprint()


def test_built_once_and_anew_when_the_stores_change(tmp_path):
    arrays = make_arrays(LENGTHS, GROUPS)
    stores, folder = stores_of(tmp_path, arrays), tmp_path / "cache"
    open_cache(stores, folder)
    built = (folder / "cache.json").stat().st_mtime_ns
    open_cache(stores, folder)
    assert (folder / "cache.json").stat().st_mtime_ns == built
    assert open_cache(stores[:1], folder).num_tokens == 43, "other stores"
    full = open_cache(stores, folder).fingerprint()
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-4])
    assert open_cache(stores, folder).fingerprint() == full, "a torn file"
    (folder / "cache.json").write_text("{")
    assert open_cache(stores, folder).fingerprint() == full, "torn facts"
    assert sorted(file.name for file in tmp_path.iterdir()) == [".cache.lock", "cache", "one", "two"]


def test_an_interrupted_build_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    stores = stores_of(tmp_path, make_arrays(LENGTHS, GROUPS))

    def stop(_store, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(stores[0]), "iter_sequences", stop)
        with pytest.raises(KeyboardInterrupt):
            open_cache(stores, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert open_cache(stores, tmp_path / "cache").num_tokens == sum(LENGTHS)


def test_refusals(tmp_path):
    arrays = make_arrays(LENGTHS, GROUPS)
    stores = stores_of(tmp_path, arrays)
    with pytest.raises(ValueError, match="one is named twice; name every store once"):
        open_stores([tmp_path / "one", tmp_path / "two", tmp_path / "two" / ".." / "one"])
    other = make_arrays(LENGTHS, GROUPS, spec=dataclasses.replace(SPEC, top_k=3))
    write_store(tmp_path / "other", other)
    with pytest.raises(ValueError, match=r"other was made for another target than .*one: top_k differ"):
        open_stores([tmp_path / "one", tmp_path / "other"])
    with pytest.raises(ValueError, match=r"one exists and is no cache of traces; remove it, or name another"):
        open_cache(stores, tmp_path / "one")
    cache = open_cache(stores, tmp_path / "cache")
    (tmp_path / "cache" / "experts.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"experts\.bin is truncated; remove its folder"):
        cache.window(1, 0, 40)
