"""What is in a store, and what looks wrong with it: one pass over it in constant memory.

Rows are counted as they are stored, without the checks of `verification`, so that broken traces can be looked at.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection import routing_statistics as statistics
from ecospec.trace_collection.manifest import ROUTING_TRACE
from ecospec.trace_collection.records import Experts
from ecospec.trace_collection.schema import list_arrays, rows_arrays
from ecospec.trace_collection.shard_reader import ShardReader
from ecospec.trace_collection.stores import open_store

#: Pairs of one token below which nothing is said about chance: the error of `beyond_chance` is then about 0.02.
MIN_PAIRS = 100
#: `beyond_chance` below which routing counts as independent of the token; the demo target has 0.44 to 0.96.
INDEPENDENT = 0.05
#: Ids compared per row group, which bounds memory.
_IDS_PER_SAMPLE = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Share of one dataset (draft trees have none).

    Attributes:
        sequences: Rows.
        groups: Different group_ids.
        tokens: Tokens with experts.
        teacher_forced: Those of text the model did not write.
    """

    sequences: int
    groups: int
    tokens: int
    teacher_forced: int


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInfo:
    """How one MoE layer spreads its tokens.

    Attributes:
        layer: Decoder layer number.
        entropy_bits: Entropy of expert usage; at most log2 E.
        effective_experts: ``2 ** entropy_bits``.
        dead: Experts that no token used.
        same_token: How far two occurrences of a token share experts beyond chance, 0 to 1; None where too few.
    """

    layer: int
    entropy_bits: float
    effective_experts: float
    dead: tuple[int, ...]
    same_token: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class StoreInfo:
    """Summary of a store.

    Attributes:
        path: Its folder.
        kind: ``"routing_trace"`` or ``"draft_tree_trace"``.
        complete: Whether everything planned is there.
        spec: The target.
        rows: Sequences, or speculation steps.
        sequences: Different sequence_ids.
        groups: Different group_ids.
        tokens: Tokens, or tree nodes, with experts.
        bytes_per_token: Of all shards together.
        bytes_by_column: Bytes per token of each column; the rest is metadata.
        skipped: Prompts left out, by reason.
        datasets: By name.
        layers: One per MoE layer.
        warnings: What looks wrong, one line each.
    """

    path: str
    kind: str
    complete: bool
    spec: RoutingSpec
    rows: int
    sequences: int
    groups: int
    tokens: int
    bytes_per_token: float
    bytes_by_column: dict[str, float]
    skipped: dict[str, int]
    datasets: dict[str, DatasetInfo]
    layers: tuple[LayerInfo, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dataclasses.asdict(self) | {"spec": self.spec.to_dict()}


class _Tally:
    """Sums over the row groups of a store."""

    def __init__(self, spec: RoutingSpec) -> None:
        self._spec = spec
        self.counts = np.zeros((spec.num_layers, spec.num_experts), np.int64)
        self.zero_tokens = 0
        self.strangers = 0
        self.pairs = 0
        self._shared = np.zeros(spec.num_layers)
        self.sequences: set[str] = set()
        self.groups: dict[str, set[str]] = defaultdict(set)
        self.rows: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.teacher_forced: Counter[str] = Counter()

    def add(self, table: pa.Table) -> None:
        """Count one row group."""
        spec = self._spec
        self._add_rows(table)
        parts = rows_arrays(table.column("experts"), (spec.num_layers, spec.top_k))
        experts = np.concatenate(parts) if parts else np.empty((0, spec.num_layers, spec.top_k), np.uint8)
        self.counts += statistics.expert_counts(experts, spec.num_experts)
        self.strangers += int((experts >= spec.num_experts).sum())
        self.zero_tokens += int((~experts.any(axis=(1, 2))).sum())
        name = "token_ids" if "token_ids" in table.column_names else "token"
        tokens = np.concatenate(
            [ids[: len(part)] for ids, part in zip(list_arrays(table.column(name)), parts, strict=True)]
        )
        self._add_pairs(tokens, experts)

    def _add_rows(self, table: pa.Table) -> None:
        lengths = pc.list_value_length(table.column("experts")).to_pylist()
        self.sequences.update(table.column("sequence_id").to_pylist())
        traces = "dataset" in table.column_names
        datasets = table.column("dataset").to_pylist() if traces else [""] * table.num_rows
        origins = table.column("origin").to_pylist() if traces else ["generated"] * table.num_rows
        groups = table.column("group_id").to_pylist()
        for dataset, group, origin, length in zip(datasets, groups, origins, lengths, strict=True):
            self.groups[dataset].add(group)
            self.rows[dataset] += 1
            self.tokens[dataset] += length
            self.teacher_forced[dataset] += length * (origin == "teacher_forced")

    def _add_pairs(self, tokens: npt.NDArray[np.int32], experts: Experts) -> None:
        first, second = statistics.same_token_pairs(tokens)
        room = max(MIN_PAIRS, _IDS_PER_SAMPLE // (self._spec.num_layers * self._spec.top_k))
        if len(first) > room:  # evenly over the tokens
            chosen = np.linspace(0, len(first) - 1, room).astype(np.int64)
            first, second = first[chosen], second[chosen]
        if len(first):
            self._shared += len(first) * statistics.shared_experts(experts[first], experts[second])
            self.pairs += len(first)

    def same_token(self) -> list[float | None]:
        """`statistics.beyond_chance` of every layer, where there are enough pairs."""
        if self.pairs < MIN_PAIRS:
            return [None] * self._spec.num_layers
        found = statistics.beyond_chance(self._shared / self.pairs, self.counts, self._spec.top_k)
        return [None if np.isnan(value) else float(value) for value in found]


def inspect_store(path: str | Path) -> StoreInfo:
    """Summarise a store of routing traces or of draft trees.

    Args:
        path: Its folder.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It is no store, or a shard is missing, truncated, changed or unreadable.
    """
    store = open_store(path)
    store.verify()  # what a flipped byte decodes to would be counted
    manifest, spec = store.manifest, store.spec
    tally = _Tally(spec)
    for table in store.tables():
        if nulls := [name for name in table.column_names if table.column(name).null_count]:
            raise ValueError(
                f"{path}: column {nulls[0]!r} holds nulls; `ecospec traces verify {path}` lists the rows"
            )
        tally.add(table)
    tokens = sum(tally.tokens.values())
    entropies, effective = statistics.usage_entropy(tally.counts), statistics.effective_experts(tally.counts)
    layers = tuple(
        LayerInfo(
            layer,
            float(entropies[place]),
            float(effective[place]),
            tuple(int(expert) for expert in np.flatnonzero(tally.counts[place] == 0)),
            same,
        )
        for place, (layer, same) in enumerate(zip(spec.layer_indices, tally.same_token(), strict=True))
    )
    traces = manifest.kind == ROUTING_TRACE
    return StoreInfo(
        path=str(path),
        kind=manifest.kind,
        complete=manifest.complete,
        spec=spec,
        rows=store.num_rows,
        sequences=len(tally.sequences),
        groups=len(set().union(*tally.groups.values())),
        tokens=tokens,
        bytes_per_token=sum(shard.num_bytes for shard in manifest.shards) / max(tokens, 1),
        bytes_by_column=_bytes_by_column(store, tokens),
        skipped=dict(manifest.collection.get("skipped", {})),
        datasets={
            name: DatasetInfo(
                tally.rows[name], len(tally.groups[name]), tally.tokens[name], tally.teacher_forced[name]
            )
            for name in sorted(tally.rows)
            if traces
        },
        layers=layers,
        warnings=tuple(_warnings(store, tally, layers, tokens)),
    )


def _bytes_by_column(store: ShardReader, tokens: int) -> dict[str, float]:
    sizes: Counter[str] = Counter()
    for shard in store.manifest.shards:
        with store.open_shard(shard) as parquet:
            for group in range(parquet.num_row_groups):
                metadata = parquet.metadata.row_group(group)
                for place in range(metadata.num_columns):
                    column = metadata.column(place)
                    sizes[column.path_in_schema.split(".")[0]] += column.total_compressed_size
    return {name: size / max(tokens, 1) for name, size in sizes.items()}


def _warnings(store: ShardReader, tally: _Tally, layers: tuple[LayerInfo, ...], tokens: int) -> Iterator[str]:
    spec = store.spec
    if not store.manifest.complete:
        yield "the collection has not finished: resume it with --resume"
    if not tokens:
        yield "no token has experts"
        return
    if tally.strangers:
        yield (
            f"{tally.strangers:,} expert ids are none of this target's 0 to {spec.num_experts - 1} and are not "
            "counted; `ecospec traces verify` lists the rows"
        )
    if spec.top_k > 1 and tally.zero_tokens:
        yield (
            f"all zero: {tally.zero_tokens / tokens:.1%} of the tokens have expert 0 in every place, which no "
            "router does; a serving engine wrote empty rows (vLLM up to 0.26 with monolithic FlashInfer kernels)"
        )
    alive = spec.num_experts - np.array([len(layer.dead) for layer in layers])
    if spec.num_experts > spec.top_k and (stuck := np.flatnonzero(alive <= spec.top_k)).size:
        zero = " (all zero)" if spec.top_k == 1 and all(tally.counts[place, 0] for place in stuck) else ""
        yield f"MoE layers {_numbers(layers, stuck)} used the same {spec.top_k} expert(s) for every token{zero}"
    loose = [
        place for place, one in enumerate(layers) if one.same_token is not None and one.same_token < INDEPENDENT
    ]
    if loose:
        yield (
            f"routing looks uniform in MoE layers {_numbers(layers, np.array(loose))}: two occurrences of a token "
            "share no more experts than chance gives; are the rows aligned with the tokens, is the target trained?"
        )
    if forced := sum(tally.teacher_forced.values()):
        yield (
            f"{forced / tokens:.0%} of the tokens are not the model's own text (teacher_forced), which routes "
            "differently from what it meets in decoding"
        )


def _numbers(layers: tuple[LayerInfo, ...], places: npt.NDArray[np.int64]) -> str:
    """Decoder layer numbers, ``all`` of them, or the first eight."""
    if len(places) == len(layers):
        return "all"
    shown = ", ".join(str(layers[place].layer) for place in places[:8])
    return shown + (", …" if len(places) > 8 else "")
