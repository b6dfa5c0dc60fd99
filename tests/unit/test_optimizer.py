"""MuonAdamW against torch's own Muon and AdamW."""

import pytest
import torch
from torch import nn

from ecospec.train.optimizer import MuonAdamW, orthogonalised


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((6, 4), (4, 9), (5, 3), (7,))]


def run(parameters, optimizers, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def groups_of(p):
    return [
        {"params": p[:2], "lr": 0.02, "weight_decay": 0.1, "muon": True},
        {"params": p[2:3], "lr": 1e-3, "weight_decay": 0.1, "muon": False},
        {"params": p[3:], "lr": 1e-3, "weight_decay": 0.0, "muon": False},
    ]


def test_equals_the_optimisers_of_torch():
    mine = make_parameters()
    run(mine, [MuonAdamW(groups_of(mine))])
    theirs = make_parameters()
    adam = [{"params": theirs[2:3], "weight_decay": 0.1}, {"params": theirs[3:], "weight_decay": 0.0}]
    run(
        theirs,
        [
            torch.optim.Muon(theirs[:2], lr=0.02, weight_decay=0.1, momentum=0.95),
            torch.optim.AdamW(adam, lr=1e-3, betas=(0.9, 0.98)),
        ],
    )
    for a, b in zip(mine[2:], theirs[2:], strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, atol=3e-3, rtol=0)  # torch orthogonalises in bfloat16


def test_state_survives_a_checkpoint():
    whole = make_parameters()
    expected = run(whole, [MuonAdamW(groups_of(whole))], steps=6)

    generator = torch.Generator().manual_seed(1)
    parts = make_parameters()
    optimizer = MuonAdamW(groups_of(parts))
    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = MuonAdamW(groups_of(parts))
            optimizer.load_state_dict(state)
        for parameter in parts:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for a, b in zip(parts, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(20, 8), (8, 20), (12, 12)])
def test_orthogonalised_keeps_directions_and_levels_sizes(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ orthogonalised(matrix) @ right.T
    sizes = inner.diagonal()
    assert sizes.min() > 0.3
    assert sizes.max() < 1.3
    torch.testing.assert_close(inner, torch.diag(sizes), atol=1e-4, rtol=0)


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="Muon moves matrices only"):
        MuonAdamW([{"params": [nn.Parameter(torch.zeros(3))], "lr": 0.1, "weight_decay": 0.0, "muon": True}])
