"""From streamed counts to the numbers of an overlap report: pure functions, JSON types out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ecospec.eval.bootstrap import Interval, paired_difference, ratio_interval
from ecospec.eval.metrics import independent_union, normalised_entropy
from ecospec.eval.overlap_counts import (
    POSITION_LABELS,
    SEGMENTS,
    WINDOWS,
    OverlapCounts,
    PredictorCounts,
)
from ecospec.predictor.calibration import expected_calibration_error

#: Predictors that look up tables fitted on traces; the best of them is what a trained predictor has to beat.
TABLES = ("frequency", "token_table", "bigram_table")
#: All baselines, in the order of the tables.
BASELINES = ("random", *TABLES, "last_token", "mlp")

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums of one predictor as arrays; the first axis is the row, one (group, dataset)."""

    layer_hits: Array  # [rows, R + 1, L]
    cell_hits: Array  # [rows, S, P]
    unions: list[dict[str, float | None]]
    calibration_error: float | None
    reliability: list[list[float]]
    predicted: list[list[int]] | None
    ranks_only: bool = False


def _measured(counts: PredictorCounts) -> _Sums:
    unions = []
    for window, sums in zip(WINDOWS, counts.unions.double().tolist(), strict=True):
        names = ("predicted", "true", "common", "difference")
        unions.append(_union_entry(window, sums[0], **dict(zip(names, sums[1:], strict=True))))
    reliability = [
        [count, probability / count, outcomes / count]
        for count, probability, outcomes in counts.calibration.tolist()
        if count
    ]
    return _Sums(
        np.stack(counts.layer_hits).astype(np.float64),
        np.stack(counts.cell_hits).astype(np.float64),
        unions,
        None if counts.ranks_only else expected_calibration_error(counts.calibration),
        reliability,
        counts.predicted.tolist(),
        counts.ranks_only,
    )


def _union_entry(
    window: int, total: float, *, predicted: float, true: float, common: float, difference: float | None
) -> dict[str, float | None]:
    if not total:
        return {"window": window, "predicted": None, "true": None, "relative_error": None, "absolute_error": None,
                "jaccard": None}  # fmt: skip
    return {
        "window": window,
        "predicted": predicted / total,
        "true": true / total,
        "relative_error": predicted / true - 1.0,
        "absolute_error": None if difference is None else difference / true,
        "jaccard": common / (predicted + true - common),
    }


def _expected_of_random(counts: OverlapCounts) -> _Sums:
    """Exact expectation of a uniformly random set of K experts; nothing is drawn."""
    spec = counts.spec
    share = spec.top_k / spec.num_experts
    tokens = np.stack(counts.tokens).astype(np.float64)
    per_token = np.array([rank * share for rank in counts.ranks] + [1.0 / math.comb(spec.num_experts, spec.top_k)])
    layer_hits = tokens.sum(axis=(1, 2))[:, None, None] * per_token[None, :, None] * np.ones(spec.num_layers)
    unions = []
    for window, (total, true) in zip(WINDOWS, counts.true_unions.double().tolist(), strict=True):
        size = independent_union(spec.num_experts, spec.top_k, window)
        common = true * size / spec.num_experts
        unions.append(
            _union_entry(window, total, predicted=total * size, true=true, common=common, difference=None)
        )
    return _Sums(layer_hits, tokens * spec.num_layers * spec.top_k * share, unions, 0.0, [], None)


def _by_group(rows: dict[tuple[str, str], int], dataset: str | None = None) -> list[list[int]]:
    """Row numbers of every group, of one dataset or of all."""
    groups: dict[str, list[int]] = {}
    for (group, name), row in rows.items():
        if dataset is None or name == dataset:
            groups.setdefault(group, []).append(row)
    return list(groups.values())


def _grouped(values: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Sum rows ``[rows, ...]`` to groups ``[G, ...]``."""
    return np.stack([values[list(rows)].sum(axis=0) for rows in groups])


def summarise(counts: OverlapCounts) -> dict[str, Any]:
    """All numbers of a report.

    Args:
        counts: Sums over at least one token.

    Returns:
        ``tokens``, ``sequences``, ``groups``, ``datasets`` (tokens by name), ``segments`` (tokens by name),
        ``routing`` (how the target uses its experts), ``predictors`` (by name, ``random`` first) and
        ``gain_over_best_table`` (by name of every predictor that is no baseline).

    Raises:
        ValueError: No token was counted.
    """
    if not counts.total_tokens:
        raise ValueError("the traces hold no processed token, so there is no overlap to report")
    tokens = np.stack(counts.tokens).astype(np.float64)
    sums = {"random": _expected_of_random(counts)}
    sums |= {name: _measured(one) for name, one in counts.predictors.items()}
    datasets = sorted({dataset for _, dataset in counts.rows})
    per_dataset = {d: int(tokens[[r for (_, n), r in counts.rows.items() if n == d]].sum()) for d in datasets}
    return {
        "tokens": counts.total_tokens,
        "sequences": counts.sequences,
        "groups": len({group for group, _ in counts.rows}),
        "datasets": per_dataset,
        "segments": {name: int(tokens[:, index].sum()) for index, name in enumerate(SEGMENTS)},
        "routing": _routing(counts),
        "predictors": {name: _predictor_entry(counts, one, tokens, datasets) for name, one in sums.items()},
        "gain_over_best_table": _gains(counts, sums, tokens),
    }


def _routing(counts: OverlapCounts) -> dict[str, Any]:
    spec = counts.spec
    unions = [
        {
            "window": window,
            "experts": true / total if total else None,
            "independent": independent_union(spec.num_experts, spec.top_k, window),
        }
        for window, (total, true) in zip(WINDOWS, counts.true_unions.double().tolist(), strict=True)
    ]
    return {
        "layer_indices": list(spec.layer_indices),
        "used": counts.used.tolist(),
        "entropy": normalised_entropy(counts.used).tolist(),
        "unused_experts": (counts.used == 0).sum(-1).tolist(),
        "unions": unions,
    }


def _predictor_entry(counts: OverlapCounts, sums: _Sums, tokens: Array, datasets: Sequence[str]) -> dict[str, Any]:
    spec = counts.spec
    pairs = spec.num_layers * spec.top_k
    at_k = counts.ranks.index(spec.top_k)
    groups = _by_group(counts.rows)
    token_sums = _grouped(tokens.sum(axis=(1, 2)), groups)
    layer_hits = _grouped(sums.layer_hits, groups)
    cells, cell_tokens = _grouped(sums.cell_hits, groups), _grouped(tokens, groups)
    total = float(token_sums.sum())
    rank_hits = layer_hits.sum(axis=(0, 2))
    return {
        "overlap": ratio_interval(layer_hits[:, at_k].sum(axis=1), token_sums * pairs).to_dict(),
        "recall": {
            str(k): None if sums.ranks_only and k > spec.top_k else float(h) / (total * pairs)
            for k, h in zip(counts.ranks, rank_hits[:-1], strict=True)
        },
        "set_exact": float(rank_hits[-1]) / (total * spec.num_layers),
        "unions": sums.unions,
        "calibration_error": sums.calibration_error,
        "reliability": sums.reliability,
        "predicted": sums.predicted,
        "per_layer": [
            ratio_interval(layer_hits[:, at_k, layer], token_sums * spec.top_k).to_dict()
            for layer in range(spec.num_layers)
        ],
        "per_dataset": {d: _dataset_entry(counts, sums, tokens, d).to_dict() for d in datasets},
        "per_segment": _cuts(cells.sum(axis=2), cell_tokens.sum(axis=2) * pairs, SEGMENTS),
        "per_position": _cuts(cells.sum(axis=1), cell_tokens.sum(axis=1) * pairs, POSITION_LABELS),
    }


def _dataset_entry(counts: OverlapCounts, sums: _Sums, tokens: Array, dataset: str) -> Interval:
    groups = _by_group(counts.rows, dataset)
    at_k = counts.ranks.index(counts.spec.top_k)
    hits = _grouped(sums.layer_hits[:, at_k].sum(axis=1), groups)
    pairs = counts.spec.num_layers * counts.spec.top_k
    return ratio_interval(hits, _grouped(tokens.sum(axis=(1, 2)), groups) * pairs)


def _cuts(hits: Array, pairs: Array, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Overlap of every column that has tokens; ``hits`` and ``pairs`` are ``[G, names]``."""
    return {
        name: ratio_interval(hits[:, index], pairs[:, index]).to_dict()
        for index, name in enumerate(names)
        if pairs[:, index].sum() > 0
    }


def _gains(counts: OverlapCounts, sums: dict[str, _Sums], tokens: Array) -> dict[str, dict[str, Any]]:
    at_k = counts.ranks.index(counts.spec.top_k)
    groups = _by_group(counts.rows)
    hits = {name: _grouped(one.layer_hits[:, at_k].sum(axis=1), groups) for name, one in sums.items()}
    tables = [name for name in TABLES if name in hits]
    if not tables:
        return {}
    best = max(tables, key=lambda name: float(hits[name].sum()))
    pairs = _grouped(tokens.sum(axis=(1, 2)), groups) * counts.spec.num_layers * counts.spec.top_k
    return {
        name: {"best_table": best} | paired_difference(hits[name], hits[best], pairs).to_dict()
        for name in hits
        if name not in BASELINES
    }


def used_shares(routing: dict[str, Any], tokens: int) -> torch.Tensor:
    """Share of tokens that use each expert, float64 ``[L, E]``, from the ``routing`` entry of a report."""
    return torch.tensor(routing["used"], dtype=torch.float64) / tokens
