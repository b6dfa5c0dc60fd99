"""Trace stores as plain files: built once by streaming, read piece by piece; memory does not grow with them.

On disk, below ``--out`` or at ``--cache``::

    arrays/
      tokens.bin           # int32 [N], the tokens the target processed, sequence after sequence
      experts.bin          # uint8 or uint16 [N, L, K]
      weights.bin          # float16 [N, L, K], aligned with experts; only for the loss that needs them
      sequences.parquet    # sequence_id, group_id, dataset, tokens: one row per sequence
      cache.json           # format_version, key (hash of the stores' checksums and specs), size of each file

The folder appears under its name only when it is whole, and is built anew when the stores are no longer those it
was made from. Pieces are read with ``preadv`` and not mapped: mapped pages would count as memory of the process.

Shapes: N tokens, S sequences, L MoE layers, K top-k.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.manifest import write_durably
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.shard_reader import ShardReader
from ecospec.trace_collection.store import TraceStore
from ecospec.train.arrays import EMPTY_STORES, Experts, Tokens, TraceArrays, trace_fingerprint
from ecospec.train.splits import SequenceTable

FORMAT_VERSION = 1
_META = "cache.json"
_ROWS = 4096
_SCHEMA = pa.schema(
    [("sequence_id", pa.string()), ("group_id", pa.string()), ("dataset", pa.string()), ("tokens", pa.int64())]
)


class RowFile:
    """A file of rows of one type, of which any range can be read.

    Safe in forked and in spawned worker processes: reading moves no shared file position.

    Args:
        path: The file.
        dtype: Type of the values.
        shape: Shape of a row.
    """

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._row_bytes: int = self.dtype.itemsize * math.prod(shape)
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return self.path.stat().st_size // self._row_bytes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def read(self, first: int, count: int) -> npt.NDArray[Any]:
        """Rows ``first`` to ``first + count``, ``[count, *shape]``.

        Raises:
            ValueError: The file is shorter.
        """
        rows = np.empty((count, *self.shape), self.dtype)
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        view, place = rows.reshape(-1).view(np.uint8).data, first * self._row_bytes
        while view:
            done = os.preadv(self._descriptor, [view], place)
            if not done:
                raise ValueError(f"{self.path} is truncated; remove its folder, it is built again from the traces")
            view, place = view[done:], place + done
        return rows


@dataclass(frozen=True)
class TraceCache:
    """Sequences in the files drawn above, or some of them.

    Attributes:
        folder: The files.
        spec: The target's routing.
        rows: int64 ``[S]``, number of each sequence in the files, ascending.
        starts: int64 ``[S]``, first token of each sequence in the files.
        lengths: int64 ``[S]``, tokens of each sequence.
    """

    folder: Path
    spec: RoutingSpec
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    _tokens: RowFile
    _experts: RowFile
    _weights: RowFile | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    def window(self, sequence: int, start: int, size: int) -> tuple[Tokens, Experts]:
        """See `ecospec.train.arrays.TraceSource`."""
        first = int(self.starts[sequence]) + start
        return self._tokens.read(first, size), self._experts.read(first, size)

    def weights(self, sequence: int, start: int, size: int) -> npt.NDArray[np.float16]:
        """Router weights float16 ``[size, L, K]`` of a piece of one sequence, aligned with its experts."""
        assert self._weights is not None
        rows: npt.NDArray[np.float16] = self._weights.read(int(self.starts[sequence]) + start, size)
        return rows

    def tokens(self, sequence: int, start: int, size: int) -> Tokens:
        """Tokens int32 ``[size]`` of a piece of one sequence."""
        return self._tokens.read(int(self.starts[sequence]) + start, size)

    def select(self, keep: npt.NDArray[Any]) -> TraceCache:
        """The same files with fewer sequences; copies nothing but the bounds.

        Args:
            keep: Bool ``[S]``, or ascending indices.
        """
        return dataclasses.replace(self, rows=self.rows[keep], starts=self.starts[keep], lengths=self.lengths[keep])

    def names(self, column: str) -> Iterator[str]:
        """``sequence_id``, ``group_id`` or ``dataset`` of each sequence, in order."""
        first = 0
        with pq.ParquetFile(self.folder / "sequences.parquet") as table:
            for batch in table.iter_batches(_ROWS, columns=[column], use_threads=False):
                low, high = np.searchsorted(self.rows, (first, first + batch.num_rows))
                if low < high:
                    yield from batch.column(0).take(pa.array(self.rows[low:high] - first)).to_pylist()
                first += batch.num_rows

    def table(self, seed: int) -> SequenceTable:
        """What `ecospec.train.splits.assign_splits` looks at."""
        return SequenceTable.build(self.lengths, self.names("group_id"), self.names("dataset"), seed)

    def fingerprint(self) -> str:
        """As `TraceArrays.fingerprint` of the same sequences."""
        return trace_fingerprint(self, self.names("group_id"))

    def load(self, max_tokens: int | None = None) -> TraceArrays:
        """Read sequences into memory.

        Args:
            max_tokens: At most so many tokens, of sequences spread evenly over all; None reads all. One sequence is
                read in any case.
        """
        chosen = (
            self if max_tokens is None or max_tokens >= self.num_tokens else self.select(self._spread(max_tokens))
        )
        offsets = np.concatenate([[0], np.cumsum(chosen.lengths)]).astype(np.int64)
        tokens = np.empty(int(offsets[-1]), np.int32)
        experts = np.empty((len(tokens), self.spec.num_layers, self.spec.top_k), self.spec.expert_dtype)
        for sequence, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            tokens[first:last], experts[first:last] = chosen.window(sequence, 0, last - first)
        groups, datasets = tuple(chosen.names("group_id")), tuple(chosen.names("dataset"))
        return TraceArrays(self.spec, tokens, experts, offsets, groups, datasets)

    def _spread(self, max_tokens: int) -> npt.NDArray[np.int64]:
        # By the fractional part of multiples of the golden ratio: spread evenly, the same for every run.
        order = np.argsort(np.arange(len(self.lengths)) * 0.6180339887498949 % 1.0, kind="stable")
        count = int(np.searchsorted(np.cumsum(self.lengths[order]), max_tokens, side="right"))
        return np.sort(order[: max(count, 1)])


def open_cache(stores: Sequence[TraceStore], folder: Path, *, with_weights: bool = False) -> TraceCache:
    """The sequences of some stores as files; built, or built anew, where they are missing or stale.

    Args:
        stores: Stores of one spec (`ecospec.train.arrays.open_stores`).
        folder: Where the files are.
        with_weights: Keep the router weights too.

    Raises:
        ValueError: The stores hold no token or lack wanted router weights, or ``folder`` is something else.
    """
    spec = stores[0].spec
    key = stores_key(stores, *(["weights"] if with_weights else []))
    require_files(folder, key, lambda partial: _write(stores, partial, with_weights=with_weights))
    with pq.ParquetFile(folder / "sequences.parquet") as table:
        lengths = [
            batch.column(0).to_numpy() for batch in table.iter_batches(_ROWS, columns=["tokens"], use_threads=False)
        ]
    all_lengths = np.concatenate(lengths).astype(np.int64)
    shape = (spec.num_layers, spec.top_k)
    return TraceCache(
        folder,
        spec,
        np.arange(len(all_lengths)),
        np.cumsum(all_lengths) - all_lengths,
        all_lengths,
        RowFile(folder / "tokens.bin", "<i4"),
        RowFile(folder / "experts.bin", little_endian(spec), shape),
        RowFile(folder / "weights.bin", "<f2", shape) if with_weights else None,
    )


def little_endian(spec: RoutingSpec) -> np.dtype[Any]:
    """Type of the experts in files."""
    return np.dtype(spec.expert_dtype).newbyteorder("<")


def _write(stores: Sequence[TraceStore], folder: Path, *, with_weights: bool) -> None:
    expert_type = little_endian(stores[0].spec)
    names: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    total = 0
    with (
        contextlib.ExitStack() as stack,
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "experts.bin").open("wb") as experts,
        pq.ParquetWriter(folder / "sequences.parquet", _SCHEMA, compression="zstd") as table,
    ):
        weights = stack.enter_context((folder / "weights.bin").open("wb")) if with_weights else None
        for store in stores:
            for trace in store.iter_sequences(columns=["experts", "weights"] if with_weights else ["experts"]):
                size = trace.num_processed
                if weights is not None:
                    weights.write(_router_weights(trace, store))
                tokens.write(np.ascontiguousarray(trace.token_ids[:size], "<i4").data)
                experts.write(np.ascontiguousarray(trace.experts, expert_type).data)
                for name, value in zip(
                    names, (trace.sequence_id, trace.group_id, trace.dataset, size), strict=True
                ):
                    names[name].append(value)
                total += size
                if len(names["tokens"]) >= _ROWS:
                    table.write_table(pa.Table.from_pydict(names, _SCHEMA))
                    names = {name: [] for name in names}
        table.write_table(pa.Table.from_pydict(names, _SCHEMA))
    pa.default_memory_pool().release_unused()  # about 70 MiB at L = 6, K = 4, which Arrow would keep
    if not total:
        raise ValueError(EMPTY_STORES)


def _router_weights(trace: RoutingTrace, store: TraceStore) -> memoryview:
    if trace.weights is None:
        raise ValueError(
            f"traces {store.path} hold no router weights, which --objective router_weighted needs; collect them "
            "with --weights, or take another objective"
        )
    return np.ascontiguousarray(trace.weights, "<f2").data


# ---- folders of files derived from stores -----------------------------------------------------------------------


def stores_key(stores: Sequence[ShardReader], *more: str) -> str:
    """SHA-256 hex of the content of stores: their specs and the checksums of their shards, in order.

    Args:
        stores: The stores; `ShardReader.verify` compares shards and checksums.
        more: What else the derived files depend on.
    """
    parts = [[s.manifest.kind, s.spec.to_dict(), [shard.sha256 for shard in s.manifest.shards]] for s in stores]
    return hashlib.sha256(json.dumps([parts, *more], sort_keys=True).encode()).hexdigest()


def require_files(folder: Path, key: str, write: Callable[[Path], None]) -> None:
    """Make sure that a folder holds the files derived from something.

    The processes of one run may all call this: one writes, the others wait.

    Args:
        folder: The folder; its parents are created.
        key: Hash of what the files are derived from.
        write: Writes them into the folder it is given.

    Raises:
        ValueError: ``folder`` exists and holds something else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if _is_current(folder, key):
            return
        if folder.exists() and not (folder / _META).is_file():
            raise ValueError(f"{folder} exists and is no cache of traces; remove it, or name another with --cache")
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        for name in sizes:
            _make_durable(partial / name)
        meta = {"format_version": FORMAT_VERSION, "key": key, "files": sizes}
        write_durably(partial / _META, json.dumps(meta, indent=1).encode())
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def _make_durable(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _is_current(folder: Path, key: str) -> bool:
    """Whether the files are there, whole and of this key."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        sizes: Mapping[str, int] = meta["files"]
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(whole and meta.get("format_version") == FORMAT_VERSION and meta.get("key") == key)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; the system releases it when the process dies."""
    import fcntl  # noqa: PLC0415 - POSIX only, and only needed here

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
