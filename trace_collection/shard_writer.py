"""Writing the sharded Parquet stores that routing traces and draft-tree traces share.

What lies on disk is drawn in `ecospec.trace_collection.manifest`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.compression import AUTO, resolve_compression
from ecospec.trace_collection.encoding import write_shard
from ecospec.trace_collection.host_memory import release_freed_memory
from ecospec.trace_collection.manifest import (
    MANIFEST_NAME,
    TOKENS_PER_SHARD,
    ShardEntry,
    StoreManifest,
    publish,
    sha256_of,
    shard_name,
    software_versions,
    written_or_removed,
)
from ecospec.trace_collection.schema import file_metadata
from ecospec.trace_collection.shard_reader import require_checksums, require_shards
from ecospec.trace_collection.store_lock import LOCK_NAME, StoreLock

Record = TypeVar("Record")

#: Options that stores of earlier versions do not name; those are resumed with any.
_ADDED = {"compression"}


class ShardWriter(ABC, Generic[Record]):
    """Appends units (batches) of records to a store; a context manager.

    A unit is never divided between shards, and a shard is listed in the manifest only when it is durable, so a
    killed process loses the units of shards that are not written. Leaving the context without an error lists the
    rest and marks the store complete. One writer at a time: the store is locked until the writer closes or its
    process ends.

    Args:
        path: Folder of the store; created if missing.
        spec: The target's RoutingSpec.
        collection: How the rows come about; stored, and compared on resume.
        plan_hash: Hash of the batch plan; stored, and compared on resume.
        provenance: What else to record about this run; software versions are added.
        resume: Continue a store of the same spec, collection and plan instead of refusing it.
        tokens_per_shard: A shard is finished after the unit that reaches this many tokens.
        compression: Codec and level of the shards, see `ecospec.trace_collection.compression.resolve_compression`;
            what it stands for is stored with ``collection``.
        background: Write a shard while the next one is filled, so that a target on a GPU or a server does not wait
            for its store. Takes memory for both at once.

    Raises:
        FileExistsError: The folder is not empty and ``resume`` is off.
        ValueError: The store to resume differs, or is being written; the message says in what, or by whom.
    """

    kind: str

    def __init__(
        self,
        path: str | Path,
        spec: RoutingSpec,
        *,
        collection: Mapping[str, Any] | None = None,
        plan_hash: str = "",
        provenance: Mapping[str, Any] | None = None,
        resume: bool = False,
        tokens_per_shard: int = TOKENS_PER_SHARD,
        compression: str = AUTO,
        background: bool = False,
    ) -> None:
        if tokens_per_shard < 1:
            raise ValueError(f"tokens_per_shard must be at least 1, got {tokens_per_shard}")
        self.path = Path(path)
        self.spec = spec
        self._tokens_per_shard = tokens_per_shard
        self._compression = resolve_compression(compression, spec.num_layers * spec.top_k)
        self._background = background
        self._pending: list[pa.Table] = []
        self._pending_units = 0
        self._pending_tokens = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._writing: Future[None] | None = None
        self._stays_locked = False
        origin = {"versions": software_versions()} | dict(provenance or {})
        fresh = StoreManifest(
            self.kind, spec, {**(collection or {}), "compression": self._compression}, plan_hash, origin
        )
        self._closed = False
        self._manifest = self._open(fresh, resume=resume)

    @property
    def manifest(self) -> StoreManifest:
        """The manifest as it lies on disk."""
        return self._manifest

    @property
    def finished_units(self) -> int:
        """Units that need not be collected again."""
        return self._manifest.units

    def append(self, records: Sequence[Record]) -> None:
        """Add the records of one unit.

        Args:
            records: At least one record.

        Raises:
            ValueError: A record does not fit the store's RoutingSpec, or the unit is empty.
            OSError: A shard could not be written; the writer is closed, and the store can be resumed.
        """
        if not records:
            raise ValueError("a unit must hold at least one record; skip empty batches when planning")
        if self._manifest.complete:
            raise ValueError(f"{self.path} is complete; nothing can be added to it")
        self._require_open()
        for record in records:
            self._check(record)
        self._pending.append(self._table(records))
        self._pending_units += 1
        self._pending_tokens += sum(self._tokens(record) for record in records)
        if self._pending_tokens >= self._tokens_per_shard:
            self._start_shard()
            if not self._background:
                self._finish_shard()
        elif self._writing is not None and self._writing.done():
            self._finish_shard()  # an error shows now, not a shard later

    def flush(self) -> None:
        """Write the pending units as one shard and list it; wait until everything that was added is listed.

        Raises:
            OSError: See `append`.
            ValueError: The writer was closed or abandoned with units pending.
        """
        if self._pending:
            self._require_open()
            self._start_shard()
        self._finish_shard()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"the writer of {self.path} is closed; open the store again with resume=True")

    def _start_shard(self) -> None:
        """Hand the pending units to the thread, which is done with those before them."""
        self._finish_shard()
        table = pa.concat_tables(self._pending)
        try:
            self._writing = self._thread.submit(self._write_shard, table, self._pending_units, self._pending_tokens)
        except BaseException:  # interrupted: perhaps it runs
            self._closed = self._stays_locked = True
            raise
        self._pending, self._pending_units, self._pending_tokens = [], 0, 0

    def _finish_shard(self) -> None:
        """Wait for the shard that is being written; after an error nothing is added, or its units would be lost."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except BaseException:
            self.abandon()
            raise
        self._writing = None

    def _write_shard(self, table: pa.Table, units: int, tokens: int) -> None:
        """Write a table as a shard and list it.

        Args:
            table: In the chunks it was appended in: Parquet's levels are built a chunk at a time.
            units: Units in it.
            tokens: Tokens (or tree nodes) with experts in it.
        """
        name = shard_name(len(self._manifest.shards))
        temporary = self.path / (name + ".tmp")
        table = table.replace_schema_metadata(file_metadata(self._manifest))
        release_freed_memory()  # encoding takes some 45 bytes an id, beside what the batches left
        with written_or_removed(temporary) as handle:
            write_shard(table, handle, self.spec, self._compression)
        release_freed_memory()  # not beside the batches to come
        size, checksum = temporary.stat().st_size, sha256_of(temporary)
        publish(temporary, self.path / name)
        entry = ShardEntry(name, table.num_rows, tokens, units, size, checksum)
        self._save(shards=(*self._manifest.shards, entry))

    def close(self) -> None:
        """List what is pending, mark the store complete and unlock it."""
        if self._closed:
            return
        self.flush()
        if not self._manifest.complete:
            self._save(complete=True)
        self.abandon()

    def abandon(self) -> None:
        """Unlock the store and leave it as it is on disk, to be resumed; what is pending is lost.

        A shard that is being written is finished first. Where that wait is interrupted, the store stays locked
        until it is called again, or the process ends.
        """
        self._closed = True
        self._thread.shutdown(wait=False)
        if self._writing is not None:
            wait([self._writing])  # a thread's join, once interrupted, returns at once the next time
        if not self._stays_locked:
            self._lock.release()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the store; after an error keep what was listed and leave the store incomplete."""
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()

    @abstractmethod
    def _check(self, record: Record) -> None:
        """Raise ValueError if the record does not fit."""

    @abstractmethod
    def _tokens(self, record: Record) -> int:
        """Tokens (or nodes) with experts in the record."""

    @abstractmethod
    def _table(self, records: Sequence[Record]) -> pa.Table:
        """Build the shard's table."""

    def _save(self, **changes: Any) -> None:
        self._manifest = dataclasses.replace(self._manifest, **changes)
        self._manifest.save(self.path)

    def _open(self, fresh: StoreManifest, *, resume: bool) -> StoreManifest:
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_content(resume=resume)  # before the lock makes a file in a folder that is no store
        self._lock = StoreLock(self.path)
        try:
            self._refuse_content(resume=resume)
            if not (self.path / MANIFEST_NAME).exists():
                fresh.save(self.path)
                return fresh
            found = StoreManifest.load(self.path)
            refuse_other_run(found, fresh, self.path)
            require_shards(self.path, found)
            require_checksums(self.path, found)
            for leftover in self.path.glob("*.tmp"):
                leftover.unlink()
        except BaseException:
            self._lock.release()
            raise
        return found

    def _refuse_content(self, *, resume: bool) -> None:
        """Refuse a folder with content, unless it is a store to resume."""
        present = [entry.name for entry in self.path.iterdir() if entry.name != LOCK_NAME]
        if present and not resume:
            raise FileExistsError(f"{self.path} is not empty; resume it or choose another folder")
        if MANIFEST_NAME not in present and (foreign := [name for name in present if not name.endswith(".tmp")]):
            raise FileExistsError(f"{self.path} holds {foreign[0]!r} but no trace store; choose another folder")


def refuse_other_run(found: StoreManifest, fresh: StoreManifest, path: Path) -> None:
    """Refuse to continue a store with another kind, spec, collection config or plan.

    Raises:
        ValueError: They differ; the message names the difference.
    """
    if found.kind != fresh.kind:
        raise ValueError(f"{path} is a {found.kind} store, not a {fresh.kind} store; choose another folder")
    found.spec.require_same(fresh.spec, mine=f"store {path}", theirs="this run")
    for name in sorted({*found.collection, *fresh.collection}):
        if name in _ADDED and name not in found.collection:
            continue
        old, new = (manifest.collection.get(name) for manifest in (found, fresh))
        if old != new:
            raise ValueError(
                f"{path} was started with {name} = {old!r}, this run has {new!r}; resume with the same options or "
                "choose another folder"
            )
    if found.plan_hash != fresh.plan_hash:
        raise ValueError(
            f"{path} was started with another batch plan (prompts, tokenizer or context length changed); "
            "choose another folder"
        )
