"""How shards are encoded, so that they are small and every Parquet reader can open them.

The numbers behind each choice are in ``docs/results/trace_size.md`` (``benchmarks/trace_size.py``):

- Parquet stores an 8-bit id in four bytes. BYTE_STREAM_SPLIT puts the first bytes of all ids of a page end to end,
  so the codec sees what a ``uint8`` array would show it, and three runs of zeros.
- Repetition of whole sets of experts is what makes traces small, and it is found only within a page: a row group is
  one page, and as long as a writer's memory allows.
- Token ids stay as they are: whole ids repeat, their single bytes less so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.compression import codec_and_level

#: Expert ids of a row group. Parquet holds four bytes of each, its levels and several copies of both while encoding
#: a page, some 45 bytes an id in all: 135 MiB for these.
IDS_PER_ROW_GROUP = 3 * 2**20
#: A page never reaches Parquet's limit of 2 GiB, however long a sequence is.
_PAGE_BYTES = 2**28
_EXPERTS = "experts.list.element.list.element"
_PLAIN = {_EXPERTS, "token_ids.list.element"}


def write_options(schema: pa.Schema, compression: str) -> dict[str, Any]:
    """Arguments of ``pyarrow.parquet.write_table`` for a store's shard.

    Args:
        schema: Its columns.
        compression: See `codec_and_level`; DuckDB, polars, pandas and ``datasets`` read every codec.

    Raises:
        ValueError: The codec or its level is unknown.
    """
    codec, level = codec_and_level(compression)
    return {
        "compression": codec,
        "compression_level": level,
        "use_dictionary": [leaf for leaf in _leaves(schema) if leaf not in _PLAIN],
        "column_encoding": {_EXPERTS: "BYTE_STREAM_SPLIT"},
        "data_page_size": _PAGE_BYTES,
    }


def _leaves(schema: pa.Schema) -> Iterator[str]:
    """Parquet's names of the columns' values, e.g. ``token_ids.list.element``."""
    for field in schema:
        name, kind = field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            name, kind = f"{name}.list.element", kind.value_type
        yield name


def row_groups(tokens: npt.NDArray[np.integer[Any]], spec: RoutingSpec) -> list[int]:
    """Rows of each row group: as many as stay within `IDS_PER_ROW_GROUP`, and at least one.

    Args:
        tokens: Tokens (or tree nodes) with experts of each row, ``[rows]``.
        spec: The target.

    >>> spec = RoutingSpec(6, tuple(range(6)), 64, 4, 2048, "0" * 64, "demo", "0" * 64)
    >>> row_groups(np.array([100_000, 30_000, 2_000, 300_000, 1_000]), spec)
    [2, 1, 1, 1]
    """
    most = IDS_PER_ROW_GROUP // (spec.num_layers * spec.top_k)
    rows: list[int] = []
    held = 0
    for count in tokens.tolist():
        if rows and held + count <= most:
            rows[-1] += 1
            held += count
        else:
            rows.append(1)
            held = count
    return rows


def write_shard(table: pa.Table, handle: IO[bytes], spec: RoutingSpec, compression: str) -> None:
    """Write the rows of a shard, one page per row group.

    Args:
        table: In the chunks it was appended in: Parquet's levels are built a chunk at a time.
        handle: The file.
        spec: The target.
        compression: See `codec_and_level`.

    Raises:
        OSError: The file could not be written.
    """
    tokens = pc.list_value_length(table.column("experts")).to_numpy()
    start = 0
    with pq.ParquetWriter(handle, table.schema, **write_options(table.schema, compression)) as writer:
        for rows in row_groups(tokens, spec):
            writer.write_table(table.slice(start, rows), row_group_size=rows)
            start += rows
