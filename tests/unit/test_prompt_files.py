"""Readers of prompt files: JSONL, compressed JSONL, Parquet, folders."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ecospec.trace_collection.prompts import datasets_of, iter_prompts, load_prompts

LINES = b"".join(b'{"question": "why %d"}\n' % i for i in range(100))


def test_compressed_files_read_as_plain_ones(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES[:600]) + gzip.compress(LINES[600:]))  # two members
    (tmp_path / "a.jsonl.zst").write_bytes(pa.compress(LINES, "zstd", asbytes=True))
    plain = load_prompts(str(tmp_path / "a.jsonl"))
    assert [prompt.messages for prompt in plain] == [(("user", f"why {i}"),) for i in range(100)]
    assert load_prompts(str(tmp_path / "a.jsonl.gz")) == plain
    assert load_prompts(str(tmp_path / "a.jsonl.zst")) == plain


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_damaged_compressed_files(tmp_path, ending):
    whole = gzip.compress(LINES) if ending == "gz" else pa.compress(LINES, "zstd", asbytes=True)
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{ending}.*: cannot be read \(.*\); write the file again"):
        load_prompts(str(path))
    path.write_bytes(LINES)
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{ending}.*: cannot be read \(.*\); write the file again"):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"bad\.jsonl:2: not JSON \(.*\); write one object per line"),
        (b"[1]", r"bad\.jsonl:2: expected a JSON object, got list; write one per line"),
        (b"[" * 100_000, r"bad\.jsonl:2: not JSON \(maximum recursion depth"),
        (b'{"text": ' + b"1" * 5000 + b"}", r"bad\.jsonl:2: not JSON \(Exceeds the limit"),
        (b"\x93NUMPY\xff\xfe", r"bad\.jsonl:2: not UTF-8 text .*; write one JSON object per line"),
        (b'{"text": "\\ud800"}', r"bad\.jsonl:2: holds a lone surrogate such as \\ud800; remove it"),
    ],
)
def test_lines_that_are_no_record_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_parquet_has_the_same_layouts(tmp_path):
    records: list[dict[str, Any]] = [
        {"turns": ["first", "second"], "category": "writing"},
        {"question": "why", "category": None},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
        {"text": "a document", "group_id": "file1"},
    ]
    keys = ("turns", "question", "messages", "text", "category", "group_id")
    columns = {key: [record.get(key) for record in records] for key in keys}
    pq.write_table(pa.table(columns | {"image": [b"\x00"] * 4}), tmp_path / "mixed.parquet")
    lines = tmp_path / "mixed.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert load_prompts(str(tmp_path / "mixed.parquet")) == load_prompts(str(lines))


def test_parquet_errors(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"instruction": ["do"], "output": ["done"]}), path)
    with pytest.raises(
        ValueError, match=r"a\.parquet: none of the columns messages, .* with #column: instruction, out"
    ):
        load_prompts(str(path))
    assert load_prompts(f"{path}#instruction")[0].messages == (("user", "do"),)
    pq.write_table(pa.table({"question": ["why", None]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: row 1: none of the keys"):
        load_prompts(str(path))
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match=r"a\.parquet holds no prompts"):
        load_prompts(str(path))
    path.write_bytes(b"PAR1 no, it is not")
    with pytest.raises(ValueError, match=r"a\.parquet: row 0 cannot be read \(.*\); write the file again"):
        load_prompts(str(path))


def test_folders_are_read_in_order_of_their_paths(tmp_path):
    for name in ("b.jsonl", "a-00001-of-00002.jsonl", "a-00000-of-00002.jsonl", "sub/c.jsonl", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"question": name}) + "\n")
    (tmp_path / "README.md").write_text("not a prompt file")
    prompts = load_prompts(str(tmp_path))
    asked = [prompt.messages[0][1] for prompt in prompts if prompt.messages]
    assert asked == ["a-00000-of-00002.jsonl", "a-00001-of-00002.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert datasets_of(prompts) == ["a", "b", "c"]


def test_folder_errors(tmp_path):
    with pytest.raises(ValueError, match=r"holds no prompt file; put files that end in \.jsonl, \.jsonl\.gz"):
        load_prompts(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    message = f"{re.escape(str(tmp_path))} was written by save_to_disk; name it as hf:"
    with pytest.raises(ValueError, match=message):
        load_prompts(str(tmp_path))


def test_an_empty_file(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, ending):
    """A file of ten times the prompts peaks (in Python's memory) within a fifth of the small one."""

    def peak(count):
        path = tmp_path / f"{count}.{ending}"
        texts = [f"{i} " + "word " * 200 for i in range(count)]
        if ending == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            pq.write_table(pa.table({"text": texts}), path, row_group_size=500)
        del texts
        next(iter_prompts(str(path)))  # imports
        tracemalloc.start()
        assert sum(1 for _ in iter_prompts(str(path))) == count
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(10_000) < 1.2 * peak(1_000)


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"))
    assert load_prompts(str(tmp_path / "marked" / "a.jsonl")) == load_prompts(str(tmp_path / "a.jsonl"))


def test_parquet_text_that_is_no_utf8(tmp_path):
    offsets, content = pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe")
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, content])
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 0 cannot be read \('utf-8' codec"):
        load_prompts(str(tmp_path / "a.parquet"))
