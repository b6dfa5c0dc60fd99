"""Whether a store is what its manifest says: every file, every row group, every row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.manifest import MANIFEST_NAME, ShardEntry, StoreManifest
from ecospec.trace_collection.plan import SKIPPED_NAME
from ecospec.trace_collection.schema import METADATA_PREFIX
from ecospec.trace_collection.shard_reader import ShardReader, require_checksum, require_shard
from ecospec.trace_collection.stores import open_store

#: Problems listed per shard; a shard of another target would otherwise give one per row.
MAX_LISTED = 20


def store_problems(path: str | Path, *, allow_incomplete: bool = False) -> Iterator[str]:
    """Check a store and yield its problems, one line each; a store without any yields nothing.

    Checked are the manifest; every shard's presence, size, SHA-256, columns, row and token counts and the target in
    its metadata; every row against the contract, also that no row is there twice; shards that are not listed; and
    ``skipped.jsonl``.

    Args:
        path: Folder of the store, of routing traces or of draft trees.
        allow_incomplete: Accept a store whose collection has not finished.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It is no store, or its manifest is damaged, so that nothing else can be checked.
    """
    folder = Path(path)
    store = open_store(folder, check_files=False)
    manifest = store.manifest
    if not manifest.complete and not allow_incomplete:
        yield f"{folder} is incomplete: resume the collection with --resume, or pass --allow-incomplete"
    listed = {shard.file for shard in manifest.shards}
    if manifest.complete:  # else it is the end of a killed run
        for file in sorted(folder.glob("shard-*.parquet")):
            if file.name not in listed:
                yield f"{file} is not listed in {MANIFEST_NAME}; remove it"
    seen: dict[tuple[str, int], str] = {}
    for shard in manifest.shards:
        problems = list(_shard_problems(store, shard, seen))
        yield from problems[:MAX_LISTED]
        if len(problems) > MAX_LISTED:
            yield f"{folder / shard.file}: {len(problems) - MAX_LISTED} more problems"
    yield from _skipped_problems(folder, manifest)


def _shard_problems(store: ShardReader, shard: ShardEntry, seen: dict[tuple[str, int], str]) -> Iterator[str]:
    """Problems of one shard; ``seen`` maps every row's key to its shard and is added to."""
    file = store.path / shard.file
    try:
        require_shard(store.path, shard)
        require_checksum(store.path, shard)
    except ValueError as error:
        yield str(error)
        return  # its rows would give the same problem again, less clearly
    yield from _metadata_problems(store.manifest, file)
    tokens = 0
    try:
        for table in store.shard_tables(shard):
            for key in store.row_keys(table):
                if key in seen:
                    where = "it" if seen[key] == shard.file else seen[key]
                    yield f"{file}: sequence {key[0]!r} is in {where} already"
                seen[key] = shard.file
            tokens += pc.sum(pc.list_value_length(table.column("experts"))).as_py() or 0
            yield from (f"{file}: {problem}" for problem in row_problems(store, table))
    except ValueError as error:
        yield str(error)
        return
    if tokens != shard.tokens:
        yield f"{file} has {tokens} tokens with experts, {MANIFEST_NAME} says {shard.tokens}; collect again"


def row_problems(store: ShardReader, table: pa.Table) -> Iterator[str]:
    """Yield what is wrong with each row of a table that breaks the contract."""
    try:
        for _ in store.table_records(table):
            pass
    except ValueError:  # only now row by row: slicing costs more than checking
        for row in range(table.num_rows):
            try:
                next(iter(store.table_records(table.slice(row, 1))))
            except ValueError as error:
                yield str(error)


def _metadata_problems(manifest: StoreManifest, file: Path) -> Iterator[str]:
    try:
        found = pq.read_schema(file).metadata or {}
    except (pa.ArrowException, OSError) as error:
        yield f"{file} is not a readable Parquet file ({' '.join(str(error).split())}); collect again"
        return
    spec = found.get((METADATA_PREFIX + "spec").encode())
    if spec is None:
        yield f"{file} does not say which target it was recorded from; it was not written by EcoSpec"
        return
    try:
        theirs = RoutingSpec.from_dict(json.loads(spec), str(file))
    except (ValueError, RecursionError) as error:
        yield f"{file} does not say which target it was recorded from ({error}); collect again"
        return
    for name in manifest.spec.differences(theirs)[:1]:
        yield (
            f"{file} was recorded from another target than {MANIFEST_NAME} says: {name} differs "
            f"({getattr(theirs, name)!r}, {MANIFEST_NAME}: {getattr(manifest.spec, name)!r})"
        )


def _skipped_problems(folder: Path, manifest: StoreManifest) -> Iterator[str]:
    """``skipped.jsonl`` must hold objects, and be there where the manifest counts skipped prompts."""
    file = folder / SKIPPED_NAME
    counted = manifest.collection.get("skipped", {})
    if not file.is_file():
        if manifest.complete and any(counted.values()):
            yield f"{file} is missing: {MANIFEST_NAME} counts {sum(counted.values())} prompts left out"
        return
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            good = isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            yield f"{file}, line {number} is not a JSON object; collect again"
            return
