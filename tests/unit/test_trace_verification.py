"""Every kind of damage to a store is found and named."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ecospec.cli.main import main
from ecospec.trace_collection.inspection import inspect_store
from ecospec.trace_collection.manifest import sha256_of
from ecospec.trace_collection.tree_store import TreeStoreWriter
from ecospec.trace_collection.verification import MAX_LISTED, store_problems
from tests.store_rows import SPEC, interrupted, trace, write
from tests.unit.test_tree_store import tree


@pytest.fixture
def store(tmp_path):
    return write(tmp_path / "store", tokens_per_shard=60)


def relist(path, change, metadata=None, **entry):
    """Rewrite the first shard and list the new file, as a faulty writer would."""
    file = path / "shard-00000.parquet"
    table = pq.read_table(file)
    pq.write_table(change(table).replace_schema_metadata(metadata or table.schema.metadata), file)
    text = json.loads((path / "manifest.json").read_text())
    text["shards"][0] |= {"num_bytes": file.stat().st_size, "sha256": sha256_of(file), **entry}
    (path / "manifest.json").write_text(json.dumps(text))


def test_sound_stores(store, tmp_path):
    assert list(store_problems(store)) == []
    with TreeStoreWriter(tmp_path / "trees", SPEC) as writer:
        writer.append([tree(number) for number in range(5)])
    assert list(store_problems(tmp_path / "trees")) == []


def test_every_damaged_shard_has_a_line(store):
    files = sorted(store.glob("*.parquet"))
    assert len(files) >= 3
    files[0].write_bytes(files[0].read_bytes()[:-7])
    content = bytearray(files[1].read_bytes())
    content[len(content) // 2] ^= 4
    files[1].write_bytes(content)
    files[2].unlink()
    (store / "shard-00099.parquet").write_bytes(b"")
    found = list(store_problems(store))
    assert len(found) == 4
    for problem, words in zip(
        found,
        (
            "shard-00099.parquet is not listed",
            "is truncated or changed",
            "does not match its checksum",
            "is missing",
        ),
        strict=True,
    ):
        assert words in problem


@pytest.mark.parametrize("place", range(0, 1400, 97))
def test_any_flipped_byte_is_found(store, place):
    file = store / "shard-00000.parquet"
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1
    file.write_bytes(content)
    assert [p for p in store_problems(store) if "shard-00000.parquet does not match its checksum" in p]


def test_a_manifest_of_another_target(store, tmp_path):
    other = write(tmp_path / "other", tokens_per_shard=60, spec=dataclasses.replace(SPEC, vocab_size=101))
    text = json.loads((store / "manifest.json").read_text())
    text["spec"] = json.loads((other / "manifest.json").read_text())["spec"]
    (store / "manifest.json").write_text(json.dumps(text))
    found = list(store_problems(store))
    assert len(found) == len(text["shards"])
    assert "another target than manifest.json says: vocab_size differs (100, manifest.json: 101)" in found[0]


def test_rows_that_break_the_contract(store):
    def zero(table):
        values = table["experts"].combine_chunks().flatten()
        flat = values.flatten().to_numpy().copy()
        flat[:6] = 0  # the first token of the first sequence, K = 2
        width = pa.FixedSizeListArray.from_arrays(pa.array(flat), 6)
        column = pa.ListArray.from_arrays(table["experts"].combine_chunks().offsets, width)
        return table.set_column(7, "experts", column)

    relist(store, zero)
    (problem,) = store_problems(store)
    assert "sequence 's0': experts must be unique and ascending within a layer, got [0, 0] at row 0" in problem
    relist(store, lambda t: t.set_column(5, "prompt_length", pa.array([99] * len(t), pa.int32())))
    assert len(list(store_problems(store))) == pq.read_metadata(store / "shard-00000.parquet").num_rows


def test_wrong_counts_and_doubled_rows(store):
    relist(store, lambda t: t, tokens=3)
    assert any("tokens with experts, manifest.json says 3" in p for p in store_problems(store))
    relist(store, lambda t: t, rows=77)
    assert any("rows, manifest.json says 77" in p for p in store_problems(store))
    relist(store, lambda t: pa.concat_tables([t, t.slice(0, 1)]), rows=3)
    text = json.loads((store / "manifest.json").read_text())
    text["shards"][0]["rows"] = pq.read_metadata(store / "shard-00000.parquet").num_rows
    (store / "manifest.json").write_text(json.dumps(text))
    assert any("sequence 's0' is in it already" in p for p in store_problems(store))


def test_long_lists_are_cut(tmp_path):
    path = write(tmp_path / "store", range(MAX_LISTED + 5))
    relist(path, lambda t: t.set_column(2, "dataset", pa.array([""] * len(t))))
    found = list(store_problems(path))
    assert len(found) == MAX_LISTED + 1
    assert found[-1].endswith(": 5 more problems")


def test_incomplete_stores_and_listings(tmp_path):
    interrupted(tmp_path / "part", tokens_per_shard=60)
    (problem,) = store_problems(tmp_path / "part")
    assert "is incomplete: resume the collection with --resume, or pass --allow-incomplete" in problem
    assert list(store_problems(tmp_path / "part", allow_incomplete=True)) == []
    path = write(tmp_path / "store", collection={"skipped": {"empty": 2}})
    (problem,) = store_problems(path)
    assert "skipped.jsonl is missing: manifest.json counts 2 prompts left out" in problem
    (path / "skipped.jsonl").write_text('{"prompt": 0}\n[1]\n')
    (problem,) = store_problems(path)
    assert "skipped.jsonl, line 2 is not a JSON object" in problem


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code


def test_command(store, tmp_path, capsys):
    assert run("traces", "verify", str(store)) == 0
    assert "is sound: 10 rows" in capsys.readouterr().out
    for file in list(store.glob("*.parquet"))[:2]:
        file.unlink()
    assert run("traces", "verify", str(store), "--json", str(tmp_path / "problems.json")) == 2
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert shown.err == f"ecospec traces verify: error: {store} has 2 problems\n"
    assert json.loads((tmp_path / "problems.json").read_text())["problems"] == shown.out.splitlines()
    assert run("traces", "verify", str(tmp_path / "nothing")) == 2
    assert "does not exist; give the folder of a trace store" in capsys.readouterr().err
    (store / "manifest.json").write_text("{")
    assert run("traces", "verify", str(store)) == 2
    assert "manifest.json is not JSON" in capsys.readouterr().err


def test_merge_command(tmp_path, capsys):
    first, second = write(tmp_path / "a", range(4)), write(tmp_path / "b", range(3, 6))
    assert run("traces", "merge", f"{first},{second}", "--out", str(tmp_path / "out")) == 2
    assert "pass --duplicates skip" in capsys.readouterr().err
    assert run("traces", "merge", f"{first},{second}", "--out", str(tmp_path / "out"), "--duplicates", "skip") == 0
    assert f"6 rows, {sum_tokens(range(6))} tokens with experts" in capsys.readouterr().out
    assert run("traces", "merge", f"{first},", "--out", str(tmp_path / "x")) == 2
    assert "holds an empty entry; write A,B" in capsys.readouterr().err
    assert run("traces", "merge", f"{first},{second}", "--out", str(tmp_path / "x"), "--duplicates", "keep") == 2
    assert "--duplicates must be one of refuse, skip, got 'keep'" in capsys.readouterr().err


def sum_tokens(numbers):
    from tests.store_rows import trace

    return int(np.sum([trace(number).num_processed for number in numbers]))


@pytest.mark.parametrize("spec", [b"{", b"[]", b"\xff", b"{}"])
def test_metadata_that_name_no_target(store, spec):
    relist(store, lambda table: table, {b"ecospec.spec": spec})
    (problem,) = store_problems(store)
    assert "shard-00000.parquet does not say which target it was recorded from" in problem


@pytest.mark.parametrize("verb", ["verify", "info"])
def test_reports_do_not_replace_files_of_a_store(store, capsys, verb):
    before = (store / "manifest.json").read_bytes()
    with pytest.raises(SystemExit) as stop:
        main(["traces", verb, str(store), "--json", str(store / "manifest.json")])
    assert stop.value.code == 2
    assert "lies in a trace store; name a file outside" in capsys.readouterr().err
    assert (store / "manifest.json").read_bytes() == before


def test_info_of_damaged_rows(store):
    """What is no number, or no expert of the target, must not be counted as if it were."""
    relist(store, lambda table: table.set_column(0, table.schema.field(0), pa.nulls(table.num_rows, pa.string())))
    with pytest.raises(ValueError, match="column 'sequence_id' holds nulls; `ecospec traces verify"):
        inspect_store(store)
    content = bytearray((store / "shard-00001.parquet").read_bytes())
    content[len(content) // 2] ^= 4
    (store / "shard-00001.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00001\.parquet does not match its checksum"):
        inspect_store(store)


def test_info_counts_ids_of_no_expert(tmp_path):
    narrow = dataclasses.replace(SPEC, num_experts=12)
    path = write(tmp_path / "store")
    text = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(text | {"spec": narrow.to_dict()}))
    experts = np.concatenate([trace(number).experts for number in range(10)])
    (warning,) = [line for line in inspect_store(path).warnings if "none of this target's 0 to 11" in line]
    assert warning.startswith(f"{(experts >= 12).sum():,} expert ids are ")
