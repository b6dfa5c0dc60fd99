"""Reading the sharded Parquet stores that routing traces and draft-tree traces share, and checking their files.

What lies on disk is drawn in `ecospec.trace_collection.manifest`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.manifest import (
    DRAFT_TREE_TRACE,
    MANIFEST_NAME,
    ROUTING_TRACE,
    ShardEntry,
    StoreManifest,
    sha256_of,
)
from ecospec.trace_collection.schema import same_columns

#: Tokens (or tree nodes) that are read at a time.
TOKENS_PER_TABLE = 16_384


class ShardReader(ABC):
    """A store opened for reading.

    Args:
        path: Folder of the store.
        check_files: Refuse a store of which a shard is missing or truncated.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It is no store of this kind, or a shard is missing or truncated.
    """

    kind: str

    def __init__(self, path: str | Path, *, check_files: bool = True) -> None:
        self.path = Path(path)
        self.manifest = StoreManifest.load(self.path)
        if self.manifest.kind != self.kind:
            writer = {ROUTING_TRACE: "collect-traces", DRAFT_TREE_TRACE: "collect-trees"}[self.kind]
            raise ValueError(
                f"{self.path} is a {self.manifest.kind} store, a {self.kind} store is needed; {writer} writes one"
            )
        if check_files:
            require_shards(self.path, self.manifest)

    @property
    def spec(self) -> RoutingSpec:
        """The target the rows were recorded from."""
        return self.manifest.spec

    @property
    def num_rows(self) -> int:
        """Rows of the store."""
        return self.manifest.rows

    @property
    def num_tokens(self) -> int:
        """Tokens (or tree nodes) with experts in the store."""
        return self.manifest.tokens

    def verify(self) -> None:
        """Compare every shard's checksum with the manifest.

        Raises:
            ValueError: A shard's content changed; the message names it.
        """
        require_checksums(self.path, self.manifest)

    def require_complete(self) -> None:
        """Refuse a store whose collection was interrupted.

        Raises:
            ValueError: The manifest does not say that the store is complete.
        """
        if not self.manifest.complete:
            raise ValueError(f"{self.path} is incomplete: resume the collection with --resume, or collect again")

    @abstractmethod
    def _expected_schema(self, found: pa.Schema) -> pa.Schema:
        """Schema a shard must have; optional columns are taken from what was found."""

    @abstractmethod
    def table_records(self, table: pa.Table) -> Iterator[Any]:
        """Yield the rows of a table of `tables`, each checked against the contract.

        Raises:
            ValueError: A row breaks it; the message names the row.
        """

    @abstractmethod
    def row_keys(self, table: pa.Table) -> list[tuple[str, int]]:
        """What identifies each row of a table: sequence and, for draft trees, position."""

    def tables(self, columns: Collection[str] | None = None) -> Iterator[pa.Table]:
        """Yield tables of about `TOKENS_PER_TABLE` tokens, so that memory stays that of one page of a row group.

        Decoding a whole row group at once takes three times as much: 102 MiB for 135,000 tokens at L = 6, K = 4.

        Args:
            columns: Columns to read; default: all.

        Raises:
            ValueError: A shard cannot be read, or does not have the columns or rows it must have.
        """
        for shard in self.manifest.shards:
            yield from self.shard_tables(shard, columns)

    def shard_tables(self, shard: ShardEntry, columns: Collection[str] | None = None) -> Iterator[pa.Table]:
        """`tables` of one shard."""
        with self.open_shard(shard) as parquet:
            names = None if columns is None else [n for n in parquet.schema_arrow.names if n in columns]
            rows = max(1, shard.rows * TOKENS_PER_TABLE // shard.tokens)
            batches = parquet.iter_batches(rows, columns=names, use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError) as error:
                    reason = " ".join(str(error).split())
                    raise ValueError(
                        f"{self.path / shard.file} cannot be read ({reason}); restore it or collect again"
                    ) from error
                if batch is None:
                    return
                yield pa.Table.from_batches([batch])

    def open_shard(self, shard: ShardEntry) -> pq.ParquetFile:
        """Open a shard and check its columns and number of rows; raises as `tables`."""
        file = self.path / shard.file
        try:
            parquet = pq.ParquetFile(file, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} is not a readable Parquet file ({reason}); collect again") from error
        if problem := same_columns(parquet.schema_arrow, self._expected_schema(parquet.schema_arrow)):
            raise ValueError(f"{file}: {problem}; it was not written for this store")
        if parquet.metadata.num_rows != shard.rows:
            raise ValueError(
                f"{file} has {parquet.metadata.num_rows} rows, {MANIFEST_NAME} says {shard.rows}; collect again"
            )
        return parquet


def require_shards(path: Path, manifest: StoreManifest) -> None:
    """Check that every listed shard is there in full length.

    Raises:
        ValueError: A shard is missing or truncated; the message names it.
    """
    for shard in manifest.shards:
        require_shard(path, shard)


def require_shard(path: Path, shard: ShardEntry) -> None:
    """Check that one shard is there in full length; raises as `require_shards`."""
    file = path / shard.file
    if not file.is_file():
        raise ValueError(f"{file} is missing but listed in {MANIFEST_NAME}; restore it or collect again")
    if (size := file.stat().st_size) != shard.num_bytes:
        raise ValueError(
            f"{file} is truncated or changed: {size} bytes, {MANIFEST_NAME} says {shard.num_bytes}; "
            "restore it or collect again"
        )


def require_checksums(path: Path, manifest: StoreManifest) -> None:
    """Compare every shard's checksum with the manifest.

    Raises:
        ValueError: A shard's content changed; the message names it.
    """
    for shard in manifest.shards:
        require_checksum(path, shard)


def require_checksum(path: Path, shard: ShardEntry) -> None:
    """Compare one shard's checksum with its entry; raises as `require_checksums`."""
    if sha256_of(path / shard.file) != shard.sha256:
        raise ValueError(f"{path / shard.file} does not match its checksum; restore it or collect again")
