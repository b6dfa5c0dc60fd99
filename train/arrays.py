"""Trace stores as flat arrays in memory: for the tables, for reports and for small stores.

Training reads the same sequences from files (`ecospec.train.cache`) and so needs no more memory for more of them.

Shapes: N tokens of all sequences, S sequences, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.store import TraceStore

#: Tokens that are hashed at a time.
_CHUNK = 1 << 16

EMPTY_STORES = "the trace stores hold no token; collect traces first (ecospec collect-traces)"

Tokens = npt.NDArray[np.int32]
Experts = npt.NDArray[Any]


class TraceSource(Protocol):
    """Sequences that can be read piece by piece."""

    @property
    def spec(self) -> RoutingSpec:
        """The target's routing."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 ``[S]``, tokens of each sequence."""
        ...

    def window(self, sequence: int, start: int, size: int) -> tuple[Tokens, Experts]:
        """Tokens int32 ``[size]`` and experts uint8 or uint16 ``[size, L, K]`` of a piece of one sequence."""
        ...


@dataclass(frozen=True)
class TraceArrays:
    """Sequences of one or more stores, end to end.

    Attributes:
        spec: The target's routing.
        tokens: int32 ``[N]``, token ids; only tokens the target processed.
        experts: uint8 or uint16 ``[N, L, K]``, the experts of each token.
        offsets: int64 ``[S + 1]``, first token of each sequence.
        group_ids: Group of each sequence, length S.
        datasets: Dataset of each sequence, length S.
    """

    spec: RoutingSpec
    tokens: Tokens
    experts: Experts
    offsets: npt.NDArray[np.int64]
    group_ids: tuple[str, ...]
    datasets: tuple[str, ...]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 ``[S]``, tokens of each sequence."""
        return np.diff(self.offsets)

    def window(self, sequence: int, start: int, size: int) -> tuple[Tokens, Experts]:
        """See `TraceSource`."""
        first = int(self.offsets[sequence]) + start
        return self.tokens[first : first + size], self.experts[first : first + size]

    def subset(self, keep: npt.NDArray[np.bool_]) -> TraceArrays:
        """Copy the chosen sequences.

        Args:
            keep: Bool ``[S]``.
        """
        lengths = self.lengths
        token_mask = np.repeat(keep, lengths)
        return dataclasses.replace(
            self,
            tokens=self.tokens[token_mask],
            experts=self.experts[token_mask],
            offsets=np.concatenate([[0], np.cumsum(lengths[keep])]).astype(np.int64),
            group_ids=tuple(g for g, k in zip(self.group_ids, keep, strict=True) if k),
            datasets=tuple(d for d, k in zip(self.datasets, keep, strict=True) if k),
        )

    def fingerprint(self) -> str:
        """SHA-256 hex of tokens, experts, sequence bounds and groups: what a predictor was trained on."""
        return trace_fingerprint(self, self.group_ids)


def trace_fingerprint(source: TraceSource, group_ids: Iterable[str]) -> str:
    """Hash sequences piece by piece, so that they may be larger than memory.

    Args:
        source: The sequences.
        group_ids: Group of each, in order.

    Returns:
        SHA-256 hex of all tokens as ``<i4``, all experts as ``<u2``, the offsets as ``<i8``, each after its shape,
        and the groups, one a line.
    """
    offsets = np.concatenate([[0], np.cumsum(source.lengths)]).astype(np.int64)
    count, layers, top_k = int(offsets[-1]), source.spec.num_layers, source.spec.top_k
    digest = hashlib.sha256(str((count,)).encode())
    for tokens, _ in _pieces(source):
        digest.update(np.ascontiguousarray(tokens.astype("<i4")).data)
    digest.update(str((count, layers, top_k)).encode())
    for _, experts in _pieces(source):
        digest.update(np.ascontiguousarray(experts.astype("<u2")).data)
    digest.update(str(offsets.shape).encode())
    digest.update(offsets.astype("<i8").data)
    separator = b""
    for group in group_ids:
        digest.update(separator + group.encode())
        separator = b"\n"
    return digest.hexdigest()


def _pieces(source: TraceSource) -> Iterator[tuple[Tokens, Experts]]:
    for sequence, length in enumerate(source.lengths):
        for start in range(0, int(length), _CHUNK):
            yield source.window(sequence, start, min(_CHUNK, int(length) - start))


def open_stores(
    paths: Sequence[Path], spec: RoutingSpec | None = None, target: str = "the target"
) -> list[TraceStore]:
    """Open trace stores of one target.

    Args:
        paths: Folders of the stores.
        spec: The target's routing that they must have; None takes the first store's.
        target: What ``spec`` belongs to, for the message.

    Raises:
        FileNotFoundError: A store does not exist.
        ValueError: A store was made for another target, is incomplete, damaged, or named twice; or none was named.
    """
    if not paths:
        raise ValueError("no trace store given; name at least one with --traces")
    places = [path.resolve() for path in paths]
    if twice := [path for number, path in enumerate(paths) if places[number] in places[:number]]:
        raise ValueError(f"trace store {twice[0]} is named twice; name every store once")
    stores = [TraceStore(path) for path in paths]
    if spec is None:
        spec, target = stores[0].spec, f"traces {paths[0]}"
    for path, store in zip(paths, stores, strict=True):
        spec.require_same(store.spec, mine=target, theirs=f"traces {path}")
        store.require_complete()
        store.verify()
    return stores


def read_arrays(stores: Sequence[TraceStore], *, group_filter: Callable[[str], bool] | None = None) -> TraceArrays:
    """Read sequences of the stores in two passes: sizes first, then straight into the final arrays.

    Args:
        stores: Stores of one spec (`open_stores`).
        group_filter: Takes a group_id; sequences for which it is false are left out.

    Raises:
        ValueError: The stores hold no token.
    """
    spec = stores[0].spec
    entries = [e for store in stores for e in store.index() if group_filter is None or group_filter(e.group_id)]
    offsets = np.cumsum([0, *(entry.num_processed for entry in entries)], dtype=np.int64)
    if offsets[-1] == 0:
        raise ValueError(EMPTY_STORES)
    tokens = np.empty(int(offsets[-1]), np.int32)
    experts = np.empty((int(offsets[-1]), spec.num_layers, spec.top_k), spec.expert_dtype)
    sequence = 0
    for store in stores:
        for trace in store.iter_sequences(columns=["experts"], group_filter=group_filter):
            rows = slice(offsets[sequence], offsets[sequence + 1])
            tokens[rows] = trace.token_ids[: trace.num_processed]
            experts[rows] = trace.experts
            sequence += 1
    groups, datasets = (tuple(getattr(entry, name) for entry in entries) for name in ("group_id", "dataset"))
    return TraceArrays(spec, tokens, experts, offsets, groups, datasets)
