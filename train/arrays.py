"""Trace stores as flat arrays: as compact in memory as on disk, or memory mapped.

Shapes: N tokens of all sequences, S sequences, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.store import TraceStore


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
    tokens: npt.NDArray[np.int32]
    experts: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    group_ids: tuple[str, ...]
    datasets: tuple[str, ...]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 ``[S]``, tokens of each sequence."""
        return np.diff(self.offsets)

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
        digest = hashlib.sha256()
        for array in (self.tokens.astype("<i4"), self.experts.astype("<u2"), self.offsets.astype("<i8")):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array).data)
        digest.update("\n".join(self.group_ids).encode())
        return digest.hexdigest()


def in_validation(group_id: str, *, fraction: float, seed: int) -> bool:
    """Whether a group belongs to the validation split: a pure function of its id and the seed.

    Args:
        group_id: Group of a sequence.
        fraction: Share of groups held out, between 0 and 1.
        seed: Seed of the split.
    """
    digest = hashlib.sha256(f"split:{seed}:{group_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction


def split_groups(arrays: TraceArrays, *, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which sequences are held out for validation; sequences of one group stay together.

    Args:
        arrays: All sequences.
        fraction: Share of groups held out, between 0 and 1.
        seed: Seed of the split.

    Returns:
        bool ``[S]``, true for validation.

    Raises:
        ValueError: One of the two splits is empty.
    """
    held_out = np.array([in_validation(g, fraction=fraction, seed=seed) for g in arrays.group_ids], dtype=bool)
    groups = len(set(arrays.group_ids))
    for name, empty in (("validation", not held_out.any()), ("training", bool(held_out.all()))):
        if empty:
            raise ValueError(
                f"the {name} split is empty: {groups} groups at --validation_fraction {fraction} and seed {seed}; "
                "collect traces of more groups, or change the fraction or the seed"
            )
    return held_out


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
        ValueError: A store was made for another target, or no store was named.
    """
    if not paths:
        raise ValueError("no trace store given; name at least one with --traces")
    stores = [TraceStore(path) for path in paths]
    if spec is None:
        spec, target = stores[0].spec, f"traces {paths[0]}"
    for path, store in zip(paths, stores, strict=True):
        spec.require_same(store.spec, mine=target, theirs=f"traces {path}")
    return stores


def read_arrays(stores: Sequence[TraceStore], memory_map: Path | None = None) -> TraceArrays:
    """Read all sequences of the stores in two passes: sizes first, then straight into the final arrays.

    Args:
        stores: Stores of one spec (`open_stores`).
        memory_map: Existing folder for memory-mapped arrays; None keeps them in memory (28 bytes a token at L = 6,
            K = 4).

    Raises:
        ValueError: The stores hold no token.
    """
    spec = stores[0].spec
    entries = [entry for store in stores for entry in store.index()]
    offsets = np.cumsum([0, *(entry.num_processed for entry in entries)], dtype=np.int64)
    if offsets[-1] == 0:
        raise ValueError("the trace stores hold no token; collect traces first (ecospec collect-traces)")
    tokens = _allocate((int(offsets[-1]),), "int32", memory_map, "tokens")
    experts = _allocate((int(offsets[-1]), spec.num_layers, spec.top_k), spec.expert_dtype, memory_map, "experts")
    sequence = 0
    for store in stores:
        for trace in store.iter_sequences(columns=["experts"]):
            rows = slice(offsets[sequence], offsets[sequence + 1])
            tokens[rows] = trace.token_ids[: trace.num_processed]
            experts[rows] = trace.experts
            sequence += 1
    groups, datasets = (tuple(getattr(entry, name) for entry in entries) for name in ("group_id", "dataset"))
    return TraceArrays(spec, tokens, experts, offsets, groups, datasets)


def _allocate(shape: tuple[int, ...], dtype: str, memory_map: Path | None, name: str) -> npt.NDArray[Any]:
    if memory_map is None:
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(memory_map / f"{name}.npy", mode="w+", dtype=np.dtype(dtype), shape=shape)
