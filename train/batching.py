"""Windows and batches as pure functions of (lengths, seed, epoch): the whole order of training in two functions.

A *window* is a piece of one sequence of at most ``context_length`` tokens; a *batch* is a list of windows of
similar length, padded on the right to the longest.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

#: Share of padded positions at which a batch is closed. The design asks for less than 10 % in all.
MAX_PADDING = 0.09

#: Windows whose lengths differ by less than this factor are shuffled among each other.
_BUCKET = 1.04

Windows = npt.NDArray[np.int64]


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
        int64 ``[W, 3]``: sequence, first token, number of tokens.
    """
    pieces: list[tuple[int, int, int]] = []
    for sequence, length in enumerate(lengths.tolist()):
        start = 0
        if rng is not None and length > context_length:
            # At least a quarter window everywhere: shorter contexts teach little.
            first = int(rng.integers(context_length // 4, context_length + 1))
            pieces.append((sequence, 0, first))
            start = first
        while length - start > context_length:
            left = length - start
            size = context_length if left >= 1.25 * context_length else left // 2
            pieces.append((sequence, start, size))
            start += size
        if length > start:
            pieces.append((sequence, start, length - start))
    return np.asarray(pieces, dtype=np.int64).reshape(-1, 3)


def make_batches(windows: Windows, batch_tokens: int, rng: np.random.Generator | None = None) -> list[Windows]:
    """Group windows of similar length into batches of at most ``batch_tokens`` positions, padding included.

    Args:
        windows: int64 ``[W, 3]`` of `cut_windows`, no empty ones.
        batch_tokens: Positions of a batch; a single longer window makes a batch of its own.
        rng: Shuffles windows of similar length and the order of the batches; None keeps them sorted.

    Returns:
        Batches, each int64 ``[B, 3]``. No batch has more than `MAX_PADDING` padding.
    """
    if not len(windows):
        return []
    sizes = windows[:, 2]
    if rng is None:
        order = np.argsort(sizes, kind="stable")
    else:
        buckets = np.floor(np.log(sizes) / math.log(_BUCKET))
        order = np.lexsort((rng.random(len(windows)), buckets))
    batches: list[Windows] = []
    start, longest, total = 0, 0, 0
    for position, size in enumerate(sizes[order].tolist()):
        count = position - start
        width = max(longest, size)
        area = (count + 1) * width
        if count and (area > batch_tokens or total + size < (1 - MAX_PADDING) * area):
            batches.append(windows[order[start:position]])
            start, width, total = position, size, 0
        longest, total = width, total + size
    batches.append(windows[order[start:]])
    if rng is not None:
        batches = [batches[index] for index in rng.permutation(len(batches))]
    return batches


def epoch_batches(
    lengths: npt.NDArray[np.int64], *, context_length: int, batch_tokens: int, seed: int, epoch: int
) -> list[Windows]:
    """All batches of one training epoch, in order: a pure function of its arguments.

    Args:
        lengths: int64 ``[S]``, tokens of each sequence.
        context_length: Longest window, in tokens.
        batch_tokens: Positions of a batch, padding included.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.

    Returns:
        Batches as of `make_batches`.
    """
    rng = np.random.default_rng([seed, epoch])
    return make_batches(cut_windows(lengths, context_length, rng), batch_tokens, rng)


def padding_share(batches: list[Windows]) -> float:
    """Padded positions divided by all positions, between 0 and 1."""
    area = sum(len(batch) * int(batch[:, 2].max()) for batch in batches)
    return 1 - sum(int(batch[:, 2].sum()) for batch in batches) / area if area else 0.0
