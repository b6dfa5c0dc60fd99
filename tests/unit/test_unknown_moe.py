"""MoE blocks that the library has never seen, defined here: found and recorded without editing it."""

import pytest
import torch
from torch import nn

from ecospec.trace_collection.hooks import RoutingRecorder
from tests.moe_fakes import ids, qwen3


class StackedExperts(nn.Module):
    """Undecorated, says nothing about itself."""

    def __init__(self, experts=8, hidden=32, width=16):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)

    def forward(self, hidden, chosen, mix):
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            value = (hidden[row] @ self.up[expert].T).relu() @ self.down[expert].T
            out.index_add_(0, row, value * mix[row, slot, None])
        return out


class BlockWithStackedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.chooser = nn.Linear(32, 8, bias=False)
        self.pool = StackedExperts()

    def forward(self, hidden):
        flat = hidden.view(-1, 32)
        mix, chosen = self.chooser(flat).sigmoid().topk(2, dim=-1)
        return self.pool(flat, chosen, mix).view_as(hidden)


class BlockWithExpertList(nn.Module):
    """Every expert a module, the choice in the block's own code."""

    skip_top_k = False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32)) for _ in range(8)
        )

    def forward(self, hidden):
        flat = hidden.reshape(-1, 32)
        mix, chosen = torch.topk(self.gate(flat), 2, dim=-1)
        if self.skip_top_k:
            chosen = (chosen + 1) % 8
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            out.index_add_(0, row, expert(flat[row]) * mix.softmax(-1)[row, slot, None])
        return out.view_as(hidden)


class BlockInOnePiece(nn.Module):
    """Router and expert weights in one module, which computes all experts."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(32, 8, bias=False)
        self.w_in = nn.Parameter(torch.randn(8, 32, 16) * 0.2)
        self.w_out = nn.Parameter(torch.randn(8, 16, 32) * 0.2)

    def forward(self, hidden):
        flat = hidden.reshape(-1, 32)
        scores = self.route(flat)
        _, chosen = scores.topk(2, -1)
        mix = torch.zeros_like(scores).scatter(1, chosen, 0.5)
        every = torch.einsum("nh,ehf->nef", flat, self.w_in).relu()
        return torch.einsum("nef,efh,ne->nh", every, self.w_out, mix).view_as(hidden)


def with_blocks(make):
    torch.manual_seed(0)
    model = qwen3().eval()
    for layer in model.model.layers:
        layer.mlp = make()
    return model.eval()


@pytest.mark.parametrize(
    ("make", "source"),
    [(BlockWithStackedExperts, "experts"), (BlockWithExpertList, "topk"), (BlockInOnePiece, "topk")],
)
def test_an_unknown_block_is_recorded_without_editing_the_library(make, source):
    model = with_blocks(make)
    inputs = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: inputs.append((module, args[0].detach().clone())))
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(ids())
        assert recorder.source == source
        model(ids(seed=1))
        recorded = recorder.last_experts
    for slot, (block, hidden) in enumerate(inputs[3:]):
        router = next(module for module in block.modules() if isinstance(module, nn.Linear))
        truth = (hidden.reshape(-1, 32) @ router.weight.T).argsort(dim=-1)[:, -2:].sort(dim=-1).values
        assert torch.equal(recorded[:, slot], truth)


def test_a_top_k_that_the_experts_do_not_follow_is_refused():
    model = with_blocks(BlockWithExpertList)
    model.model.layers[2].mlp.skip_top_k = True
    with (
        torch.no_grad(),
        RoutingRecorder(model) as recorder,
        pytest.raises(ValueError, match=r"experts of layer 2 ran .* the choice inside this block is not what it"),
    ):
        model(ids())
    with pytest.raises(ValueError, match="no forward was recorded"):
        recorder.take()


def test_a_failing_block_leaves_no_watcher_behind():
    model = with_blocks(BlockWithExpertList)
    model.model.layers[1].mlp.experts[0].forward = lambda hidden: 1 / 0
    with RoutingRecorder(model), pytest.raises(ZeroDivisionError):
        model(ids())
    assert torch.overrides._get_current_function_mode_stack() == []


def test_choices_show_no_weights():
    model = with_blocks(BlockWithExpertList)
    with (
        RoutingRecorder(model, source="topk", weights=True),
        pytest.raises(ValueError, match="topk of layer 0 shows no weights beside its index; record with"),
    ):
        model(ids())
