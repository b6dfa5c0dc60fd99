"""Codec and level of a collection's files: checked at once, written, kept by resume and merge."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pyarrow.parquet as pq
import pytest

from ecospec.cli.main import main
from ecospec.trace_collection.collect import collect
from ecospec.trace_collection.compression import codec_and_level, resolve_compression
from ecospec.trace_collection.manifest import StoreManifest
from ecospec.trace_collection.merge import merge_stores
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.store import TraceStore
from tests.collect_targets import VOCAB, make_target, make_tokenizer, texts
from tests.store_rows import SPEC, interrupted, same_rows, trace, write

TINY = dataclasses.replace(SPEC, num_layers=2, layer_indices=(0, 1), num_experts=8, vocab_size=VOCAB)


def codecs(folder):
    """Codecs of every column of every row group of a store, as Parquet itself says it."""
    found: set[str] = set()
    for file in sorted(folder.glob("*.parquet")):
        metadata = pq.ParquetFile(file).metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        found |= {group.column(column).compression for group in groups for column in range(metadata.num_columns)}
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zstd-1", ("zstd", 1)),
        ("zstd-22", ("zstd", 22)),
        ("brotli-0", ("brotli", 0)),
        ("brotli-11", ("brotli", 11)),
        ("none", ("none", None)),
    ],
)
def test_allowed_names_can_be_written(name, expected, tmp_path):
    assert codec_and_level(name) == expected
    store = write(tmp_path / "store", range(3), compression=name)
    assert codecs(store) == {{"none": "UNCOMPRESSED"}.get(expected[0], expected[0].upper())}
    same_rows(store, write(tmp_path / "default", range(3)))


@pytest.mark.parametrize(
    "name",
    [
        "zstd-0",
        "zstd-23",
        "brotli-12",
        "brotli--1",
        "brotli-09",
        "zstd",
        "gzip-6",
        "none-1",
        "",
        "ZSTD-3",
        "zstd-3\n",
    ],
)
def test_other_names_are_refused_before_anything_is_loaded(name, tmp_path, capsys):
    message = "compression must be auto, zstd-1 to zstd-22, brotli-0 to brotli-11 or none, got"
    with pytest.raises(ValueError, match=message):
        CollectConfig(compression=name)
    options = ("--target", str(tmp_path / "nowhere"), "--prompts", "nothing.jsonl", "--out", str(tmp_path / "out"))
    with pytest.raises(SystemExit) as stopped:
        main(["collect-traces", *options, f"--compression={name}"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_options_are_checked_without_a_parquet_library():
    code = "import sys, ecospec.trace_collection.plan; print('pyarrow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_collection_writes_and_keeps_what_was_asked_for(tmp_path):
    model, tokenizer, prompts = make_target(), make_tokenizer(), texts([30, 40, 50, 60])
    names = ("brotli-10", "zstd-1", "brotli-0", "none")  # the first is what auto stands for on this target
    configs = [CollectConfig(mode="teacher_forced")]
    configs += [CollectConfig(mode="teacher_forced", compression=name) for name in names[1:]]
    stores = [collect(model, tokenizer, prompts, c, tmp_path / c.compression, spec=TINY) for c in configs]
    for name, store in zip(names, stores, strict=True):
        assert store.manifest.collection["compression"] == name
        same_rows(store.path, stores[0].path)
    assert [codecs(store.path) for store in stores] == [{"BROTLI"}, {"ZSTD"}, {"BROTLI"}, {"UNCOMPRESSED"}]
    sizes = [store.manifest.shards[0].num_bytes for store in stores]
    assert sizes[0] < sizes[2] < sizes[3]  # the level counts, not the codec alone
    other = CollectConfig(mode="teacher_forced", compression="zstd-2")
    with pytest.raises(ValueError, match="was started with compression = 'zstd-1', this run has 'zstd-2'"):
        collect(model, tokenizer, prompts, other, tmp_path / "zstd-1", spec=TINY, resume=True)


@pytest.mark.parametrize(("layers", "chosen", "codec"), [(32, "brotli-10", "BROTLI"), (33, "zstd-9", "ZSTD")])
def test_large_targets_are_written_faster(layers, chosen, codec, tmp_path):
    """Up to 64 ids a token the smaller codec keeps up."""
    spec = dataclasses.replace(SPEC, num_layers=layers, layer_indices=tuple(range(layers)))
    store = write(tmp_path / "store", range(3), spec)
    assert TraceStore(store).manifest.collection["compression"] == chosen
    assert codecs(store) == {codec}
    again = write(tmp_path / "again", range(3), spec, compression=chosen)  # named, it is the same: of this level
    assert (again / "shard-00000.parquet").read_bytes() == (store / "shard-00000.parquet").read_bytes()
    assert write(again, [], spec, compression="auto", resume=True) == again
    assert resolve_compression(chosen, 1) == chosen


def test_a_store_from_before_the_option_is_resumed_with_any(tmp_path):
    options: dict[str, Any] = {"tokens_per_shard": 60, "plan_hash": "a" * 64}
    interrupted(tmp_path / "old", collection={"seed": 1}, **options)
    file = tmp_path / "old" / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["collection"].pop("compression") == "brotli-10"
    file.write_text(json.dumps(manifest))
    write(tmp_path / "old", [9], collection={"seed": 1}, compression="zstd-1", resume=True, **options)
    found = TraceStore(tmp_path / "old").manifest
    assert found.complete
    assert "compression" not in found.collection


@pytest.mark.parametrize("name", ["zstd-1", "brotli-0", "none"])
def test_a_merge_compresses_again_as_the_source_was(name, tmp_path):
    """The second store's shard is written anew without the row that the first has."""
    asked: dict[str, Any] = {"compression": name}
    first, second = write(tmp_path / "a", range(2)), write(tmp_path / "b", range(1, 30), **asked)
    merge_stores([first, second], tmp_path / "out", duplicates="skip")
    merge_stores([write(tmp_path / "c", [29]), tmp_path / "out"], tmp_path / "nested", duplicates="skip")
    for folder, number, rows in (("out", 1, range(2, 30)), ("nested", 2, range(2, 29))):
        shard = StoreManifest.load(tmp_path / folder).shards[number]
        alone = write(tmp_path / f"alone {folder}", rows, **asked)
        files = (tmp_path / folder / shard.file, alone / "shard-00000.parquet")
        groups = [pq.ParquetFile(file).metadata.row_group(0) for file in files]
        columns = [[group.column(place) for place in range(group.num_columns)] for group in groups]
        sizes = [[(column.compression, column.total_compressed_size) for column in each] for each in columns]
        assert sizes[0] == sizes[1]  # of the same level too
    assert [t.sequence_id for t in TraceStore(tmp_path / "out").iter_sequences()] == [
        trace(number).sequence_id for number in range(30)
    ]
