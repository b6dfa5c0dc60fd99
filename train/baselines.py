"""Fitting the trivial predictors: counts in one pass over flat arrays, at the speed of ``numpy.bincount``.

Shapes: N tokens, V vocabulary, P distinct pairs of consecutive tokens, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ecospec.predictor.baselines import FrequencyPredictor, LastTokenPredictor, RandomPredictor
from ecospec.predictor.bundle_files import PredictorBundle, write_bundle
from ecospec.predictor.overlap import topk_overlap_counts
from ecospec.predictor.table_predictors import BigramTablePredictor, TokenTablePredictor
from ecospec.train.arrays import TraceArrays

#: The baselines that know nothing of the sequence but its last two tokens: what a neural predictor has to beat.
TABLES = ("frequency", "token_table", "bigram_table")
#: Those that `fit_baselines` fits, so worth shipping; random needs no traces.
SAVED = (*TABLES, "last_token")


@dataclass(frozen=True)
class RoutingCounts:
    """How often tokens were routed to experts.

    Attributes:
        frequency: int64 ``[L, E]``, over all tokens.
        token: int32 ``[V, L, E]``, by token.
        pair_keys: int64 ``[P]``, ascending: ``previous * V + token`` of the pairs that occur.
        pair: int16 (int32 where counts need it) ``[P, L, E]``, by pair.
    """

    frequency: npt.NDArray[np.int64]
    token: npt.NDArray[np.int32]
    pair_keys: npt.NDArray[np.int64]
    pair: npt.NDArray[Any]


def count_by(
    keys: npt.NDArray[np.int64], experts: npt.NDArray[Any], num_keys: int, num_experts: int, dtype: Any
) -> Any:
    """Count experts by key, one bincount a layer.

    Args:
        keys: int64 ``[N]``, below ``num_keys``.
        experts: ``[N, L, K]``.
        num_keys: Number of keys.
        num_experts: E.
        dtype: Integer type of the counts; N must fit.

    Returns:
        ``[num_keys, L, E]``.
    """
    num_layers = experts.shape[1]
    counts = np.empty((num_keys, num_layers, num_experts), dtype)
    base = keys[:, None] * num_experts
    for layer in range(num_layers):
        flat = np.bincount((base + experts[:, layer, :]).ravel(), minlength=num_keys * num_experts)
        counts[:, layer, :] = flat.reshape(num_keys, num_experts)
    return counts


def count_routing(arrays: TraceArrays) -> RoutingCounts:
    """Count all that the table predictors need.

    Args:
        arrays: The traces to fit on. The first token of a sequence has no pair.
    """
    spec = arrays.spec
    tokens = arrays.tokens.astype(np.int64)
    token = count_by(tokens, arrays.experts, spec.vocab_size, spec.num_experts, np.int32)
    has_previous = np.ones(len(tokens), dtype=bool)
    has_previous[arrays.offsets[:-1][arrays.lengths > 0]] = False
    places = np.flatnonzero(has_previous)
    pair_keys, index, times = np.unique(
        tokens[places - 1] * spec.vocab_size + tokens[places], return_inverse=True, return_counts=True
    )
    # Two bytes a count halve the largest array of a fit: pairs x layers x experts.
    dtype = np.int16 if times.max(initial=0) <= np.iinfo(np.int16).max else np.int32
    pair = count_by(index.astype(np.int64), arrays.experts[places], len(pair_keys), spec.num_experts, dtype)
    return RoutingCounts(token.sum(axis=0, dtype=np.int64), token, pair_keys, pair)


def training_facts(arrays: TraceArrays) -> dict[str, Any]:
    """What a baseline records of its traces: ``fingerprint``, ``tokens``, ``groups`` and the ``group_ids``."""
    groups = sorted(set(arrays.group_ids))
    return {
        "fingerprint": arrays.fingerprint(),
        "tokens": len(arrays.tokens),
        "groups": len(groups),
        "group_ids": groups,
    }


def fit_baselines(
    arrays: TraceArrays, *, token_shrinkage: float = 1.0, pair_shrinkage: float = 1.0, seed: int = 0
) -> dict[str, PredictorBundle]:
    """Fit every predictor that needs no training on the same traces.

    Args:
        arrays: The traces to fit on.
        token_shrinkage: Occurrences that the frequencies are worth beside a token's own counts.
        pair_shrinkage: Occurrences that the token's row is worth beside a pair's own counts.
        seed: Seed of the random predictor.

    Returns:
        ``random``, ``frequency``, ``token_table``, ``bigram_table``, ``last_token``. All but the first record the
        fingerprint of the traces and, so that a report can rule out a leak, the ids of their groups.
    """
    spec = arrays.spec
    counts = count_routing(arrays)
    data = training_facts(arrays)
    frequency = torch.from_numpy(counts.frequency)
    tokens = TokenTablePredictor.from_counts(
        spec, torch.from_numpy(counts.token), shrinkage=token_shrinkage, training_data=data
    )
    pairs = BigramTablePredictor.from_counts(
        tokens, torch.from_numpy(counts.pair_keys), torch.from_numpy(counts.pair), shrinkage=pair_shrinkage
    )
    return {
        "random": RandomPredictor.create(spec, seed=seed),
        "frequency": FrequencyPredictor.from_counts(spec, frequency, training_data=data),
        "token_table": tokens,
        "bigram_table": pairs,
        "last_token": LastTokenPredictor.from_counts(spec, frequency, training_data=data),
    }


def save_baselines(
    fitted: Mapping[str, PredictorBundle],
    folder: Path,
    *,
    names: Sequence[str] = SAVED,
    compact: bool = True,
    validation: TraceArrays | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Write fitted baselines as bundles.

    On disk, for ``report-overlap --baselines FOLDER``::

        FOLDER/
          frequency/  token_table/  bigram_table/  last_token/  mlp/  random/

    Bundles that are already there are replaced.

    Args:
        fitted: From `fit_baselines`, and ``mlp`` of `ecospec.train.mlp.fit_mlp`.
        folder: Destination.
        names: Which of them to write.
        compact: Reduce tables to rankings, small enough to ship.
        validation: Traces of other groups, on which each one's overlap is measured for its card.
        provenance: Versions, command, commit, for the cards.

    Returns:
        Overlap on ``validation`` by name; empty without it.
    """
    overlaps: dict[str, float] = {}
    for name in names:
        predictor = fitted[name]
        if compact and isinstance(predictor, TokenTablePredictor):
            predictor = predictor.compact()
        metrics = dict(predictor.config.metrics)
        if validation is not None:
            overlaps[name] = metrics["val_overlap"] = mean_overlap(predictor, validation)
            metrics["val_tokens"] = len(validation.tokens)
        config = dataclasses.replace(predictor.config, metrics=metrics, provenance=provenance or {})
        write_bundle(folder / name, config, predictor.bundle_tensors(), overwrite=True)
    return overlaps


def mean_overlap(predictor: PredictorBundle, arrays: TraceArrays) -> float:
    """Top-K overlap of a predictor over all tokens and layers of some traces, between 0 and 1.

    Args:
        predictor: Any predictor of the traces' target.
        arrays: The traces; sequences are scored one by one.
    """
    hits = 0
    for first, last in zip(arrays.offsets[:-1].tolist(), arrays.offsets[1:].tolist(), strict=True):
        if first == last:
            continue
        ids = torch.from_numpy(arrays.tokens[first:last].astype(np.int64))
        experts = torch.from_numpy(arrays.experts[first:last].astype(np.int64))
        hits += int(topk_overlap_counts(predictor.score_sequence(ids, experts), experts).sum())
    return hits / (len(arrays.tokens) * arrays.spec.num_layers * arrays.spec.top_k)


def baseline_overlaps(training: TraceArrays, validation: TraceArrays) -> dict[str, float]:
    """Overlap on ``validation`` of every trivial predictor fitted on ``training``."""
    return {name: mean_overlap(predictor, validation) for name, predictor in fit_baselines(training).items()}


def best_table(overlaps: Mapping[str, float]) -> tuple[str, float]:
    """Name and overlap of the best of `TABLES`."""
    name = max(TABLES, key=lambda table: overlaps[table])
    return name, overlaps[name]
