"""Store of draft-tree traces: a folder of Parquet shards, one row per speculation step, and a manifest.

The folder is drawn in `ecospec.trace_collection.manifest`, the columns in `ecospec.trace_collection.schema`, a row
in `ecospec.trace_collection.tree_records`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from ecospec.trace_collection.manifest import DRAFT_TREE_TRACE
from ecospec.trace_collection.schema import list_arrays, list_column, rows_arrays, rows_column, tree_schema
from ecospec.trace_collection.shard_reader import ShardReader
from ecospec.trace_collection.shard_writer import ShardWriter
from ecospec.trace_collection.tree_records import TreeTrace

_SCALARS = ("sequence_id", "group_id", "position", "temperature", "seed")
_NODE_LISTS = ("token", "parent", "draft_logprob", "target_logprob", "emitted", "accepted")


class TreeStoreWriter(ShardWriter[TreeTrace]):
    """Writes a draft-tree store; see `ShardWriter` for arguments, durability and resuming."""

    kind = DRAFT_TREE_TRACE

    def _check(self, record: TreeTrace) -> None:
        record.require(self.spec)

    def _tokens(self, record: TreeTrace) -> int:
        return record.num_nodes

    def _table(self, records: Sequence[TreeTrace]) -> pa.Table:
        schema = tree_schema(self.spec)
        columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in _SCALARS}
        for name in _NODE_LISTS:
            columns[name] = list_column([getattr(r, name) for r in records], schema.field(name).type.value_type)
        columns["experts"] = rows_column([record.experts for record in records])
        return pa.Table.from_pydict(columns, schema=schema)


class TreeStore(ShardReader):
    """A draft-tree store opened for reading; see `ShardReader` for arguments and errors.

    ``num_rows`` counts steps, ``num_tokens`` tree nodes.
    """

    kind = DRAFT_TREE_TRACE

    def iter_trees(self, group_filter: Callable[[str], bool] | None = None) -> Iterator[TreeTrace]:
        """Read the steps in order, one row group in memory at a time.

        Args:
            group_filter: Takes a group_id; steps for which it is false are skipped.

        Yields:
            Traces, checked against the spec.

        Raises:
            ValueError: Stored data break the contract; the message names file or step.
        """
        for table in self.tables():
            groups = table.column("group_id").to_pylist()
            keep = [row for row, group in enumerate(groups) if group_filter is None or group_filter(group)]
            if keep:
                yield from self.table_records(table if len(keep) == table.num_rows else table.take(keep))

    def table_records(self, table: pa.Table) -> Iterator[TreeTrace]:
        """See `ShardReader.table_records`."""
        shape = (self.spec.num_layers, self.spec.top_k)
        scalars = [table.column(name).to_pylist() for name in _SCALARS]
        lists = [list_arrays(table.column(name)) for name in _NODE_LISTS]
        experts = rows_arrays(table.column("experts"), shape)
        for row in range(table.num_rows):
            values: dict[str, Any] = dict(zip(_SCALARS, (column[row] for column in scalars), strict=True))
            values |= zip(_NODE_LISTS, (column[row] for column in lists), strict=True)
            trace = TreeTrace(**values, experts=experts[row])
            trace.require(self.spec)
            yield trace

    def row_keys(self, table: pa.Table) -> list[tuple[str, int]]:
        """See `ShardReader.row_keys`."""
        sequences, positions = (table.column(name).to_pylist() for name in ("sequence_id", "position"))
        return list(zip(sequences, positions, strict=True))

    def _expected_schema(self, found: pa.Schema) -> pa.Schema:  # noqa: ARG002 - every column is required
        return tree_schema(self.spec)
