"""Records of prompt files: JSONL (plain or compressed), Parquet, and folders of both.

Every reader yields (where, record) one at a time, ``where`` being file and line (from 1) or row (from 0) for
messages; a file of any length takes constant memory.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

Records = Iterator[tuple[str, dict[str, Any]]]

#: Endings of files that are read.
FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
#: Files by which a folder written by ``save_to_disk`` is known: splits, or one dataset.
SAVED_MARKS = ("dataset_dict.json", "state.json")
_ROWS_PER_BATCH = 256
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def is_prompt_file(path: Path) -> bool:
    """Whether the name of a file ends as one of `FILE_ENDINGS`."""
    return path.name.endswith(FILE_ENDINGS)


def dataset_name(path: Path) -> str:
    """Name of a file without its ending and shard number.

    >>> dataset_name(Path("data/gsm8k-00000-of-00004.parquet"))
    'gsm8k'
    """
    ending = next(ending for ending in FILE_ENDINGS if path.name.endswith(ending))
    return _SHARD.sub("", path.name.removesuffix(ending)) or path.name


def prompt_files(path: Path) -> list[Path]:
    """Return the file itself, or the prompt files in a folder and below, sorted by path; hidden ones are left out.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: The file has another ending, or the folder holds no prompt file; the message lists the endings.
    """
    allowed = ", ".join(FILE_ENDINGS)
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED_MARKS):
            raise ValueError(f"{path} was written by save_to_disk; name it as hf:{path}:<split>")
        found = sorted(
            file
            for file in path.rglob("*")
            if is_prompt_file(file)
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not found:
            raise ValueError(f"{path} holds no prompt file; put files that end in {allowed} there")
        return found
    if not is_prompt_file(path):
        raise ValueError(
            f"{path} is no prompt source; give a file that ends in {allowed}, a folder of such files, "
            "stdlib:<split>, hf:<dataset>:<split> or preset:<name>"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give an existing file or folder")
    return [path]


def file_records(path: Path, columns: Collection[str]) -> Records:
    """Read one file.

    Args:
        path: A file for which `is_prompt_file` holds.
        columns: Keys that are wanted; of Parquet only these columns are read.

    Raises:
        ValueError: The file is damaged, empty, or has none of the columns; the message names it and the place.
    """
    empty = True
    for item in _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path):
        empty = False
        yield item
    if empty:
        raise ValueError(f"{path} holds no prompts")


def _jsonl(path: Path) -> Records:
    import pyarrow as pa  # noqa: PLC0415 - importing prompts stays light

    where = str(path)
    try:
        with pa.input_stream(str(path), compression="detect") as stream:  # by the ending: gz, zst, or none
            for number, line in enumerate(io.BufferedReader(stream), start=1):
                where = f"{path}:{number}"
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901 - some editors put one there
                if line.strip():
                    yield where, _json_object(line, where)
    except OSError as error:  # truncated, or not compressed as its name says
        raise ValueError(f"{where}: cannot be read ({error}); write the file again") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason}); write one JSON object per line") from error
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and endless nesting
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"{where}: not JSON ({reason}); write one object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}; write one per line")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character, which no tokenizer takes
        raise ValueError(f"{where}: holds a lone surrogate such as \\ud800; remove it") from error
    return record


def _parquet(path: Path, columns: Collection[str]) -> Records:
    import pyarrow as pa  # noqa: PLC0415 - importing prompts stays light
    import pyarrow.parquet as pq  # noqa: PLC0415

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            present = wanted_columns(names, columns, str(path))
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=present):
                for record in batch.to_pylist():
                    yield f"{path}: row {row}", record
                    row += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: row {row} cannot be read ({error}); write the file again") from error


def wanted_columns(names: Collection[str], columns: Collection[str], where: str) -> list[str]:
    """Return the columns that are both there and wanted.

    Raises:
        ValueError: There is none; the message lists those that are there.
    """
    present = [name for name in names if name in columns]
    if not present:
        raise ValueError(
            f"{where}: none of the columns {', '.join(columns)} is there; rename one, or name one of these "
            f"with #column: {', '.join(names)}"
        )
    return present
