"""Round trips, readers without our code, damage, and resuming of routing trace stores."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import datasets
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection import encoding
from ecospec.trace_collection.manifest import StoreManifest
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from ecospec.trace_collection.tree_store import TreeStore
from ecospec.train.arrays import open_stores
from tests.store_rows import SPEC, WIDE, interrupted, same, trace, write


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("weights", [False, True])
def test_round_trip(tmp_path, monkeypatch, spec, weights):
    monkeypatch.setattr(encoding, "IDS_PER_ROW_GROUP", 300)  # 50 tokens: several row groups
    path = write(tmp_path / "store", spec=spec, weights=weights, tokens_per_shard=100, collection={"mode": "x"})
    store = TraceStore(path)
    store.verify()
    originals = [trace(number, spec, weights=weights) for number in range(10)]
    for mine, other in zip(store.iter_sequences(), originals, strict=True):
        same(mine, other)
    assert store.spec == spec
    assert store.num_rows == 10
    assert store.num_tokens == sum(t.num_processed for t in originals)
    assert len(store.manifest.shards) > 1
    assert store.manifest.complete
    assert store.manifest.collection == {"mode": "x", "compression": "brotli-10"}
    assert [tuple(entry) for entry in store.index()] == [
        (t.sequence_id, t.group_id, t.dataset, t.num_tokens, t.prompt_length, t.num_processed) for t in originals
    ]


def test_row_groups_are_bounded_however_uneven_the_rows(monkeypatch, tmp_path):
    """A group takes memory while it is encoded; a longer row is a group of its own."""
    monkeypatch.setattr(encoding, "IDS_PER_ROW_GROUP", 300)  # 50 tokens
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = rng.choice([1, 2, 10, 49, 50, 51, 200], rng.integers(1, 30))
        groups = encoding.row_groups(tokens, SPEC)
        parts = np.split(tokens, np.cumsum(groups)[:-1])
        assert sum(groups) == tokens.size
        assert all(part.sum() <= 50 or part.size == 1 for part in parts)
        assert all(left.sum() + right[0] > 50 for left, right in itertools.pairwise(parts))  # none too early
    path = write(tmp_path / "store", range(20))
    metadata = pq.ParquetFile(path / "shard-00000.parquet").metadata
    written = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert written == encoding.row_groups(np.array([trace(n).num_processed for n in range(20)]), SPEC)
    assert len(written) > 3


def test_reading_some_columns_and_groups(tmp_path):
    store = TraceStore(write(tmp_path / "store", weights=True))
    for mine in store.iter_sequences(columns=["token_ids"]):
        assert mine.experts.shape == (mine.num_processed, 0, 0)
        assert mine.weights is None
    plain = list(store.iter_sequences(columns=["experts"]))
    assert all(mine.weights is None and mine.experts.size for mine in plain)
    chosen = [t.sequence_id for t in store.iter_sequences(group_filter=lambda group: group in {"g1", "g4"})]
    assert chosen == ["s2", "s3", "s8", "s9"]
    with pytest.raises(ValueError, match="unknown column 'logits'; allowed: sequence_id"):
        next(store.iter_sequences(columns=["logits"]))


def test_read_arrays_are_views(tmp_path):
    first = next(TraceStore(write(tmp_path / "store")).iter_sequences())
    assert not first.experts.flags.owndata
    assert not first.experts.flags.writeable


def test_other_readers_need_none_of_our_code(tmp_path):
    path = write(tmp_path / "store")
    expected = [trace(number) for number in range(10)]
    frame = pd.read_parquet(path / "shard-00000.parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    for number, original in enumerate(expected):
        for row in (frame.iloc[number], loaded[number]):
            assert row["sequence_id"] == original.sequence_id
            assert np.array_equal(np.stack(row["experts"]).reshape(original.experts.shape), original.experts)
            assert list(row["token_ids"]) == original.token_ids.tolist()


def test_shard_metadata_says_what_it_is(tmp_path):
    path = write(tmp_path / "store", collection={"seed": 7})
    metadata = pq.read_schema(path / "shard-00000.parquet").metadata
    assert RoutingSpec.from_dict(json.loads(metadata[b"ecospec.spec"])) == SPEC
    assert json.loads(metadata[b"ecospec.collection"]) == {"seed": 7, "compression": "brotli-10"}
    assert metadata[b"ecospec.format_version"] == b"1"
    assert "pyarrow" in json.loads(metadata[b"ecospec.provenance"])["versions"]
    column = pq.ParquetFile(path / "shard-00000.parquet").metadata.row_group(0).column(7)
    assert column.compression == "BROTLI"
    assert "BYTE_STREAM_SPLIT" in column.encodings


def test_missing_and_foreign_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give the folder of a trace store"):
        TraceStore(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is not a trace store: it has no manifest\.json"):
        TraceStore(tmp_path)
    with pytest.raises(ValueError, match="a draft_tree_trace store is needed; collect-trees writes one"):
        TreeStore(write(tmp_path / "store"))
    with pytest.raises(ValueError, match=r"no manifest\.json; give one of the stores in it: .*/store$"):
        TraceStore(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty; resume it or choose another folder"):
        TraceStoreWriter(tmp_path / "other", SPEC)
    with pytest.raises(FileExistsError, match=r"holds 'notes\.txt' but no trace store"):
        TraceStoreWriter(tmp_path / "other", SPEC, resume=True)


def test_truncated_missing_and_changed_shards(tmp_path):
    path = write(tmp_path / "store")
    shard = path / "shard-00000.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ValueError, match=r"shard-00000\.parquet is truncated or changed"):
        TraceStore(path)
    shard.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(ValueError, match=r"shard-00000\.parquet does not match its checksum"):
        TraceStore(path).verify()
    with pytest.raises(ValueError, match=r"shard-00000\.parquet does not match its checksum"):
        TraceStoreWriter(path, SPEC, resume=True)
    damaged = bytearray(content)
    damaged[4:900] = bytes(896)  # the footer, at the end, is whole
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"shard-00000\.parquet cannot be read .*; restore it or collect again"):
        next(TraceStore(path).iter_sequences())
    shard.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match="is not a readable Parquet file"):
        next(TraceStore(path).iter_sequences())
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.parquet is missing but listed"):
        TraceStore(path)


def replace_shard(path, change):
    """Rewrite the shard and list the new file, as a faulty writer would."""
    file = path / "shard-00000.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    text = json.loads((path / "manifest.json").read_text())
    text["shards"][0]["num_bytes"] = file.stat().st_size
    (path / "manifest.json").write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns("origin"), "column 'origin' is missing"),
        (lambda t: t.append_column("extra", pa.array(range(len(t)))), "column 'extra' is unknown"),
        (
            lambda t: t.set_column(5, "prompt_length", t["prompt_length"].cast(pa.int64())),
            "column 'prompt_length' is int64, expected int32",
        ),
        (lambda t: t.slice(1), "has 9 rows, manifest.json says 10"),
        (
            lambda t: t.set_column(5, "prompt_length", pa.array([99] * len(t), pa.int32())),
            "sequence 's0': prompt_length must be an integer from 0 to",
        ),
        (
            lambda t: t.set_column(6, "origin", pa.array(["teacher_forced"] * len(t))),
            "sequence 's1': experts must have one row per processed token",
        ),
    ],
)
def test_contract_is_checked_on_read(tmp_path, change, message):
    path = write(tmp_path / "store")
    replace_shard(path, change)
    with pytest.raises(ValueError, match=message):
        list(TraceStore(path).iter_sequences())


def test_expert_ids_are_checked_on_read(tmp_path):
    path = write(tmp_path / "store", spec=dataclasses.replace(SPEC, num_experts=17))
    text = (path / "manifest.json").read_text().replace('"num_experts": 17', '"num_experts": 12')
    (path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="experts must lie in 0 to 11"):
        list(TraceStore(path).iter_sequences())


def test_contract_is_checked_on_write(tmp_path):
    writer = TraceStoreWriter(tmp_path / "store", SPEC)
    with pytest.raises(ValueError, match="experts must be uint8 for 16 experts, got uint16"):
        writer.append([trace(1, WIDE)])
    with pytest.raises(ValueError, match="'s1' has weights, the store was opened with weights=False"):
        writer.append([trace(1, weights=True)])
    with pytest.raises(ValueError, match="a unit must hold at least one record"):
        writer.append([])
    writer.close()
    with pytest.raises(ValueError, match="is complete; nothing can be added"):
        writer.append([trace(1)])
    with pytest.raises(ValueError, match="tokens_per_shard must be at least 1"):
        TraceStoreWriter(tmp_path / "more", SPEC, tokens_per_shard=0)
    with pytest.raises(ValueError, match="has no weights"):
        TraceStoreWriter(tmp_path / "weights", SPEC, weights=True).append([trace(1)])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format_version", 2, "format_version is 2, this version reads 1"),
        ("kind", "logs", "kind must be one of routing_trace, draft_tree_trace"),
        ("collection", [], "collection must be a JSON object"),
        ("provenance", 3, "provenance must be a JSON object"),
        ("plan_hash", "abc", "plan_hash must be empty or 64"),
        ("complete", 1, "complete must be true or false"),
        ("collection", {"skipped": ["empty"]}, r"collection\.skipped must hold a number of prompts by reason"),
        ("collection", {"skipped": {"empty": "x"}}, r"collection\.skipped must hold a number of prompts by reason"),
        ("collection", {"temperature": float("nan")}, "NaN is no JSON value"),
        ("spec", SPEC.to_dict() | {"num_experts": 2**16 + 1}, "num_experts must be at most 65536"),
        ("shards", {}, "shards must be a list"),
        ("shards", [{}], r"shards\[0\]: field 'file' is missing"),
        ("shards", [5], r"shards\[0\]: expected a JSON object, got int"),
        ("spec", {}, "RoutingSpec field"),
        ("surprise", 1, "unknown field 'surprise'; allowed: kind"),
        ("rows", None, "unknown field 'rows'"),
    ],
)
def test_manifest_errors_name_file_and_field(tmp_path, name, value, message):
    path = write(tmp_path / "store")
    data = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(data | {name: value}))
    with pytest.raises(ValueError, match=message) as caught:
        TraceStore(path)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("file", "../x", "file must look like 'shard-00000.parquet'"),
        ("file", "shard-00001.parquet", r"shards\[0\] must be 'shard-00000.parquet'"),
        ("rows", 0, "rows of shard-00000.parquet must be a positive integer"),
        ("tokens", 2**63, "tokens of shard-00000.parquet must be a positive integer"),
        ("sha256", "no", "sha256 of shard-00000.parquet must be 64"),
    ],
)
def test_shard_entries_are_checked(tmp_path, name, value, message):
    path = write(tmp_path / "store")
    data = json.loads((path / "manifest.json").read_text())
    data["shards"][0][name] = value
    (path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        TraceStore(path)


def test_manifest_that_is_no_json(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        TraceStore(tmp_path)
    for damage in ("[" * 100_000, '{"a": ' + "1" * 5000 + "}"):  # deeper, and longer, than json reads
        (tmp_path / "manifest.json").write_text(damage)
        with pytest.raises(ValueError, match=r"manifest\.json is not JSON"):
            StoreManifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="field 'kind' is missing"):
        StoreManifest.load(tmp_path)


def test_resume_gives_the_same_shards(tmp_path):
    options: dict[str, Any] = {"tokens_per_shard": 45, "collection": {"seed": 1}, "plan_hash": "a" * 64}
    whole = TraceStore(write(tmp_path / "whole", **options))
    interrupted(tmp_path / "part", **options)
    partial = TraceStore(tmp_path / "part")
    with pytest.raises(ValueError, match="part is incomplete: resume the collection with --resume, or collect"):
        open_stores([tmp_path / "part"])
    assert 0 < partial.num_rows < 5
    with pytest.raises(FileExistsError, match="is not empty"):
        TraceStoreWriter(tmp_path / "part", SPEC, **options)
    with TraceStoreWriter(tmp_path / "part", SPEC, resume=True, **options) as writer:
        assert writer.finished_units == partial.num_rows
        for number in range(writer.finished_units, 10):
            writer.append([trace(number)])
    assert TraceStore(tmp_path / "part").manifest.shards == whole.manifest.shards  # checksums included
    assert not list((tmp_path / "part").glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collection": {"seed": 2}}, "was started with seed = 1, this run has 2"),
        ({"collection": {}}, "was started with seed = 1, this run has None"),
        ({"plan_hash": "b" * 64}, "was started with another batch plan"),
        ({"spec": dataclasses.replace(SPEC, top_k=1)}, r"another target than store .*: top_k differ"),
    ],
)
def test_resume_refuses_another_run(tmp_path, change, message):
    options = {"collection": {"seed": 1}, "plan_hash": "a" * 64}
    interrupted(tmp_path / "part", tokens_per_shard=60, **options)
    arguments: dict[str, Any] = {"spec": SPEC, "resume": True} | options | change
    with pytest.raises(ValueError, match=message):
        TraceStoreWriter(tmp_path / "part", **arguments)


def test_resume_before_the_first_manifest(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "manifest.json.tmp").write_text("{")
    assert TraceStore(write(tmp_path / "part", resume=True)).num_rows == 10


def test_rows_of_a_resumed_store_are_those_of_its_units(tmp_path):
    """A manifest that lists more units than were collected must not make a resumed run leave sequences out."""
    write(tmp_path / "store", range(4), tokens_per_shard=1)
    with TraceStoreWriter(tmp_path / "store", SPEC, resume=True) as writer:
        writer.require_rows(writer.finished_units)
        with pytest.raises(ValueError, match=r"lists 4 rows of 4 batches, planned were 5; it is damaged"):
            writer.require_rows(5)
