"""Trace stores as flat arrays: as compact in memory as on disk, or memory mapped.

Shapes: N tokens of all sequences, S sequences, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.store import TraceStore

#: Tokens that are hashed at a time.
_CHUNK = 1 << 20


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
        for array, dtype in ((self.tokens, "<i4"), (self.experts, "<u2"), (self.offsets, "<i8")):
            digest.update(str(array.shape).encode())
            for start in range(0, len(array), _CHUNK):  # in pieces: the arrays may be larger than memory
                digest.update(np.ascontiguousarray(array[start : start + _CHUNK].astype(dtype)).data)
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
    return validation_mask(arrays.group_ids, fraction=fraction, seed=seed)


def validation_mask(group_ids: Sequence[str], *, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """`split_groups` for sequences of which only the groups are known, ``[S]``."""
    held_out = np.array([in_validation(g, fraction=fraction, seed=seed) for g in group_ids], dtype=bool)
    groups = len(set(group_ids))
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


def read_split(
    stores: Sequence[TraceStore], *, fraction: float, seed: int, memory_map: Path | None = None
) -> tuple[TraceArrays, TraceArrays]:
    """Read the training and the validation split of some stores.

    Args:
        stores: Stores of one spec (`open_stores`).
        fraction: Share of groups held out, between 0 and 1.
        seed: Seed of the split.
        memory_map: Folder for memory-mapped arrays; None keeps them in memory.

    Raises:
        ValueError: The stores hold no token, or one of the splits is empty.
    """
    groups = [entry.group_id for store in stores for entry in store.index()]
    if groups:
        validation_mask(groups, fraction=fraction, seed=seed)

    def held_out(group_id: str) -> bool:
        return in_validation(group_id, fraction=fraction, seed=seed)

    training, validation = (None, None) if memory_map is None else (memory_map / "train", memory_map / "validation")
    return (
        read_arrays(stores, training, group_filter=lambda group_id: not held_out(group_id)),
        read_arrays(stores, validation, group_filter=held_out),
    )


def read_arrays(
    stores: Sequence[TraceStore],
    memory_map: Path | None = None,
    *,
    group_filter: Callable[[str], bool] | None = None,
) -> TraceArrays:
    """Read sequences of the stores in two passes: sizes first, then straight into the final arrays.

    Args:
        stores: Stores of one spec (`open_stores`).
        memory_map: Folder for memory-mapped arrays, created if missing; None keeps them in memory (28 bytes a token
            at L = 6, K = 4).
        group_filter: Takes a group_id; sequences for which it is false are left out.

    Raises:
        ValueError: The stores hold no token.
    """
    spec = stores[0].spec
    entries = [e for store in stores for e in store.index() if group_filter is None or group_filter(e.group_id)]
    offsets = np.cumsum([0, *(entry.num_processed for entry in entries)], dtype=np.int64)
    if offsets[-1] == 0:
        raise ValueError("the trace stores hold no token; collect traces first (ecospec collect-traces)")
    tokens = _allocate((int(offsets[-1]),), "int32", memory_map, "tokens")
    experts = _allocate((int(offsets[-1]), spec.num_layers, spec.top_k), spec.expert_dtype, memory_map, "experts")
    sequence = 0
    for store in stores:
        for trace in store.iter_sequences(columns=["experts"], group_filter=group_filter):
            rows = slice(offsets[sequence], offsets[sequence + 1])
            tokens[rows] = trace.token_ids[: trace.num_processed]
            experts[rows] = trace.experts
            sequence += 1
    groups, datasets = (tuple(getattr(entry, name) for entry in entries) for name in ("group_id", "dataset"))
    return TraceArrays(spec, tokens, experts, offsets, groups, datasets)


def _allocate(shape: tuple[int, ...], dtype: str, memory_map: Path | None, name: str) -> npt.NDArray[Any]:
    if memory_map is None:
        return np.empty(shape, dtype)
    memory_map.mkdir(parents=True, exist_ok=True)
    return np.lib.format.open_memmap(memory_map / f"{name}.npy", mode="w+", dtype=np.dtype(dtype), shape=shape)
