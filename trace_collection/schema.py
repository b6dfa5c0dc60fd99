"""Arrow schemas of the stores, and the conversions between Arrow columns and NumPy arrays.

Nested columns are built from and turned into flat NumPy arrays without visiting single values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.manifest import StoreManifest

METADATA_PREFIX = "ecospec."


def expert_type(spec: RoutingSpec) -> pa.DataType:
    """Type of the experts of one token: ``fixed_size_list<uint8|uint16>[L*K]``."""
    value = pa.uint8() if spec.expert_dtype == "uint8" else pa.uint16()
    return pa.list_(value, spec.num_layers * spec.top_k)


def trace_schema(spec: RoutingSpec, *, weights: bool) -> pa.Schema:
    """Columns of a routing trace store, one row per sequence."""
    fields = [
        pa.field("sequence_id", pa.string()),
        pa.field("group_id", pa.string()),
        pa.field("dataset", pa.string()),
        pa.field("category", pa.string()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("prompt_length", pa.int32()),
        pa.field("origin", pa.string()),
        pa.field("experts", pa.list_(expert_type(spec))),
        pa.field("finish_reason", pa.string()),
    ]
    if weights:
        fields.append(pa.field("weights", pa.list_(pa.list_(pa.float16(), spec.num_layers * spec.top_k))))
    return pa.schema(fields)


def tree_schema(spec: RoutingSpec) -> pa.Schema:
    """Columns of a draft-tree store, one row per speculation step; lists run over nodes, index 0 the root."""
    return pa.schema(
        [
            pa.field("sequence_id", pa.string()),
            pa.field("group_id", pa.string()),
            pa.field("position", pa.int32()),
            pa.field("token", pa.list_(pa.int32())),
            pa.field("parent", pa.list_(pa.int16())),
            pa.field("draft_logprob", pa.list_(pa.float32())),
            pa.field("experts", pa.list_(expert_type(spec))),
            pa.field("target_logprob", pa.list_(pa.float32())),
            pa.field("emitted", pa.list_(pa.int32())),
            pa.field("accepted", pa.list_(pa.bool_())),
            pa.field("temperature", pa.float32()),
            pa.field("seed", pa.int64()),
        ]
    )


def file_metadata(manifest: StoreManifest) -> dict[str, str]:
    """Metadata of each shard, so that a shard alone still says what it is."""
    return {
        METADATA_PREFIX + "format_version": str(manifest.format_version),
        METADATA_PREFIX + "kind": manifest.kind,
        METADATA_PREFIX + "spec": _json(manifest.spec.to_dict()),
        METADATA_PREFIX + "collection": _json(manifest.collection),
        METADATA_PREFIX + "provenance": _json(manifest.provenance),
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True, ensure_ascii=False)


def list_column(parts: Sequence[npt.NDArray[Any]], value_type: pa.DataType) -> pa.Array:
    """Build a ``list<value>`` column from one flat array per row."""
    offsets, values = _joined(parts)
    return pa.ListArray.from_arrays(offsets, pa.array(values, type=value_type))


def rows_column(parts: Sequence[npt.NDArray[Any]]) -> pa.Array:
    """Build a ``list<fixed_size_list<value>[w]>`` column from a ``[t, ...]`` array per row, w values an entry."""
    offsets, values = _joined(parts)
    width = int(np.prod(values.shape[1:]))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.ListArray.from_arrays(offsets, pa.FixedSizeListArray.from_arrays(flat, width))


def _joined(parts: Sequence[npt.NDArray[Any]]) -> tuple[pa.Array, npt.NDArray[Any]]:
    offsets = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return pa.array(offsets), np.concatenate(parts)


def list_arrays(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """Turn a ``list<value>`` column into one array per row; views where Arrow's layout allows."""
    return [
        array for chunk in column.chunks for array in _split(chunk, chunk.flatten().to_numpy(zero_copy_only=False))
    ]


def rows_arrays(column: pa.ChunkedArray, shape: tuple[int, ...]) -> list[npt.NDArray[Any]]:
    """Turn a ``list<fixed_size_list<value>[w]>`` column into one ``[t, *shape]`` view per row, without copying."""
    arrays = []
    for chunk in column.chunks:
        values = chunk.flatten().flatten().to_numpy(zero_copy_only=True)
        arrays.extend(_split(chunk, values.reshape(-1, *shape)))
    return arrays


def _split(chunk: pa.ListArray, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    offsets = chunk.offsets.to_numpy()
    offsets = offsets - offsets[0]
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]


def same_columns(found: pa.Schema, expected: pa.Schema) -> str:
    """Say how a shard's columns differ from what its manifest implies, or return ``""``."""
    for field in expected:
        if field.name not in found.names:
            return f"column {field.name!r} is missing"
        if (kind := found.field(field.name).type) != field.type:
            return f"column {field.name!r} is {kind}, expected {field.type}"
    extra = [name for name in found.names if name not in expected.names]
    return f"column {extra[0]!r} is unknown" if extra else ""
