"""Merged stores hold the rows of their sources, once each, and say where they come from."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ecospec.trace_collection import merge
from ecospec.trace_collection.manifest import StoreManifest
from ecospec.trace_collection.merge import merge_stores
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.store_lock import StoreLock
from ecospec.trace_collection.tree_store import TreeStore, TreeStoreWriter
from ecospec.trace_collection.verification import store_problems
from tests.store_rows import SPEC, interrupted, same, trace, write
from tests.unit.test_tree_store import tree


def test_rows_are_those_of_the_sources_in_order(tmp_path):
    first = write(tmp_path / "a", range(6), tokens_per_shard=60, collection={"seed": 1}, plan_hash="a" * 64)
    second = write(tmp_path / "b", range(6, 10), collection={"seed": 2}, provenance={"git_sha": "abc"})
    report = merge_stores([first, second], tmp_path / "out", provenance={"argv": ["merge"]})
    merged = TraceStore(tmp_path / "out")
    assert list(store_problems(tmp_path / "out")) == []
    for number, mine in enumerate(merged.iter_sequences()):
        same(mine, trace(number))
    assert (report.rows, report.tokens, set(report.duplicates.values())) == (10, merged.num_tokens, {0})
    sources = [StoreManifest.load(folder) for folder in (first, second)]
    for entry, folder, source in zip(merged.manifest.collection["merged"], (first, second), sources, strict=True):
        assert entry["store"] == str(folder)
        assert entry["collection"] == source.collection
        assert entry["provenance"] == source.provenance
        assert entry["plan_hash"] == source.plan_hash
        assert (entry["rows"], entry["tokens"]) == (source.rows, source.tokens)
    assert merged.manifest.provenance["argv"] == ["merge"]
    checksums = [shard.sha256 for source in sources for shard in source.shards]
    assert [shard.sha256 for shard in merged.manifest.shards] == checksums  # copied, not written again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]
    third = write(tmp_path / "c", range(20, 22))
    merge_stores([tmp_path / "out", third], tmp_path / "again")
    nested = StoreManifest.load(tmp_path / "again").collection["merged"][0]["collection"]
    assert nested == merged.manifest.collection


def test_duplicates_are_refused_or_counted(tmp_path):
    stores = [write(tmp_path / "a", range(5)), write(tmp_path / "b", range(3, 9), tokens_per_shard=40)]
    with pytest.raises(ValueError, match=r"in an earlier store already: 2 of .*b; leave a store out, or pass"):
        merge_stores(stores, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = merge_stores(stores, tmp_path / "out", duplicates="skip")
    assert list(report.duplicates.values()) == [0, 2]
    assert list(store_problems(tmp_path / "out")) == []
    merged = TraceStore(tmp_path / "out")
    for number, mine in enumerate(merged.iter_sequences()):
        same(mine, trace(number))
    assert merged.num_rows == 9
    assert merged.num_tokens == sum(trace(number).num_processed for number in range(9))
    assert merged.manifest.collection["merged"][1]["duplicates"] == 2
    whole = merge_stores([stores[0], tmp_path / "out"], tmp_path / "twice", duplicates="skip")
    assert whole.rows == 9


def test_trees_merge_by_step(tmp_path):
    for name, numbers in (("a", range(5)), ("b", range(4, 9))):
        with TreeStoreWriter(tmp_path / name, SPEC) as writer:
            writer.append([tree(number) for number in numbers])
    report = merge_stores([tmp_path / "a", tmp_path / "b"], tmp_path / "out", duplicates="skip")
    assert [mine.position for mine in TreeStore(tmp_path / "out").iter_trees()] == list(range(9))
    assert list(report.duplicates.values()) == [0, 1]
    assert list(store_problems(tmp_path / "out")) == []
    with pytest.raises(ValueError, match=r"a is a draft_tree_trace store and .*traces a routing_trace store"):
        merge_stores([tmp_path / "a", write(tmp_path / "traces")], tmp_path / "no")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target_fingerprint": "2" * 64}, "target_fingerprint"),
        ({"num_experts": 17}, "num_experts"),
        ({"vocab_size": 101}, "vocab_size"),
        ({"tokenizer_fingerprint": "3" * 64}, "tokenizer_fingerprint"),
        ({"layer_indices": (0, 1, 2)}, "layer_indices"),
    ],
)
def test_other_targets_are_refused_by_field(tmp_path, change, field):
    other = write(tmp_path / "b", range(10, 12), dataclasses.replace(SPEC, **change))
    with pytest.raises(ValueError, match=rf"another target than store .*: {field} differ"):
        merge_stores([write(tmp_path / "a"), other], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_names_of_a_target_may_differ(tmp_path):
    other = write(tmp_path / "b", range(10, 12), dataclasses.replace(SPEC, target_id="elsewhere"))
    assert merge_stores([write(tmp_path / "a"), other], tmp_path / "out").rows == 12
    assert list(store_problems(tmp_path / "out")) == []


def test_refusals(tmp_path):
    first, second = write(tmp_path / "a", range(3)), write(tmp_path / "b", range(3, 6))
    with pytest.raises(ValueError, match="at least two stores, got 1"):
        merge_stores([first], tmp_path / "out")
    with pytest.raises(ValueError, match="a is named twice"):
        merge_stores([first, second, tmp_path / "b" / ".." / "a"], tmp_path / "out")
    with pytest.raises(FileExistsError, match="b exists; name a new folder"):
        merge_stores([first, second], second)
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        merge_stores([first, tmp_path / "nothing"], tmp_path / "out")
    with pytest.raises(ValueError, match="has column 'weights'; merge stores that were collected with the same"):
        merge_stores([first, write(tmp_path / "w", range(6, 8), weights=True)], tmp_path / "out")
    interrupted(tmp_path / "part", tokens_per_shard=60)
    with pytest.raises(ValueError, match="part is incomplete"):
        merge_stores([first, tmp_path / "part"], tmp_path / "out")
    (second / "shard-00000.parquet").write_bytes(b"x" * StoreManifest.load(second).shards[0].num_bytes)
    with pytest.raises(ValueError, match="does not match its checksum"):
        merge_stores([first, second], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_killed_and_running_merges(tmp_path, monkeypatch):
    stores = [write(tmp_path / "a", range(3)), write(tmp_path / "b", range(3, 6))]
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "shard-00007.parquet").write_bytes(b"of a killed merge")
    lock = StoreLock(partial)
    with pytest.raises(ValueError, match=r"out\.partial is being written by process"):
        merge_stores(stores, tmp_path / "out")
    lock.release()
    monkeypatch.setattr(merge, "_write_shard", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        merge_stores(stores, tmp_path / "out")
    assert not partial.exists()  # a full disk gets its space back
    monkeypatch.undo()
    merge_stores(stores, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "shard-00000.parquet",
        "shard-00001.parquet",
    ]


def test_skipped_prompts_are_kept(tmp_path):
    stores = []
    for number, name in enumerate("ab"):
        collection = {"skipped": {"empty": 1, f"reason {name}": 2}}
        stores.append(write(tmp_path / name, range(3 * number, 3 * number + 3), collection=collection))
        (tmp_path / name / "skipped.jsonl").write_text(json.dumps({"prompt": number, "reason": "empty"}) + "\n")
    merge_stores(stores, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert lines == [{"store": str(s), "prompt": n, "reason": "empty"} for n, s in enumerate(stores)]
    skipped = StoreManifest.load(tmp_path / "out").collection["skipped"]
    assert skipped == {"empty": 2, "reason a": 2, "reason b": 2}
    assert list(store_problems(tmp_path / "out")) == []


def test_nothing_that_a_merge_did_not_write_is_touched(tmp_path):
    stores = [write(tmp_path / "a", range(3)), write(tmp_path / "b", range(3, 6))]
    mine = write(tmp_path / "out.partial", range(2))
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    with pytest.raises(FileExistsError, match=r"out\.partial holds 'manifest\.json'; merging writes there first"):
        merge_stores(stores, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="link exists; name a new folder"):
        merge_stores(stores, tmp_path / "link")


@pytest.mark.parametrize("line", ["null", "{", "[" * 100_000])
def test_damaged_lists_of_skipped_prompts_are_named(tmp_path, line):
    stores = [write(tmp_path / "a", range(3)), write(tmp_path / "b", range(3, 6))]
    (tmp_path / "b" / "skipped.jsonl").write_text('{"prompt": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"skipped\.jsonl, line 2 is not a JSON object"):
        merge_stores(stores, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
