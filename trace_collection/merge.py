"""Merging stores of one target into one.

A shard is copied as it is, with the metadata of the run that wrote it, unless a row of it is in an earlier source
already. The merged store's manifest keeps what each source says of itself::

    "collection": {"merged": [{"store": "runs/a", "collection": {...}, "plan_hash": "...", "provenance": {...},
                               "rows": 512, "tokens": 131072, "duplicates": 0}, ...],
                   "skipped": {"empty": 3}}                      # summed over the sources

and its ``skipped.jsonl`` the lines of all of them, each with its ``"store"``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.compression import AUTO, resolve_compression
from ecospec.trace_collection.encoding import write_shard
from ecospec.trace_collection.manifest import (
    ShardEntry,
    StoreManifest,
    publish,
    sha256_of,
    shard_name,
    software_versions,
    write_durably,
    written_or_removed,
)
from ecospec.trace_collection.plan import SKIPPED_NAME
from ecospec.trace_collection.schema import METADATA_PREFIX
from ecospec.trace_collection.shard_reader import ShardReader
from ecospec.trace_collection.store_lock import LOCK_NAME, StoreLock
from ecospec.trace_collection.stores import open_store

Duplicates = Literal["refuse", "skip"]
#: Rows to keep, one boolean array per shard.
_Masks = list[npt.NDArray[np.bool_]]
_KEY_COLUMNS = ("sequence_id", "position")
#: What a merge writes before its manifest, which comes last.
_LEFTOVER = re.compile(r"shard-\d{5,}\.parquet|skipped\.jsonl|.+\.tmp")


@dataclasses.dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did.

    Attributes:
        rows: Rows of the merged store.
        tokens: Tokens (or tree nodes) with experts in it.
        duplicates: Rows of each source that were left out because an earlier one has them, by its path.
    """

    rows: int
    tokens: int
    duplicates: Mapping[str, int]


def merge_stores(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    duplicates: Duplicates = "refuse",
    provenance: Mapping[str, Any] | None = None,
) -> MergeReport:
    """Merge complete stores of one target; ``out`` appears when it is whole, or not at all.

    Args:
        sources: Folders of at least two stores of one kind, in the order their rows shall have.
        out: Folder of the merged store; must not exist, or be empty.
        duplicates: What to do with a sequence (in draft-tree stores: a step) that an earlier source has already:
            ``"refuse"``, or ``"skip"`` it and count it.
        provenance: What to record about this merge; software versions are added.

    Returns:
        Counts.

    Raises:
        FileNotFoundError: A source does not exist.
        FileExistsError: ``out`` holds something.
        ValueError: The sources differ in kind, target or columns, are incomplete or damaged, or hold duplicates; or
            another process merges into ``out``. The message names source and field.
    """
    target = Path(out)
    stores = _open_sources(sources)
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise FileExistsError(f"{target} exists; name a new folder")
    earlier: dict[tuple[str, int], Path] = {}
    masks = [(store, _kept(store, earlier)) for store in stores]
    counts = {str(store.path): sum(int((~mask).sum()) for mask in kept) for store, kept in masks}
    if duplicates == "refuse" and any(counts.values()):
        raise ValueError(_duplicates_message(counts))
    partial = target.absolute().with_name(target.absolute().name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(partial)
    try:
        _remove_leftovers(partial)
    except BaseException:
        lock.release()
        raise
    try:
        manifest = _write(masks, partial, counts, provenance)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # frees a full disk
        raise
    finally:
        lock.release()
    publish(partial, target)
    return MergeReport(manifest.rows, manifest.tokens, counts)


def _remove_leftovers(partial: Path) -> None:
    """Clear what a killed merge has written, and nothing that it has not.

    Raises:
        FileExistsError: The folder holds something else.
    """
    found = [entry for entry in partial.iterdir() if entry.name != LOCK_NAME]
    for entry in found:
        if not _LEFTOVER.fullmatch(entry.name) or not entry.is_file():
            raise FileExistsError(
                f"{partial} holds {entry.name!r}; merging writes there first: move the folder away, or choose "
                "another --out"
            )
    for entry in found:
        entry.unlink()


def _open_sources(sources: Sequence[str | Path]) -> list[ShardReader]:
    if len(sources) < 2:
        raise ValueError(f"merging needs at least two stores, got {len(sources)}; name them as A,B")
    places = [Path(source).resolve() for source in sources]
    if twice := [source for number, source in enumerate(sources) if places[number] in places[:number]]:
        raise ValueError(f"store {twice[0]} is named twice; name every store once")
    stores: list[ShardReader] = [open_store(source) for source in sources]
    first = stores[0]
    for store in stores:
        if store.kind != first.kind:
            raise ValueError(f"{first.path} is a {first.kind} store and {store.path} a {store.kind} store")
        first.spec.require_same(store.spec, mine=f"store {first.path}", theirs=f"store {store.path}")
        store.require_complete()
        store.verify()
        if (mine := _columns(first)) and (theirs := _columns(store)) and mine != theirs:
            extra = sorted(mine ^ theirs)
            raise ValueError(
                f"only one of {first.path} and {store.path} has column {extra[0]!r}; merge stores that were "
                "collected with the same options"
            )
    return stores


def _columns(store: ShardReader) -> set[str]:
    shards = store.manifest.shards
    if not shards:
        return set()
    with store.open_shard(shards[0]) as parquet:
        return set(parquet.schema_arrow.names)


def _kept(store: ShardReader, earlier: dict[tuple[str, int], Path]) -> _Masks:
    """Rows of a store that no earlier one has; its own are added to ``earlier``."""
    masks = []
    for shard in store.manifest.shards:
        keep: list[bool] = []
        for table in store.shard_tables(shard, _KEY_COLUMNS):
            keep += [earlier.setdefault(key, store.path) == store.path for key in store.row_keys(table)]
        masks.append(np.array(keep, dtype=bool))
    return masks


def _duplicates_message(counts: Mapping[str, int]) -> str:
    found = ", ".join(f"{count} of {path}" for path, count in counts.items() if count)
    return (
        f"rows are in an earlier store already: {found}; leave a store out, or pass --duplicates skip to keep the "
        "first of each and count the others"
    )


def _write(
    masks: Sequence[tuple[ShardReader, _Masks]],
    folder: Path,
    counts: Mapping[str, int],
    provenance: Mapping[str, Any] | None,
) -> StoreManifest:
    """Write shards, list of skipped prompts and manifest."""
    entries: list[ShardEntry] = []
    skipped: Counter[str] = Counter()
    lines: list[str] = []
    merged = []
    for store, kept in masks:
        start = len(entries)
        for shard, keep in zip(store.manifest.shards, kept, strict=True):
            if keep.any():
                entries.append(_write_shard(store, shard, keep, folder / shard_name(len(entries))))
        merged.append(
            {
                "store": str(store.path),
                "collection": dict(store.manifest.collection),
                "plan_hash": store.manifest.plan_hash,
                "provenance": dict(store.manifest.provenance),
                "rows": sum(entry.rows for entry in entries[start:]),
                "tokens": sum(entry.tokens for entry in entries[start:]),
                "duplicates": counts[str(store.path)],
            }
        )
        skipped.update(store.manifest.collection.get("skipped", {}))
        lines += _skipped_lines(store.path)
    if lines:
        write_durably(folder / SKIPPED_NAME, "".join(lines).encode())
    first = masks[0][0]
    origin = {"versions": software_versions()} | dict(provenance or {})
    collection: dict[str, Any] = {"merged": merged, "skipped": dict(skipped)}
    manifest = StoreManifest(first.kind, first.spec, collection, "", origin, tuple(entries), complete=True)
    manifest.save(folder)
    return manifest


def _write_shard(store: ShardReader, shard: ShardEntry, keep: npt.NDArray[np.bool_], path: Path) -> ShardEntry:
    """Copy a shard, or write the rows of it that are kept, compressed as they were."""
    source = store.path / shard.file
    if keep.all():
        with written_or_removed(path) as handle, source.open("rb") as original:
            shutil.copyfileobj(original, handle, 2**20)
        return dataclasses.replace(shard, file=path.name)
    schema = pq.read_schema(source)
    try:
        compression = _compression_of(schema, store.spec)
    except ValueError as error:
        raise ValueError(f"{source}: its metadata is damaged ({error}); restore it or collect again") from error
    table = pa.concat_tables(list(store.shard_tables(shard))).filter(pa.array(keep))
    tokens = int(pc.sum(pc.list_value_length(table.column("experts"))).as_py())
    table = table.combine_chunks().replace_schema_metadata(schema.metadata)
    with written_or_removed(path) as handle:
        write_shard(table, handle, store.spec, compression)
    return ShardEntry(path.name, table.num_rows, tokens, shard.units, path.stat().st_size, sha256_of(path))


def _compression_of(schema: pa.Schema, spec: RoutingSpec) -> str:
    """Codec and level that a shard's collection names; Parquet itself keeps no level."""
    collection = json.loads((schema.metadata or {}).get(f"{METADATA_PREFIX}collection".encode(), b"{}"))
    return resolve_compression(str(collection.get("compression", AUTO)), spec.num_layers * spec.top_k)


def _skipped_lines(folder: Path) -> list[str]:
    """Lines of ``skipped.jsonl`` with the store they come from."""
    file = folder / SKIPPED_NAME
    if not file.is_file():
        return []
    lines = []
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                found = {"store": str(folder), **json.loads(line)}
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{file}, line {number} is not a JSON object; `ecospec traces verify {folder}` says what "
                    "else is damaged"
                ) from error
            lines.append(json.dumps(found, ensure_ascii=False) + "\n")
    return lines
