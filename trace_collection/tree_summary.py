"""What a draft-tree store holds, in a few numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import numpy.typing as npt

from ecospec.trace_collection.tree_store import TreeStore


@dataclasses.dataclass(frozen=True, slots=True)
class TreeSummary:
    """Counts over the trees of a store.

    Attributes:
        trees: Trees.
        nodes: Nodes, roots included.
        num_bytes: Size of the shards.
        accepted: ``accepted[d - 1]``: share of the trees in which a node at depth d lies on the path that the
            target emits.
    """

    trees: int
    nodes: int
    num_bytes: int
    accepted: tuple[float, ...]


def node_depths(parent: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """Edges from the root, int64 ``[N]``, for the parents of a tree, each before its children.

    >>> node_depths(np.array([-1, 0, 0, 2], np.int16)).tolist()
    [0, 1, 1, 2]
    """
    depths = np.zeros(parent.size, np.int64)
    for node in range(1, parent.size):
        depths[node] = depths[parent[node]] + 1
    return depths


def summarise_trees(store: TreeStore) -> TreeSummary:
    """Read a store once; one row group is in memory at a time."""
    reached: Counter[int] = Counter()
    deepest = 0
    for trace in store.iter_trees():
        depths = node_depths(trace.parent)
        deepest = max(deepest, int(depths.max()))
        reached.update(range(1, int(depths[trace.accepted].max()) + 1))
    shares = tuple(reached[depth] / store.num_rows for depth in range(1, deepest + 1))
    size = sum(shard.num_bytes for shard in store.manifest.shards)
    return TreeSummary(store.num_rows, store.num_tokens, size, shares)
