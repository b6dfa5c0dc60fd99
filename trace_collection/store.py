"""Store of routing traces: a folder of Parquet shards, one row per sequence, and a manifest.

The folder is drawn in `ecospec.trace_collection.manifest`, the columns in `ecospec.trace_collection.schema`, a row
in `ecospec.trace_collection.records`. ``datasets``, pandas, DuckDB and polars read the shards without this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.compression import AUTO
from ecospec.trace_collection.manifest import ROUTING_TRACE, TOKENS_PER_SHARD
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.schema import list_arrays, list_column, rows_arrays, rows_column, trace_schema
from ecospec.trace_collection.shard_reader import ShardReader
from ecospec.trace_collection.shard_writer import ShardWriter

_TEXT_COLUMNS = ("sequence_id", "group_id", "dataset", "category", "origin", "finish_reason")
_BULK_COLUMNS = ("experts", "weights")


class TraceStoreWriter(ShardWriter[RoutingTrace]):
    """Writes a routing trace store; see `ShardWriter` for arguments, durability and resuming.

    Args:
        weights: Whether the traces carry weights.
    """

    kind = ROUTING_TRACE

    def __init__(
        self,
        path: str | Path,
        spec: RoutingSpec,
        *,
        weights: bool = False,
        collection: Mapping[str, Any] | None = None,
        plan_hash: str = "",
        provenance: Mapping[str, Any] | None = None,
        resume: bool = False,
        tokens_per_shard: int = TOKENS_PER_SHARD,
        compression: str = AUTO,
        background: bool = False,
    ) -> None:
        self._weights = weights
        super().__init__(
            path,
            spec,
            collection=collection,
            plan_hash=plan_hash,
            provenance=provenance,
            resume=resume,
            tokens_per_shard=tokens_per_shard,
            compression=compression,
            background=background,
        )

    def require_rows(self, planned: int) -> None:
        """Refuse a manifest whose finished units do not have the rows they were planned with.

        Args:
            planned: Sequences in the first `finished_units` batches of the plan.

        Raises:
            ValueError: The manifest lists more or fewer; going on would leave sequences out, or take them twice.
        """
        if planned != self.manifest.rows:
            raise ValueError(
                f"{self.path}: the manifest lists {self.manifest.rows} rows of {self.finished_units} batches, "
                f"planned were {planned}; it is damaged: collect again in another folder"
            )

    def _check(self, record: RoutingTrace) -> None:
        record.require(self.spec)
        if (record.weights is not None) != self._weights:
            state = "has no weights" if self._weights else "has weights"
            raise ValueError(
                f"sequence {record.sequence_id!r} {state}, the store was opened with weights={self._weights}"
            )

    def _tokens(self, record: RoutingTrace) -> int:
        return record.num_processed

    def _table(self, records: Sequence[RoutingTrace]) -> pa.Table:
        schema = trace_schema(self.spec, weights=self._weights)
        columns: dict[str, Any] = {name: [getattr(r, name) for r in records] for name in _TEXT_COLUMNS}
        columns["prompt_length"] = [record.prompt_length for record in records]
        columns["token_ids"] = list_column([record.token_ids for record in records], pa.int32())
        columns["experts"] = rows_column([record.experts for record in records])
        if self._weights:
            columns["weights"] = rows_column([r.weights for r in records if r.weights is not None])
        return pa.Table.from_pydict(columns, schema=schema)


class SequenceEntry(NamedTuple):
    """What `TraceStore.index` says about a sequence.

    Attributes:
        sequence_id: See `RoutingTrace`.
        group_id: See `RoutingTrace`.
        dataset: See `RoutingTrace`.
        num_tokens: Tokens of the sequence, n.
        prompt_length: Leading tokens that were given.
        num_processed: Tokens with experts, t.
    """

    sequence_id: str
    group_id: str
    dataset: str
    num_tokens: int
    prompt_length: int
    num_processed: int


class TraceStore(ShardReader):
    """A routing trace store opened for reading; see `ShardReader` for arguments and errors.

    ``spec``, ``manifest``, ``num_rows`` (sequences) and ``num_tokens`` (tokens with experts) describe it.
    """

    kind = ROUTING_TRACE

    def iter_sequences(
        self,
        columns: Collection[str] | None = None,
        group_filter: Callable[[str], bool] | None = None,
    ) -> Iterator[RoutingTrace]:
        """Read the sequences in order, one row group in memory at a time.

        Args:
            columns: Leave out ``"experts"`` or ``"weights"`` by not naming them; the small columns are always read.
                Without ``"experts"``, the array has no layers: ``[t, 0, 0]``. Default: everything stored.
            group_filter: Takes a group_id; sequences for which it is false are skipped.

        Yields:
            Traces, checked against the spec. ``experts`` and ``weights`` are read-only views of Arrow memory.

        Raises:
            ValueError: A column is unknown, or stored data break the contract; the message names file or sequence.
        """
        allowed = trace_schema(self.spec, weights=True).names
        if columns is not None and (unknown := [name for name in columns if name not in allowed]):
            raise ValueError(f"unknown column {unknown[0]!r}; allowed: {', '.join(allowed)}")
        wanted = [n for n in allowed if columns is None or n not in _BULK_COLUMNS or n in columns]
        for table in self.tables(wanted):
            groups = table.column("group_id").to_pylist()
            keep = [row for row, group in enumerate(groups) if group_filter is None or group_filter(group)]
            if keep:
                yield from self.table_records(table if len(keep) == table.num_rows else table.take(keep))

    def table_records(self, table: pa.Table) -> Iterator[RoutingTrace]:
        """See `ShardReader.table_records`."""
        shape = (self.spec.num_layers, self.spec.top_k)
        texts = [table.column(name).to_pylist() for name in _TEXT_COLUMNS]
        tokens = list_arrays(table.column("token_ids"))
        prompt_lengths = table.column("prompt_length").to_pylist()
        experts = rows_arrays(table.column("experts"), shape) if "experts" in table.column_names else None
        weights = rows_arrays(table.column("weights"), shape) if "weights" in table.column_names else None
        for row in range(table.num_rows):
            values = dict(zip(_TEXT_COLUMNS, (column[row] for column in texts), strict=True))
            missing = tokens[row].size - (values["origin"] == "generated")
            trace = RoutingTrace(
                **values,
                token_ids=tokens[row],
                prompt_length=prompt_lengths[row],
                experts=np.empty((missing, 0, 0), np.uint8) if experts is None else experts[row],
                weights=None if weights is None or experts is None else weights[row],
            )
            if experts is not None:
                trace.require(self.spec)
            yield trace

    def index(self) -> list[SequenceEntry]:
        """List the sequences in the order of `iter_sequences`, without reading their experts."""
        entries: list[SequenceEntry] = []
        names = ("sequence_id", "group_id", "dataset", "prompt_length", "token_ids", "origin")
        for table in self.tables(names):
            lengths = pc.list_value_length(table.column("token_ids")).to_pylist()
            columns = [table.column(name).to_pylist() for name in (*names[:4], "origin")]
            for sequence, group, dataset, given, origin, length in zip(*columns, lengths, strict=True):
                processed = length - (origin == "generated")
                entries.append(SequenceEntry(sequence, group, dataset, length, given, processed))
        return entries

    def row_keys(self, table: pa.Table) -> list[tuple[str, int]]:
        """See `ShardReader.row_keys`."""
        return [(sequence, 0) for sequence in table.column("sequence_id").to_pylist()]

    def _expected_schema(self, found: pa.Schema) -> pa.Schema:
        return trace_schema(self.spec, weights="weights" in found.names)
