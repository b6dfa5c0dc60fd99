"""Windows and batches as pure functions of (lengths, seed, epoch): the whole order of training.

A *window* is a piece of one sequence of at most ``context_length`` tokens; a *batch* is a list of windows of
similar length, padded on the right to the longest. Everything is a compact array: 24 bytes a window, 8 a batch.

Shapes: S sequences, W windows (rows of batches in general), B batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

#: Share of padded positions at which a batch is closed. The design asks for less than 10 % in all.
MAX_PADDING = 0.09

#: Windows whose lengths differ by less than this factor are shuffled among each other.
_BUCKET = 1.04

#: Windows that are ordinary Python numbers at a time.
_CHUNK = 4096

Windows = npt.NDArray[np.int64]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batches(Sequence[Index]):
    """Batches over numbered rows (windows, or rows of draft trees); item ``i`` is the rows of batch ``i``.

    Attributes:
        rows: int64 ``[W]``, numbers of the rows, batch after batch.
        bounds: int64 ``[B + 1]``, first place in ``rows`` of each batch.
        order: int64 ``[B]``, the batches in the order in which they are used.
        sizes: int64 ``[W]``, positions of each row, by its number.
    """

    rows: Index
    bounds: Index
    order: Index
    sizes: Index

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Index: ...
    @overload
    def __getitem__(self, index: slice) -> list[Index]: ...
    def __getitem__(self, index: int | slice) -> Index | list[Index]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = self.order[index]
        return self.rows[self.bounds[place] : self.bounds[place + 1]]

    def positions(self) -> tuple[int, int]:
        """Positions of all batches, and how many of them are padding."""
        if not len(self):
            return 0, 0
        sizes = self.sizes[self.rows]
        longest = np.maximum.reduceat(sizes, self.bounds[:-1])
        area = int((longest * np.diff(self.bounds)).sum())
        return area, area - int(sizes.sum())


def cut_windows(
    lengths: npt.NDArray[np.int64], context_length: int, rng: np.random.Generator | None = None
) -> Windows:
    """Cut sequences into windows that cover every token exactly once.

    Args:
        lengths: int64 ``[S]``, tokens of each sequence.
        context_length: Longest window, in tokens.
        rng: Moves the cuts of sequences longer than a window, so that every epoch sees other cuts; None cuts from
            the start (validation).

    Returns:
        int64 ``[W, 3]``: sequence, first token, number of tokens; by sequence and first token.
    """
    first = np.zeros(len(lengths), np.int64)  # tokens of a moved first window
    long = lengths > context_length
    if rng is not None and long.any():
        # At least a quarter window everywhere, also behind it: shorter contexts teach little.
        quarter = context_length // 4
        drawn = rng.integers(quarter, context_length + 1, int(long.sum()))
        first[long] = np.minimum(drawn, lengths[long] - quarter)
    left = lengths - first
    # Full windows while at least 1.25 windows are left; then one, or two halves of what is left.
    full = np.maximum(0, (4 * left - 5 * context_length) // (4 * context_length) + 1)
    rest = left - full * context_length
    halves = rest > context_length
    counts = (first > 0) + full + (rest > 0) + halves
    sequence = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    number -= (first > 0)[sequence]  # -1 for a moved first window
    full_, rest_, first_ = full[sequence], rest[sequence], first[sequence]
    half = rest_ // 2
    size = np.full(len(sequence), context_length, np.int64)
    size[number < 0] = first_[number < 0]
    last = number == full_
    size[last] = np.where(halves[sequence], half, rest_)[last]
    second = number > full_
    size[second] = (rest_ - half)[second]
    start = np.where(number < 0, 0, first_ + np.minimum(number, full_) * context_length + second * half)
    return np.stack([sequence, start, size], axis=1)


def make_batches(
    sizes: npt.NDArray[np.int64], batch_tokens: int, rng: np.random.Generator | None = None
) -> Batches:
    """Group rows of similar size into batches of at most ``batch_tokens`` positions, padding included.

    Args:
        sizes: int64 ``[W]``, positions of each row, all above 0.
        batch_tokens: Positions of a batch; a single longer row makes a batch of its own.
        rng: Shuffles rows of similar size and the order of the batches; None keeps them sorted.

    Returns:
        Batches of which none has more than `MAX_PADDING` padding.
    """
    if not len(sizes):
        empty = np.zeros(0, np.int64)
        return Batches(empty, np.zeros(1, np.int64), empty, sizes)
    if rng is None:
        order = np.argsort(sizes, kind="stable")
    else:
        buckets = np.floor(np.log(sizes) / math.log(_BUCKET))
        order = np.lexsort((rng.random(len(sizes)), buckets))
    bounds = [0]
    longest, total = 0, 0
    for chunk in range(0, len(order), _CHUNK):
        for position, size in enumerate(sizes[order[chunk : chunk + _CHUNK]].tolist(), start=chunk):
            count = position - bounds[-1]
            width = max(longest, size)
            area = (count + 1) * width
            if count and (area > batch_tokens or total + size < (1 - MAX_PADDING) * area):
                bounds.append(position)
                width, total = size, 0
            longest, total = width, total + size
    bounds.append(len(order))
    batches = len(bounds) - 1
    shuffled = np.arange(batches) if rng is None else rng.permutation(batches)
    return Batches(order, np.asarray(bounds, np.int64), shuffled, sizes)


@dataclass(frozen=True)
class EpochPlan:
    """All batches of one pass: of windows, of tree rows, or of both in one order.

    Attributes:
        windows: int64 ``[W, 3]`` of `cut_windows`.
        window_batches: Batches of them.
        tree_batches: Batches of tree rows, or None.
        order: int64 ``[B]``; below ``len(window_batches)`` a batch of windows, else a batch of trees.
    """

    windows: Windows
    window_batches: Batches
    tree_batches: Batches | None
    order: Index

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, index: int) -> tuple[bool, Index]:
        """Whether batch ``index`` is one of trees, and the numbers of its rows."""
        place, count = int(self.order[index]), len(self.window_batches)
        if place < count:
            return False, self.window_batches[place]
        assert self.tree_batches is not None
        return True, self.tree_batches[place - count]

    def padding_share(self) -> float:
        """Padded positions divided by all positions, between 0 and 1."""
        parts = [part.positions() for part in (self.window_batches, self.tree_batches) if part is not None]
        area = sum(part[0] for part in parts)
        return sum(part[1] for part in parts) / area if area else 0.0


def plan_epoch(
    lengths: npt.NDArray[np.int64] | None,
    tree_sizes: npt.NDArray[np.int64] | None = None,
    *,
    context_length: int,
    batch_tokens: int,
    key: Sequence[int] | None = None,
) -> EpochPlan:
    """All batches of one pass, in order: a pure function of its arguments.

    Args:
        lengths: int64 ``[S]``, tokens of each sequence; None to leave sequences out.
        tree_sizes: int64 ``[W]``, positions of each tree row; None to leave trees out.
        context_length: Longest window, in tokens.
        batch_tokens: Positions of a batch, padding included.
        key: Non-negative numbers that determine the shuffle, e.g. seed and epoch; None keeps the order of lengths.
    """
    rng = None if key is None else np.random.default_rng(list(key))
    empty = np.zeros(0, np.int64)
    windows = cut_windows(empty if lengths is None else lengths, context_length, rng)
    window_batches = make_batches(windows[:, 2], batch_tokens, rng)
    tree_batches = None if tree_sizes is None else make_batches(tree_sizes, batch_tokens, rng)
    count = len(window_batches) + (0 if tree_batches is None else len(tree_batches))
    order = np.arange(count) if rng is None or tree_batches is None else rng.permutation(count)
    return EpochPlan(windows, window_batches, tree_batches, order)


def rank_share(rows: Index, rank: int, world_size: int) -> Index:
    """The rows of one global batch that one of several processes works on.

    The shares are disjoint and together are the batch. A batch of fewer rows than processes leaves some without:
    they get an empty share. The number of batches, and so of steps, does not depend on the number of processes.

    Args:
        rows: int64 ``[n]``, the batch.
        rank: The process, from 0.
        world_size: Number of processes.

    Raises:
        ValueError: ``rank`` does not lie in 0 to ``world_size`` - 1.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0 to {world_size - 1}, got {rank}")
    return rows[rank::world_size]
