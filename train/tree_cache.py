"""Draft-tree traces as plain files, and the rows in which trees are trained on.

On disk, beside the files of `ecospec.train.cache`::

    trees/
      trees.bin      # one record a tree: sequence, first node, position, number of nodes
      tokens.bin     # int32 [M], nodes of all trees
      parents.bin    # int16 [M], within the tree, -1 for its root
      experts.bin    # uint8 or uint16 [M, L, K]
      cache.json

A draft-tree store holds no text. The tokens before a root come from the routing trace of the same sequence, which
is looked up once, when the files are written.

Shapes: M nodes of all trees, R rows, S sequences, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStore
from ecospec.train.cache import RowFile, TraceCache, little_endian, require_files, stores_key
from ecospec.train.splits import short_hash

TREE = np.dtype([("sequence", "<i8"), ("first", "<i8"), ("position", "<i4"), ("nodes", "<i4")])
_CHUNK = 1 << 15


@dataclass(frozen=True)
class TreeRows:
    """Rows of draft trees: the trees of neighbouring positions of one sequence behind one window of its text.

    Attributes:
        traces: The sequences' text.
        files: The trees.
        table: int64 ``[R, 6]``: first tree, number of trees, sequence (index into ``traces``), first token and
            number of tokens of the window, number of nodes. 48 bytes a row.
    """

    traces: TraceCache
    files: TreeFiles
    table: npt.NDArray[np.int64]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64 ``[R]``, positions of each row: window and nodes."""
        return self.table[:, 4] + self.table[:, 5]

    @property
    def num_trees(self) -> int:
        """Trees of all rows."""
        return int(self.table[:, 1].sum())

    @property
    def num_nodes(self) -> int:
        """Nodes of all rows."""
        return int(self.table[:, 5].sum())

    def select(self, sequences: npt.NDArray[np.bool_]) -> TreeRows:
        """The rows of some sequences.

        Args:
            sequences: Bool ``[S]``.
        """
        return dataclasses.replace(self, table=self.table[sequences[self.table[:, 2]]])


@dataclass(frozen=True)
class TreeFiles:
    """The files drawn above.

    Attributes:
        spec: The target's routing.
        trees: Records of type `TREE`.
        tokens: int32, per node.
        parents: int16, per node.
        experts: uint8 or uint16 ``[L, K]``, per node.
    """

    spec: RoutingSpec
    trees: RowFile
    tokens: RowFile
    parents: RowFile
    experts: RowFile


def open_tree_stores(paths: Sequence[Path], spec: RoutingSpec, target: str) -> list[TreeStore]:
    """Open draft-tree stores of one target.

    Args:
        paths: Folders of the stores.
        spec: The target's routing that they must have.
        target: What ``spec`` belongs to, for the message.

    Raises:
        FileNotFoundError: A store does not exist.
        ValueError: A store is of another kind or target, incomplete, damaged, or named twice.
    """
    places = [path.resolve() for path in paths]
    if twice := [path for number, path in enumerate(paths) if places[number] in places[:number]]:
        raise ValueError(f"draft-tree store {twice[0]} is named twice; name every store once")
    stores = [TreeStore(path) for path in paths]
    for path, store in zip(paths, stores, strict=True):
        spec.require_same(store.spec, mine=target, theirs=f"tree traces {path}")
        store.require_complete()
        store.verify()
    return stores


def open_trees(stores: Sequence[TreeStore], traces: TraceCache, traces_key: str, folder: Path) -> TreeFiles:
    """The trees of some stores as files; built, or built anew, where they are missing or stale.

    Args:
        stores: Of `open_tree_stores`.
        traces: All sequences of the routing traces.
        traces_key: `ecospec.train.cache.stores_key` of their stores.
        folder: Where the files are.

    Raises:
        ValueError: A tree's sequence is not among ``traces``, or the two do not fit each other.
    """
    spec = traces.spec
    key = stores_key(stores, traces_key)
    require_files(folder, key, lambda partial: _write(stores, traces, partial))
    return TreeFiles(
        spec,
        RowFile(folder / "trees.bin", TREE),
        RowFile(folder / "tokens.bin", "<i4"),
        RowFile(folder / "parents.bin", "<i2"),
        RowFile(folder / "experts.bin", little_endian(spec), (spec.num_layers, spec.top_k)),
    )


class _Lookup:
    """Finds the sequence of a tree: 24 bytes a sequence while the files are written."""

    def __init__(self, traces: TraceCache) -> None:
        count = len(traces.lengths)
        hashes = np.fromiter((short_hash(name) for name in traces.names("sequence_id")), np.uint64, count)
        self._groups = np.fromiter((short_hash(name) for name in traces.names("group_id")), np.uint64, count)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        self._traces = traces

    def sequence(self, tree: TreeTrace, store: Path) -> int:
        """Number of the tree's sequence.

        Raises:
            ValueError: There is none, or its text, length or group is another.
        """
        place = int(np.searchsorted(self._sorted, np.uint64(short_hash(tree.sequence_id))))
        if place == len(self._sorted) or self._sorted[place] != short_hash(tree.sequence_id):
            raise ValueError(
                f"--tree_traces {store} holds trees of sequence {tree.sequence_id!r}, which --traces does not; add "
                "the trace store with the text that the trees were recorded on"
            )
        sequence = int(self._order[place])
        length = int(self._traces.lengths[sequence])
        if tree.position > length or (
            tree.position < length and self._traces.tokens(sequence, tree.position, 1)[0] != tree.token[0]
        ):
            raise ValueError(
                f"--tree_traces {store}: the tree of sequence {tree.sequence_id!r} at position {tree.position} "
                "does not continue the text of that sequence in --traces; the two were recorded on different texts"
            )
        if short_hash(tree.group_id) != self._groups[sequence]:
            raise ValueError(
                f"--tree_traces {store}: sequence {tree.sequence_id!r} is of group {tree.group_id!r}, in --traces "
                "it is of another; collect both from the same prompts"
            )
        return sequence


def _write(stores: Sequence[TreeStore], traces: TraceCache, folder: Path) -> None:
    lookup = _Lookup(traces)
    names = ("trees", "tokens", "parents", "experts")
    files = [(folder / f"{name}.bin").open("wb") for name in names]
    first = 0
    try:
        for store in stores:
            for tree in store.iter_trees():
                sequence = lookup.sequence(tree, store.path)
                record = np.array((sequence, first, tree.position, tree.num_nodes), TREE)
                columns = (record, tree.token.astype("<i4"), tree.parent.astype("<i2"), tree.experts)
                for file, column in zip(files, columns, strict=True):
                    file.write(column.tobytes())
                first += tree.num_nodes
    finally:
        for file in files:
            file.close()
    if not first:
        raise ValueError("the draft-tree stores hold no tree; record trees first")


def tree_rows(traces: TraceCache, files: TreeFiles, context_length: int) -> TreeRows:
    """Group trees into rows, so that many trees share one pass over the text before them.

    A row is closed when the sequence changes, when its nodes would outnumber a window, or when the first of its
    trees would see less than three quarters of a window although the text holds more. Stores in which the trees of
    one sequence follow each other (what the recorder writes) give full rows; any other order is only slower.

    Args:
        traces: All sequences.
        files: The trees.
        context_length: Longest window, in tokens; also the most nodes of a row, unless one tree has more.
    """
    rows: list[tuple[int, int, int, int, int, int]] = []
    tables: list[npt.NDArray[np.int64]] = []
    # First tree, number of trees, sequence, position of the first and of the last root, nodes.
    first, count, sequence, low, high, nodes = 0, 0, -1, 0, 0, 0

    def close() -> None:
        start = max(0, high - context_length)
        rows.append((first, count, sequence, start, high - start, nodes))

    total = len(files.trees)
    for chunk in range(0, total, _CHUNK):
        records: list[Any] = files.trees.read(chunk, min(_CHUNK, total - chunk)).tolist()
        for number, (of, _, position, size) in enumerate(records, start=chunk):
            far = position > context_length and position - low > context_length // 4
            if count and (of != sequence or position < high or nodes + size > context_length or far):
                close()
                count = 0
            if not count:
                first, sequence, low, nodes = number, of, position, 0
            count, high, nodes = count + 1, position, nodes + size
        tables.append(np.asarray(rows, np.int64).reshape(-1, 6))
        rows.clear()
    close()
    tables.append(np.asarray(rows, np.int64).reshape(-1, 6))
    return TreeRows(traces, files, np.concatenate(tables))
