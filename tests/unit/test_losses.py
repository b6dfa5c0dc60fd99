"""The losses against dense targets and scikit-learn, and the schedule."""

import math

import pytest
import torch
from sklearn.metrics import log_loss
from torch.utils._python_dispatch import TorchDispatchMode

from ecospec.train.losses import (
    objective_loss,
    router_weighted_cross_entropy,
    selected_expert_bce,
    selected_expert_cross_entropy,
)
from ecospec.train.schedule import learning_rate_factor

T, L, E, K = 7, 3, 8, 2


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, T, L, E, dtype=torch.float64, generator=generator)
    experts = torch.rand(2, T, L, E, generator=generator).topk(K).indices.sort().values.to(torch.uint8)
    return scores, experts


def dense_loss(scores, experts):
    target = torch.zeros_like(scores).scatter_(-1, experts.long(), 1 / K)
    return -(target * scores.log_softmax(-1)).sum(-1)  # [B, T, L]


def test_equals_cross_entropy_with_dense_targets(batch):
    scores, experts = batch
    torch.testing.assert_close(selected_expert_cross_entropy(scores, experts), dense_loss(scores, experts).mean())
    reference = torch.nn.functional.cross_entropy(
        scores.reshape(-1, E),
        torch.zeros(2 * T * L, E, dtype=torch.float64).scatter_(1, experts.long().view(-1, K), 1 / K),
    )
    torch.testing.assert_close(selected_expert_cross_entropy(scores, experts), reference)


def test_mask_leaves_out_padding(batch):
    scores, experts = batch
    mask = torch.arange(T) < torch.tensor([[T], [3]])
    expected = dense_loss(scores, experts).mean(-1)[mask].mean()
    torch.testing.assert_close(selected_expert_cross_entropy(scores, experts, mask), expected)
    scores = scores.clone().masked_fill_(~mask[..., None, None], 1e4)
    torch.testing.assert_close(selected_expert_cross_entropy(scores, experts, mask), expected)


def test_gradient_equals_softmax_minus_target(batch):
    scores, experts = batch
    scores = scores.clone().requires_grad_()
    selected_expert_cross_entropy(scores, experts).backward()
    target = torch.zeros_like(scores).scatter_(-1, experts.long(), 1 / K)
    expected = (scores.softmax(-1) - target).detach() / (2 * T * L)
    torch.testing.assert_close(scores.grad, expected)


def test_minimum_is_log_k_and_uniform_is_log_e(batch):
    _, experts = batch
    perfect = torch.zeros(2, T, L, E, dtype=torch.float64).scatter_(-1, experts.long(), 50.0)
    assert selected_expert_cross_entropy(perfect, experts).item() == pytest.approx(math.log(K))
    assert selected_expert_cross_entropy(torch.zeros_like(perfect), experts).item() == pytest.approx(math.log(E))


def test_half_precision_scores_are_reduced_in_float32(batch):
    scores, experts = batch
    low = scores.to(torch.bfloat16)
    loss = selected_expert_cross_entropy(low, experts)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, selected_expert_cross_entropy(low.float(), experts))


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, T, L, K, generator=generator).half() * 3  # not normalised


def test_bce_equals_scikit_learns_log_loss(batch):
    scores, experts = batch
    used = torch.zeros_like(scores).scatter_(-1, experts.long(), 1.0).flatten()
    expected = log_loss(used.numpy(), scores.sigmoid().flatten().numpy())
    assert selected_expert_bce(scores, experts).item() == pytest.approx(expected)
    mask = torch.arange(T) < torch.tensor([[T], [3]])
    dense = torch.nn.functional.binary_cross_entropy_with_logits(scores, used.view_as(scores), reduction="none")
    torch.testing.assert_close(selected_expert_bce(scores, experts, mask), dense.mean((-2, -1))[mask].mean())


def test_router_weighted_equals_cross_entropy_with_the_normalised_weights(batch, weights):
    scores, experts = batch
    mass = weights.double() / weights.double().sum(-1, keepdim=True)
    target = torch.zeros_like(scores).scatter_(-1, experts.long(), mass)
    dense = -(target * scores.log_softmax(-1)).sum(-1).mean(-1)
    torch.testing.assert_close(router_weighted_cross_entropy(scores, experts, weights), dense.mean())
    mask = torch.arange(T) < torch.tensor([[T], [3]])
    weights[~mask] = 0  # as padding has it
    torch.testing.assert_close(router_weighted_cross_entropy(scores, experts, weights, mask), dense[mask].mean())
    equal = router_weighted_cross_entropy(scores, experts, torch.ones_like(weights))
    torch.testing.assert_close(equal, selected_expert_cross_entropy(scores, experts))
    torch.testing.assert_close(router_weighted_cross_entropy(scores, experts, torch.zeros_like(weights)), equal)


def test_router_weighted_takes_weights_with_their_experts(batch, weights):
    scores, experts = batch
    order = torch.tensor([1, 0])
    expected = router_weighted_cross_entropy(scores, experts, weights)
    swapped = router_weighted_cross_entropy(scores, experts[..., order], weights[..., order])
    torch.testing.assert_close(swapped, expected)
    assert not torch.isclose(router_weighted_cross_entropy(scores, experts, weights[..., order]), expected)


def test_objectives_by_name(batch, weights):
    scores, experts = batch
    mask = torch.arange(T) < torch.tensor([[T], [3]])
    whole = {"experts": experts, "mask": mask, "weights": weights}
    for name, expected in (
        ("cross_entropy", selected_expert_cross_entropy(scores, experts, mask)),
        ("bce", selected_expert_bce(scores, experts, mask)),
        ("router_weighted", router_weighted_cross_entropy(scores, experts, weights, mask)),
    ):
        assert torch.equal(objective_loss(name, scores, whole), expected)


class _Sizes(TorchDispatchMode):
    """Counts results as large as the scores."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) and result.numel() >= self.size and not result._is_view()
        return result


@pytest.mark.parametrize(("name", "allowed"), [("cross_entropy", 0), ("router_weighted", 0), ("bce", 1)])
def test_no_dense_target_is_built(name, allowed):
    """Results as large as the scores: none; but for bce one, the softplus."""
    scores = torch.randn(4, 5, 64)
    experts = torch.rand(4, 5, 64).topk(2).indices
    batch = {"experts": experts, "mask": torch.ones(4, dtype=torch.bool), "weights": torch.rand(4, 5, 2)}
    with _Sizes(scores.numel()) as sizes:
        objective_loss(name, scores, batch)
    assert sizes.count <= allowed


def test_schedule_rises_then_falls_to_zero():
    factors = [learning_rate_factor(step / 100, 0.1) for step in range(101)]
    assert factors[10] == 1.0
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == 0.0
    assert learning_rate_factor(1.7, 0.1) == 0.0
    assert learning_rate_factor(0.0, 0.0) == 1.0


def test_more_cycles_continue_a_schedule_exactly():
    once = [learning_rate_factor((epoch + 0.3) / 5, 0.1) for epoch in range(5)]
    twice = [learning_rate_factor((epoch + 0.3) / 10, 0.1, cycles=2) for epoch in range(10)]
    assert twice[:5] == once
    assert twice[5:] == pytest.approx(once)
