"""Draft trees as padded batches, seen exactly as `ecospec.predictor.tree_session` lets the predictor see them.

A row is a window of text, then the nodes of some trees whose roots follow the window's tokens::

    text 0 1 2 3 4 | tree at 3: root, candidates | tree at 5: root, candidates | padding

A text token sees the text up to itself. A node of the tree at position p sees the text before p and its own path;
its position is that of its root plus its depth. It sees no other tree. Only nodes count in the loss.

Shapes: B rows, T positions, N nodes of a tree, L MoE layers, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ecospec.train.tree_cache import TreeRows


@dataclass(frozen=True)
class TreeRow:
    """One row, unpadded.

    Attributes:
        ids: int32 ``[T]``.
        experts: uint8 or uint16 ``[T, L, K]``; zero for the text, which does not count.
        counted: bool ``[T]``, the nodes.
        positions: int64 ``[T]``, from 0 at the first token of the window.
        attention: bool ``[T, T]``, row i is true where i sees.
    """

    ids: npt.NDArray[np.int32]
    experts: npt.NDArray[Any]
    counted: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]
    attention: npt.NDArray[np.bool_]


def own_path(parents: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Which nodes lie on each node's path, itself included.

    Args:
        parents: ``[N]``, -1 for the root, else an index below the node's own.

    Returns:
        bool ``[N, N]``.
    """
    path = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        path[node] |= path[parents[node]]
    return path


def read_row(rows: TreeRows, number: int) -> TreeRow:
    """Read and lay out one row.

    Args:
        rows: The rows.
        number: Number of the row.
    """
    first, count, sequence, start, window, nodes = rows.table[number].tolist()
    trees = rows.files.trees.read(first, count)
    begin = int(trees[0]["first"])
    size = window + nodes
    experts = np.zeros((size, rows.files.spec.num_layers, rows.files.spec.top_k), rows.files.experts.dtype)
    experts[window:] = rows.files.experts.read(begin, nodes)
    ids = np.concatenate([rows.traces.tokens(sequence, start, window), rows.files.tokens.read(begin, nodes)])
    parents = rows.files.parents.read(begin, nodes)
    attention = np.zeros((size, size), bool)
    attention[:window, :window] = np.tri(window, dtype=bool)
    positions = np.arange(size)
    place = window
    for position, length in zip(trees["position"].tolist(), trees["nodes"].tolist(), strict=True):
        own = slice(place, place + length)
        path = own_path(parents[place - window : place - window + length])
        attention[own, : position - start] = True
        attention[own, own] = path
        positions[own] = position - start + path.sum(axis=1) - 1
        place += length
    return TreeRow(ids, experts, np.arange(size) >= window, positions, attention)


def tree_batch(rows: TreeRows, numbers: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Rows as one padded batch; keys as documented in `ecospec.train.data`.

    Args:
        rows: The rows.
        numbers: int64 ``[B]``, those to take; an empty batch becomes one position that does not count.
    """
    read = [read_row(rows, number) for number in numbers.tolist()]
    count, width = max(len(read), 1), max((len(row.ids) for row in read), default=1)
    spec, stored = rows.files.spec, rows.files.experts.dtype
    ids = np.zeros((count, width), np.int64)
    experts = np.zeros((count, width, spec.num_layers, spec.top_k), np.uint8 if stored == np.uint8 else np.int32)
    mask = np.zeros((count, width), bool)
    positions = np.zeros((count, width), np.int64)
    # Padding sees itself: a softmax over nothing would be no number.
    attention = np.broadcast_to(np.eye(width, dtype=bool), (count, width, width)).copy()
    for number, row in enumerate(read):
        size = len(row.ids)
        ids[number, :size], experts[number, :size] = row.ids, row.experts
        mask[number, :size], positions[number, :size] = row.counted, row.positions
        attention[number, :size, :size] = row.attention
    arrays = {
        "input_ids": ids,
        "experts": experts,
        "mask": mask,
        "position_ids": positions,
        "attention": attention,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def additive_mask(attention: Tensor, dtype: torch.dtype) -> Tensor:
    """What transformers' models take for a mask of one's own.

    Args:
        attention: bool ``[B, T, T]``, true where row i sees.
        dtype: Type of the attention's scores.

    Returns:
        ``[B, 1, T, T]``, 0 where a position sees and the type's lowest number elsewhere. Additive, because eager
        attention takes a boolean mask for numbers.
    """
    mask = torch.zeros(attention.shape, dtype=dtype, device=attention.device)
    return mask.masked_fill_(~attention, torch.finfo(dtype).min).unsqueeze(1)
