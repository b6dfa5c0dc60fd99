"""Counting against a literal loop, and the predictors fitted from the counts against their definition."""

from collections import Counter

import numpy as np
import pytest
import torch

from ecospec.predictor.overlap import overlap_counts, topk_overlap_counts
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.arrays import TraceArrays
from ecospec.train.baselines import (
    TABLES,
    baseline_overlaps,
    best_table,
    count_routing,
    fit_baselines,
    mean_overlap,
)
from ecospec.train.metrics import TopKOverlap

VOCAB, LAYERS, EXPERTS, TOP_K = 12, 2, 8, 3
SPEC = RoutingSpec(LAYERS, (0, 1), EXPERTS, TOP_K, VOCAB, "a" * 64, "test", "b" * 64)


def make_arrays(lengths, seed):
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    tokens = rng.integers(0, VOCAB - 2, total, dtype=np.int32)  # the last two tokens never occur
    cells = np.tile(np.arange(EXPERTS, dtype=np.uint8), (total, LAYERS, 1))
    noise = rng.random(cells.shape) + 2 * (
        (cells + tokens[:, None, None]) % EXPERTS < 2
    )  # two experts go with the token
    experts = np.sort(np.argsort(-noise, axis=-1)[..., :TOP_K], axis=-1).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    names = tuple(f"g{i}" for i in range(len(lengths)))
    return TraceArrays(SPEC, tokens, experts, offsets, names, names)


@pytest.fixture(scope="module")
def arrays():
    return make_arrays([30, 0, 1, 200], 0)


def test_counts_equal_a_literal_loop(arrays):
    counts = count_routing(arrays)
    frequency: Counter[tuple[int, int]] = Counter()
    token: Counter[tuple[int, int, int]] = Counter()
    pair: Counter[tuple[int, int, int]] = Counter()
    for first, last in zip(arrays.offsets[:-1], arrays.offsets[1:], strict=True):
        for place in range(first, last):
            for layer in range(LAYERS):
                for expert in arrays.experts[place, layer].tolist():
                    frequency[layer, expert] += 1
                    token[arrays.tokens[place], layer, expert] += 1
                    if place > first:
                        key = int(arrays.tokens[place - 1]) * VOCAB + int(arrays.tokens[place])
                        pair[key, layer, expert] += 1
    assert {k: counts.frequency[k] for k in frequency} == frequency
    assert counts.frequency.sum() == sum(frequency.values())
    assert {k: counts.token[k] for k in token} == token
    assert counts.token.sum() == sum(token.values())
    row = {key: index for index, key in enumerate(counts.pair_keys.tolist())}
    assert {k: counts.pair[row[k[0]], k[1], k[2]] for k in pair} == pair
    assert counts.pair.sum() == sum(pair.values())
    assert (np.diff(counts.pair_keys) > 0).all()


def test_tables_are_shrunk_counts_with_back_off(arrays):
    counts = count_routing(arrays)
    fitted = fit_baselines(arrays, token_shrinkage=2.0, pair_shrinkage=0.5)
    assert set(fitted) == {"random", "frequency", "token_table", "bigram_table", "last_token"}
    prior = counts.frequency / counts.frequency.sum(-1, keepdims=True)
    times = counts.token[:, 0].sum(-1)[:, None, None] / TOP_K
    token = (counts.token / TOP_K + 2.0 * prior) / (times + 2.0)
    ids = torch.from_numpy(arrays.tokens[:30].astype(np.int64))
    scores = fitted["token_table"].score_sequence(ids).exp()
    np.testing.assert_allclose(scores, token[ids], atol=2e-3)
    unseen = fitted["token_table"].score_sequence(torch.tensor([VOCAB - 1])).exp()
    np.testing.assert_allclose(unseen[0], prior, atol=2e-3)
    scores = fitted["bigram_table"].score_sequence(ids).exp()
    np.testing.assert_allclose(scores[0], token[ids[0]], atol=2e-3)  # no previous token: backs off
    key = int(ids[3]) * VOCAB + int(ids[4])
    pair = counts.pair[np.searchsorted(counts.pair_keys, key)]
    expected = (pair / TOP_K + 0.5 * token[ids[4]]) / (pair[0].sum() / TOP_K + 0.5)
    np.testing.assert_allclose(scores[4], expected, atol=2e-3)


def test_overlaps_rank_the_baselines_as_the_data_do(arrays):
    held_out = make_arrays([300], 1)
    overlaps = baseline_overlaps(arrays, held_out)
    assert overlaps["random"] == pytest.approx(TOP_K / EXPERTS, abs=0.05)
    assert overlaps["token_table"] > overlaps["frequency"] + 0.2
    name, value = best_table(overlaps)
    assert name in TABLES
    assert value == max(overlaps[table] for table in TABLES)


def test_mean_overlap_equals_numpy(arrays):
    predictor = fit_baselines(arrays)["token_table"]
    hits = total = 0
    for first, last in zip(arrays.offsets[:-1], arrays.offsets[1:], strict=True):
        if first == last:
            continue
        scores = predictor.score_sequence(torch.from_numpy(arrays.tokens[first:last].astype(np.int64))).numpy()
        predicted = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K]
        for mine, true in zip(
            predicted.reshape(-1, TOP_K), arrays.experts[first:last].reshape(-1, TOP_K), strict=True
        ):
            hits += len(set(mine.tolist()) & set(true.tolist()))
            total += TOP_K
    assert mean_overlap(predictor, arrays) == pytest.approx(hits / total, abs=2e-3)  # ties of float16 rows


def test_overlap_counts_equal_set_intersections():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(50, LAYERS, EXPERTS, generator=generator).topk(4).indices
    true = torch.rand(50, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices
    expected = [
        [np.intersect1d(p, t).size for p, t in zip(ps, ts, strict=True)]
        for ps, ts in zip(predicted, true, strict=True)
    ]
    assert overlap_counts(predicted, true).tolist() == expected
    scores = torch.rand(50, LAYERS, EXPERTS, generator=generator)
    best = scores.numpy().argsort(-1)[..., -TOP_K:]
    expected = [
        [np.intersect1d(p, t).size for p, t in zip(ps, ts, strict=True)]
        for ps, ts in zip(best, true.numpy(), strict=True)
    ]
    assert topk_overlap_counts(scores, true).tolist() == expected


def test_metric_accumulates_batches_without_padding():
    generator = torch.Generator().manual_seed(0)
    metric = TopKOverlap(LAYERS, TOP_K)
    hits = torch.zeros(LAYERS)
    for _ in range(3):
        scores = torch.rand(2, 7, LAYERS, EXPERTS, generator=generator)
        experts = torch.rand(2, 7, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.uint8)
        mask = torch.arange(7) < torch.tensor([[7], [4]])
        metric.update(scores, experts, mask)
        hits += topk_overlap_counts(scores, experts)[mask].sum(0)
    torch.testing.assert_close(metric.compute(), hits / (3 * 11 * TOP_K))
