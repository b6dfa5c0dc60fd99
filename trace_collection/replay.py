"""Replay: run the token ids of a trace store through the target again, and compare the experts.

A health check: the same target gives the same experts, up to near ties of the router, whatever the batch, the
arithmetic or the engine. What the re-run gives is a trace store too, so a replay that was killed is resumed.

Shapes: t processed tokens of a sequence, L MoE layers, K top-k.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.collect import CollectProgress, ProgressCallback, run_batches
from ecospec.trace_collection.engine_protocol import Engine
from ecospec.trace_collection.manifest import TOKENS_PER_SHARD
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.records import Experts, RoutingTrace
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter

FORMAT_VERSION = 1
#: Below these shares of identical sets a layer is flagged: where both runs were at least float32, and otherwise.
LOW_SHARE_EXACT, LOW_SHARE_ROUNDED = 0.99, 0.9
_EXACT_DTYPES = ("float32", "float64")


def compare_sets(recorded: Experts, again: Experts) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Compare expert sets of the same tokens.

    Args:
        recorded: ``[t, L, K]``, ids ascending within a layer.
        again: Likewise.

    Returns:
        Whether the sets are identical, ``[t, L]``, and how many experts they share, int64 ``[t, L]``.

    >>> compare_sets(np.array([[[0, 3], [1, 2]]], np.uint8), np.array([[[0, 3], [2, 5]]], np.uint8))
    (array([[ True, False]]), array([[2, 1]]))
    """
    identical = (recorded == again).all(axis=-1)
    shared = (recorded[..., :, None] == again[..., None, :]).any(axis=-1).sum(axis=-1)
    return identical, shared


@dataclasses.dataclass(eq=False)
class Agreement:
    """How far two runs agree on some sequences.

    Attributes:
        dataset: Their dataset; ``""`` for all.
        origin: ``"generated"`` or ``"teacher_forced"``; ``""`` for all.
        identical: Tokens with identical sets, int64 ``[L]``.
        shared: Experts in both sets, summed over tokens, int64 ``[L]``.
        sequences: Number of sequences.
        tokens: Number of processed tokens.
        whole: Tokens whose sets are identical in every layer.
    """

    dataset: str
    origin: str
    identical: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    sequences: int = 0
    tokens: int = 0
    whole: int = 0

    @classmethod
    def empty(cls, dataset: str, origin: str, num_layers: int) -> Agreement:
        """Make one without sequences."""
        return cls(dataset, origin, np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64))

    def add(self, identical: npt.NDArray[np.bool_], shared: npt.NDArray[np.int64]) -> None:
        """Count one sequence; arguments as `compare_sets` returns them."""
        self.identical += identical.sum(axis=0)
        self.shared += shared.sum(axis=0)
        self.sequences += 1
        self.tokens += identical.shape[0]
        self.whole += int(identical.all(axis=1).sum())

    def shares(self) -> npt.NDArray[np.float64]:
        """Share of tokens with identical sets, ``[L]``."""
        return self.identical / self.tokens

    def overlaps(self, top_k: int) -> npt.NDArray[np.float64]:
        """Share of the recorded experts that the other run has, ``[L]``."""
        return self.shared / (self.tokens * top_k)


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayReport:
    """What a replay found.

    Attributes:
        spec: The target.
        total: All sequences.
        groups: The same by dataset and origin, sorted.
        low_share: Share of identical sets below which a layer is flagged.
        recorded: How the store was collected.
        replayed: How it was run again.
    """

    spec: RoutingSpec
    total: Agreement
    groups: tuple[Agreement, ...]
    low_share: float
    recorded: Mapping[str, Any]
    replayed: Mapping[str, Any]

    def low(self) -> list[tuple[Agreement, int, float]]:
        """Groups and MoE layers (0 to L - 1) that fall below ``low_share``, with their share, worst first."""
        found = [
            (group, int(layer), float(group.shares()[layer]))
            for group in self.groups
            for layer in np.flatnonzero(group.shares() < self.low_share)
        ]
        return sorted(found, key=lambda entry: entry[2])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; ``layer`` is the number of the decoder layer."""
        layers = self.spec.layer_indices
        return {
            "format_version": FORMAT_VERSION,
            "low_share": self.low_share,
            "recorded": dict(self.recorded),
            "replayed": dict(self.replayed),
            "total": self._entry(self.total),
            "groups": [self._entry(group) for group in self.groups],
            "low": [
                {"dataset": g.dataset, "origin": g.origin, "layer": layers[layer], "identical_share": share}
                for g, layer, share in self.low()
            ],
        }

    def _entry(self, group: Agreement) -> dict[str, Any]:
        columns = zip(self.spec.layer_indices, group.shares(), group.overlaps(self.spec.top_k), strict=True)
        return {
            "dataset": group.dataset,
            "origin": group.origin,
            "sequences": group.sequences,
            "tokens": group.tokens,
            "identical_share": float(group.shares().mean()),
            "all_layers_identical_share": group.whole / group.tokens,
            "overlap": float(group.overlaps(self.spec.top_k).mean()),
            "layers": [
                {"layer": layer, "identical_share": float(share), "overlap": float(overlap)}
                for layer, share, overlap in columns
            ],
        }


def replay(
    engine: Engine,
    source: TraceStore,
    out: str | Path,
    config: CollectConfig,
    *,
    spec: RoutingSpec,
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    low_share: float | None = None,
    progress: ProgressCallback | None = None,
) -> ReplayReport:
    """Read the sequences of a store again, store the rows in its order, and compare.

    Args:
        engine: What runs the target.
        source: The store. Only tokens that have rows are read: of a generated sequence all but the last.
        out: Folder of the store of the re-run.
        config: Its ``batch_size``, ``limit`` (sequences chosen by hash), ``weights`` and ``compression`` count.
        spec: The target's RoutingSpec.
        resume: Go on with ``out``.
        options: How the target is run (dtype, implementation); stored, and compared on resume.
        provenance: What else to record about this run.
        tokens_per_shard: Size of the shards.
        low_share: Share of identical sets below which a layer is flagged. None: 0.99 where both runs were in
            float32 or float64, else 0.9.
        progress: Called before the first batch and after each.

    Raises:
        FileExistsError: ``out`` is not empty and ``resume`` is off.
        ValueError: The store is of another target or empty, or the store to resume differs.
    """
    spec.require_same(source.spec, mine="the one it is replayed on", theirs=f"store {source.path}")
    places = _selection(source, config.limit)
    if not places.any():
        raise ValueError(f"{source.path} holds no processed token; give a store with traces")
    with TraceStoreWriter(
        out,
        spec,
        weights=config.weights,
        collection={**config.collection(), "replay_of": str(source.path), **(options or {})},
        plan_hash=_plan_hash(source, config),
        provenance=provenance,
        resume=resume,
        tokens_per_shard=tokens_per_shard,
        compression=config.compression,
        background=not engine.uses_host,
    ) as writer:
        _rerun(engine, source, places, writer, config.batch_size, progress=progress)
    return compare_stores(_selected(source, places), TraceStore(out), source.manifest.collection, low_share)


def _rerun(
    engine: Engine,
    source: TraceStore,
    places: npt.NDArray[np.bool_],
    writer: TraceStoreWriter,
    batch_size: int,
    *,
    progress: ProgressCallback | None,
) -> None:
    """Append every selected sequence as the engine reads it now."""
    total, tokens = int(places.sum()), 0
    done = min(total, writer.finished_units * batch_size)
    writer.require_rows(done)
    waiting: collections.deque[list[RoutingTrace]] = collections.deque()

    def batches() -> Iterator[list[PlannedSequence]]:
        for batch in _chunks(_selected(source, places, start=done), batch_size):
            waiting.append(batch)
            yield [_to_read(trace) for trace in batch]

    def report(sequences: int) -> None:
        if progress is not None:
            progress(CollectProgress(sequences, total, tokens, {}))

    report(done)
    for results in run_batches(engine, batches()):
        pairs = zip(waiting.popleft(), results, strict=True)
        writer.append([dataclasses.replace(old, experts=new.experts, weights=new.weights) for old, new in pairs])
        done += len(results)
        tokens += sum(trace.num_processed for trace in results)
        report(done)


def compare_stores(
    recorded: Iterable[RoutingTrace],
    again: TraceStore,
    collection: Mapping[str, Any],
    low_share: float | None = None,
) -> ReplayReport:
    """Compare the same sequences of two runs, in the same order; one row group of each is in memory.

    Args:
        recorded: Traces of the first run.
        again: Store of the second.
        collection: How the first was collected.
        low_share: See `replay`.

    Raises:
        ValueError: The sequences differ; the message names the first that does.
    """
    spec, second = again.spec, again.manifest.collection
    total = Agreement.empty("", "", spec.num_layers)
    groups: dict[tuple[str, str], Agreement] = {}
    for old, new in zip(recorded, again.iter_sequences(columns=("experts",)), strict=True):
        if old.sequence_id != new.sequence_id or not np.array_equal(old.token_ids, new.token_ids):
            raise ValueError(f"{again.path}: sequence {new.sequence_id!r} is not {old.sequence_id!r}; replay again")
        key = (old.dataset, old.origin)
        compared = compare_sets(old.experts, new.experts)
        total.add(*compared)
        groups.setdefault(key, Agreement.empty(*key, spec.num_layers)).add(*compared)
    if low_share is None:
        exact = collection.get("dtype") in _EXACT_DTYPES and second.get("dtype") in _EXACT_DTYPES
        low_share = LOW_SHARE_EXACT if exact else LOW_SHARE_ROUNDED
    ordered = tuple(groups[key] for key in sorted(groups))
    return ReplayReport(spec, total, ordered, low_share, collection, second)


def _selection(source: TraceStore, limit: int | None) -> npt.NDArray[np.bool_]:
    """Which sequences of a store are replayed: those with a processed token, at most ``limit``, chosen by hash."""
    entries = source.index()
    usable = [place for place, entry in enumerate(entries) if entry.num_processed]
    usable.sort(key=lambda place: entries[place].sequence_id)
    chosen = np.zeros(len(entries), dtype=bool)
    chosen[usable[:limit]] = True
    return chosen


def _selected(source: TraceStore, places: npt.NDArray[np.bool_], start: int = 0) -> Iterator[RoutingTrace]:
    """Yield the selected sequences in the order of the store, from the ``start``-th on."""
    seen = 0
    for trace, wanted in zip(source.iter_sequences(columns=("experts",)), places, strict=True):
        if wanted:
            seen += 1
            if seen > start:
                yield trace


def _chunks(traces: Iterable[RoutingTrace], size: int) -> Iterator[list[RoutingTrace]]:
    batch: list[RoutingTrace] = []
    for trace in traces:
        batch.append(trace)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _to_read(trace: RoutingTrace) -> PlannedSequence:
    """A sequence of which every token is read: those of a trace that were processed."""
    ids = trace.token_ids[: trace.num_processed]
    return PlannedSequence(trace.sequence_id, trace.group_id, trace.dataset, trace.category, ids)


def _plan_hash(source: TraceStore, config: CollectConfig) -> str:
    """Hash of what is replayed in which batches."""
    parts = [*(shard.sha256 for shard in source.manifest.shards), config.batch_size, config.limit]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
