"""Metrics against literal NumPy and scikit-learn computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import recall_score

from ecospec.eval import metrics
from ecospec.predictor import calibration
from ecospec.predictor.overlap import topk_overlap_counts

T, L, E, K = 37, 3, 16, 4


@pytest.fixture
def sample():
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(T, L, E, generator=generator)
    experts = (scores + torch.randn(T, L, E, generator=generator)).topk(K, dim=-1).indices.sort(-1).values
    return scores, experts


def _sets(ids):
    return [[set(row.tolist()) for row in token] for token in np.asarray(ids)]


def test_membership_and_its_refusal():
    found = metrics.membership(torch.tensor([[0, 3], [1, 2]], dtype=torch.uint8), 4)
    assert found.tolist() == [[True, False, False, True], [False, True, True, False]]
    with pytest.raises(ValueError, match="in 0 … 3, got 0 … 4"):
        metrics.membership(torch.tensor([[0, 4]]), 4)


def test_hits_against_python_sets(sample):
    scores, experts = sample
    ranks = [1, 3, K, 2 * K]
    hits = metrics.hits_at_ranks(scores.topk(2 * K, dim=-1).indices, experts, ranks)
    order = np.argsort(-scores.numpy(), axis=-1)
    true = _sets(experts)
    for column, rank in enumerate(ranks):
        expected = [[len(set(order[t, i, :rank]) & true[t][i]) for i in range(L)] for t in range(T)]
        assert hits[..., column].tolist() == expected
    assert torch.equal(hits[..., 2], topk_overlap_counts(scores, experts))
    with pytest.raises(ValueError, match="in 1 … 4, got"):
        metrics.hits_at_ranks(scores.topk(4, dim=-1).indices, experts, [5])


def test_overlap_is_the_recall_of_scikit_learn(sample):
    scores, experts = sample
    true = metrics.membership(experts, E)
    hits = metrics.hits_at_ranks(scores.topk(K, dim=-1).indices, experts, [K])
    predicted = metrics.membership(scores.topk(K, dim=-1).indices, E)
    expected = recall_score(true.reshape(-1, E).numpy(), predicted.reshape(-1, E).numpy(), average="samples")
    assert float((hits / K).mean()) == pytest.approx(expected)


@pytest.mark.parametrize("window", [1, 2, 4, T])
def test_union_sizes_against_python_sets(sample, window):
    scores, experts = sample
    predicted_ids = scores.topk(K, dim=-1).indices
    predicted, true, common = metrics.union_sizes(
        metrics.membership(predicted_ids, E), metrics.membership(experts, E), window
    )
    ours, theirs = _sets(predicted_ids), _sets(experts)
    for start in range(T - window + 1):
        for layer in range(L):
            a = set().union(*(ours[t][layer] for t in range(start, start + window)))
            b = set().union(*(theirs[t][layer] for t in range(start, start + window)))
            found = tuple(int(x[start, layer]) for x in (predicted, true, common))
            assert found == (len(a), len(b), len(a & b))
    assert predicted.shape == (T - window + 1, L)


def test_union_sizes_edges(sample):
    _, experts = sample
    sets = metrics.membership(experts, E)
    assert all(part.shape == (0, L) for part in metrics.union_sizes(sets, sets, T + 1))
    with pytest.raises(ValueError, match="at least 1 token"):
        metrics.union_sizes(sets, sets, 0)
    with pytest.raises(ValueError, match="shapes differ"):
        metrics.union_sizes(sets, sets[1:], 2)


def test_independent_union_against_simulation():
    generator = np.random.default_rng(0)
    sizes = [
        len(set().union(*(generator.choice(E, K, replace=False).tolist() for _ in range(4)))) for _ in range(4000)
    ]
    assert metrics.independent_union(E, K, 4) == pytest.approx(np.mean(sizes), abs=0.1)


def test_marginal_probabilities(sample):
    scores, _ = sample
    exponentials = np.exp(scores.double().numpy())
    expected = np.minimum(1.0, K * exponentials / exponentials.sum(-1, keepdims=True))
    assert calibration.marginal_probabilities(scores, K).numpy() == pytest.approx(expected, abs=1e-5)


def test_calibration_against_scikit_learn(sample):
    scores, experts = sample
    probabilities = calibration.marginal_probabilities(scores, K)
    outcomes = metrics.membership(experts, E)
    counts = calibration.calibration_counts(probabilities, outcomes, bins=10)
    share, mean = calibration_curve(outcomes.reshape(-1).numpy(), probabilities.reshape(-1).numpy(), n_bins=10)
    filled = counts[:, 0] > 0
    assert (counts[filled, 1] / counts[filled, 0]).numpy() == pytest.approx(mean, abs=1e-6)
    assert (counts[filled, 2] / counts[filled, 0]).numpy() == pytest.approx(share, abs=1e-6)
    weights = (counts[filled, 0] / counts[:, 0].sum()).numpy()
    assert calibration.expected_calibration_error(counts) == pytest.approx(
        float((weights * abs(share - mean)).sum())
    )


def test_calibration_sums_add_up_and_edges(sample):
    scores, experts = sample
    probabilities, outcomes = calibration.marginal_probabilities(scores, K), metrics.membership(experts, E)
    whole = calibration.calibration_counts(probabilities, outcomes)
    parts = sum(
        calibration.calibration_counts(probabilities[s], outcomes[s]) for s in (slice(0, 9), slice(9, None))
    )
    assert torch.allclose(whole, torch.as_tensor(parts))
    certain = calibration.calibration_counts(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
    assert calibration.expected_calibration_error(certain) == 0.0
    assert math.isnan(calibration.expected_calibration_error(torch.zeros(15, 3)))
    with pytest.raises(ValueError, match="shapes differ"):
        calibration.calibration_counts(torch.zeros(2), torch.zeros(3, dtype=torch.bool))


def test_normalised_entropy():
    counts = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0]])
    assert metrics.normalised_entropy(counts).tolist() == pytest.approx([1.0, 0.0, 0.5])
