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
from typing import Any

import pyarrow as pa

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.compression import codec_and_level

#: Expert ids of a row group. Parquet holds four bytes of each, its levels and several copies of both while encoding
#: a page, some 45 bytes an id in all: 140 MiB for these.
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


def rows_per_group(rows: int, tokens: int, spec: RoutingSpec) -> int:
    """Rows of each row group of a shard, so that its groups are of one size and within `IDS_PER_ROW_GROUP`.

    Args:
        rows: Rows of the shard.
        tokens: Tokens (or tree nodes) with experts in it.
        spec: The target.

    >>> spec = RoutingSpec(6, tuple(range(6)), 64, 4, 2048, "0" * 64, "demo", "0" * 64)
    >>> rows_per_group(1000, 262_144, spec), rows_per_group(1000, 600_000, spec)
    (500, 200)
    """
    groups = -(-tokens * spec.num_layers * spec.top_k // IDS_PER_ROW_GROUP)
    return -(-rows // max(1, groups))
