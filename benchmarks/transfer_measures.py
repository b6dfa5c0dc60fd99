"""What `predictor_transfer.py` measures: overlap by kind of text, by position, and by the length of the window.

Shapes: G groups, L MoE layers, E experts, K top-k, W tokens of a window, n positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ecospec.eval.bootstrap import Interval, paired_difference, ratio_interval
from ecospec.eval.overlap_counts import POSITION_LABELS, OverlapCounts
from ecospec.eval.overlap_report import BATCH_TOKENS, SequencePredictor, measure_overlap
from ecospec.predictor.bundle import load_predictor
from ecospec.predictor.bundle_files import PredictorBundle
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.overlap import topk_overlap_counts
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore
from ecospec.train.arrays import open_stores
from ecospec.train.splits import short_hash

#: Bytes of a key or value in the caches that are compared.
BFLOAT16 = 2

Sums = npt.NDArray[np.float64]


def load_all(target: Path, bundles: Mapping[str, Path], spec: RoutingSpec) -> dict[str, PredictorBundle]:
    """Open bundles in float32, with one copy of the target's embedding."""
    embedding = load_target_embedding(target, dtype=torch.float32)
    return {
        name: load_predictor(path, target_embedding=embedding, require_spec=spec, dtype=torch.float32).eval()
        for name, path in bundles.items()
    }


class TestText:
    """Sequences of test stores, as many of each dataset as a number of tokens allows, chosen by hash.

    Args:
        stores: The stores.
        spec: Routing of the target.
        tokens: Tokens of a dataset at most.
        least: Shortest sequence, in tokens.
    """

    __test__ = False  # no test class, whatever its name says

    def __init__(self, stores: Sequence[Path], spec: RoutingSpec, tokens: int, least: int = 1) -> None:
        self.stores: list[TraceStore] = open_stores(stores, spec)
        self.chosen: set[str] = set()
        self.tokens: dict[str, int] = {}
        entries = [entry for store in self.stores for entry in store.index() if entry.num_processed >= least]
        for entry in sorted(entries, key=lambda entry: short_hash(entry.sequence_id)):
            total = self.tokens.get(entry.dataset, 0) + entry.num_processed
            if total <= tokens:
                self.tokens[entry.dataset] = total
                self.chosen.add(entry.sequence_id)
        if not self.chosen:
            raise ValueError(
                f"no sequence of {', '.join(map(str, stores))} has {least} to {tokens} tokens; allow other lengths"
            )

    def __iter__(self) -> Iterator[RoutingTrace]:
        """Read the chosen sequences."""
        for store in self.stores:
            yield from (row for row in store.iter_sequences(["experts"]) if row.sequence_id in self.chosen)


def _hits(counts: OverlapCounts, name: str, dataset: str) -> tuple[Sums, Sums]:
    """True experts that were predicted, and those there were, by group of one dataset: both ``[G]``."""
    rows = [row for (_, found), row in counts.rows.items() if found == dataset]
    at_k = counts.ranks.index(counts.spec.top_k)
    pairs = counts.spec.num_layers * counts.spec.top_k
    hits = np.array([counts.predictors[name].layer_hits[row][at_k].sum() for row in rows], np.float64)
    return hits, np.array([counts.tokens[row].sum() * pairs for row in rows], np.float64)


def matrix(
    networks: Mapping[str, SequencePredictor],
    tables: Mapping[str, SequencePredictor],
    text: TestText,
    spec: RoutingSpec,
) -> dict[str, Any]:
    """Overlap of predictors trained on each set on the test text of each kind.

    Args:
        networks: Predictor by training set.
        tables: Table of bigrams by training set, the same sets.
        text: What is tested on.
        spec: Routing of the target.

    Returns:
        ``test`` (``tokens`` and ``groups`` by kind), and, by training set and kind of test text, intervals:
        ``network`` and ``bigram_table`` (overlap), ``network_minus_table`` and, where the kind has a training set
        of its own, ``network_minus_own`` and ``table_minus_own`` (less what was trained on that kind), all paired.
    """
    named = {f"network:{name}": one for name, one in networks.items()}
    named |= {f"table:{name}": one for name, one in tables.items()}
    counts = measure_overlap(text, named, spec)
    kinds = sorted(text.tokens)
    results: dict[str, Any] = {
        "test": {
            kind: {"tokens": text.tokens[kind], "groups": sum(found == kind for _, found in counts.rows)}
            for kind in kinds
        }
    }

    def overlap(who: str, kind: str) -> Interval:
        return ratio_interval(*_hits(counts, who, kind))

    def less(who: str, other: str, kind: str) -> Interval:
        hits, pairs = _hits(counts, who, kind)
        return paired_difference(hits, _hits(counts, other, kind)[0], pairs)

    values: dict[str, Callable[[str, str], Interval]] = {
        "network": lambda name, kind: overlap(f"network:{name}", kind),
        "bigram_table": lambda name, kind: overlap(f"table:{name}", kind),
        "network_minus_table": lambda name, kind: less(f"network:{name}", f"table:{name}", kind),
        "network_minus_own": lambda name, kind: less(f"network:{name}", f"network:{kind}", kind),
        "table_minus_own": lambda name, kind: less(f"table:{name}", f"table:{kind}", kind),
    }
    for what, value in values.items():
        own = [kind for kind in kinds if kind in networks] if what.endswith("own") else kinds
        results[what] = {
            name: {kind: value(name, kind).to_dict() for kind in own if not (what.endswith("own") and kind == name)}
            for name in networks
        }
    return results


def by_position(predictors: Mapping[str, SequencePredictor], text: TestText, spec: RoutingSpec) -> dict[str, Any]:
    """Overlap by the position of the token in its sequence.

    Args:
        predictors: By name; the differences are to the last.
        text: What is tested on.
        spec: Routing of the target.

    Returns:
        ``tokens`` by range of positions, ``overlap`` by predictor and range, ``difference`` to the last predictor
        by predictor and range, paired.
    """
    counts = measure_overlap(text, predictors, spec)
    groups: dict[str, list[int]] = {}
    for (group, _), row in counts.rows.items():
        groups.setdefault(group, []).append(row)

    def grouped(rows: Sequence[npt.NDArray[np.int64]]) -> Sums:
        return np.array(
            [np.sum([rows[row].sum(axis=0) for row in members], axis=0) for members in groups.values()], np.float64
        )

    tokens = grouped(counts.tokens)
    pairs = tokens * spec.num_layers * spec.top_k
    hits = {name: grouped(counts.predictors[name].cell_hits) for name in predictors}
    last = list(hits)[-1]
    there = [(index, label) for index, label in enumerate(POSITION_LABELS) if tokens[:, index].any()]
    return {
        "tokens": {label: int(tokens[:, index].sum()) for index, label in there},
        "overlap": {
            name: {label: ratio_interval(found[:, index], pairs[:, index]).to_dict() for index, label in there}
            for name, found in hits.items()
        },
        "difference": {
            name: {
                label: paired_difference(found[:, index], hits[last][:, index], pairs[:, index]).to_dict()
                for index, label in there
            }
            for name, found in hits.items()
            if name != last
        },
    }


def sample_positions(lengths: Sequence[int], first: int, count: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Positions to score, drawn uniformly from all that are far enough into their sequence.

    Args:
        lengths: Tokens of each sequence.
        first: First position that may be drawn.
        count: Number of positions; all of them where there are no more.
        seed: Seed of the draw.

    Returns:
        int64 ``[n]`` for each sequence, ascending, perhaps empty.

    >>> [places.tolist() for places in sample_positions([4, 1, 6], 3, 9, seed=0)]
    [[3], [], [3, 4, 5]]
    """
    room = np.maximum(np.asarray(lengths, np.int64) - first, 0)
    ends = np.cumsum(room)
    total = int(room.sum())
    drawn = np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False))
    owner = np.searchsorted(ends, drawn, side="right")
    return [drawn[owner == index] - (ends[index] - room[index]) + first for index in range(len(room))]


def window_hits(
    predictor: Any, ids: torch.Tensor, experts: torch.Tensor, positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Correct experts at some positions, the predictor being given only the last tokens up to each.

    Args:
        predictor: A bundle with ``score_batch``, causal.
        ids: int64 ``[T]``.
        experts: int64 ``[T, L, K]``.
        positions: int64 ``[n]``, at least ``window`` - 1.
        window: Tokens it is given, W, the one at the position included; None: all.

    Returns:
        int64 ``[n]``, summed over layers.
    """
    if window is None:  # causal: the scores at a position are those of the text that ends there
        scores = predictor.score_batch(ids.unsqueeze(0))[0, positions]
        return topk_overlap_counts(scores, experts[positions]).sum(dim=-1)
    windows = ids.unfold(0, window, 1)[positions - (window - 1)]
    found = [predictor.score_batch(batch)[:, -1] for batch in torch.split(windows, max(1, BATCH_TOKENS // window))]
    return topk_overlap_counts(torch.cat(found), experts[positions]).sum(dim=-1)


def by_window(
    predictor: Any, text: TestText, spec: RoutingSpec, windows: Sequence[int], *, first: int, count: int, seed: int
) -> dict[str, Any]:
    """Overlap against the number of tokens that the predictor is given.

    Args:
        predictor: A neural bundle.
        text: What is tested on.
        spec: Routing of the target.
        windows: Tokens it is given.
        first: First position that may be scored, at least the longest window less 1.
        count: Positions scored, the same for every window.
        seed: Seed of their draw.

    Returns:
        ``positions``, ``groups``, and by window, ``full`` included, ``overlap`` and (but for ``full``)
        ``difference`` to ``full``, paired.
    """
    lengths = [
        entry.num_processed for store in text.stores for entry in store.index() if entry.sequence_id in text.chosen
    ]
    places = sample_positions(lengths, first, count, seed)
    widths: dict[str, int | None] = {**{str(window): window for window in windows}, "full": None}
    hits: dict[str, dict[str, float]] = {name: {} for name in widths}
    tokens: dict[str, float] = {}
    with torch.inference_mode():
        for row, chosen in zip(text, places, strict=True):
            if not chosen.size:
                continue
            experts = torch.from_numpy(np.asarray(row.experts).astype(np.int64))
            ids = torch.from_numpy(np.asarray(row.token_ids[: len(experts)]).astype(np.int64))
            tokens[row.group_id] = tokens.get(row.group_id, 0) + chosen.size
            for name, window in widths.items():
                found = window_hits(predictor, ids, experts, torch.from_numpy(chosen), window)
                hits[name][row.group_id] = hits[name].get(row.group_id, 0) + int(found.sum())
    pairs = np.array(list(tokens.values())) * spec.num_layers * spec.top_k
    sums = {name: np.array([found[group] for group in tokens]) for name, found in hits.items()}
    return {
        "positions": int(sum(tokens.values())),
        "groups": len(tokens),
        "overlap": {name: ratio_interval(found, pairs).to_dict() for name, found in sums.items()},
        "difference": {
            name: paired_difference(found, sums["full"], pairs).to_dict()
            for name, found in sums.items()
            if name != "full"
        },
    }


def cache_bytes(backbone: Mapping[str, Any], tokens: int, value_bytes: int = BFLOAT16) -> int:
    """Bytes of the keys and values that a backbone keeps of a sequence.

    Args:
        backbone: Its transformers configuration.
        tokens: Tokens that are kept.
        value_bytes: Bytes of a number.

    >>> from ecospec.predictor.backbones import BACKBONE_PRESETS
    >>> cache_bytes(BACKBONE_PRESETS["qwen3-0.6b"], 1)  # 2 · 28 layers · 8 heads · 128 · 2 bytes
    114688
    """
    heads = int(backbone["num_attention_heads"])
    width = int(backbone.get("head_dim") or backbone["hidden_size"] // heads)
    shared = int(backbone.get("num_key_value_heads") or heads)
    return 2 * int(backbone["num_hidden_layers"]) * shared * width * tokens * value_bytes
