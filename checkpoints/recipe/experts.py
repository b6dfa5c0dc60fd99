"""A fast CPU forward and backward for a layer of small experts, registered with transformers as ``sorted_linear``.

Tokens are sorted by expert once; every expert then works on one contiguous slice. Indexing ``weight[e]`` under
autograd would allocate a full-size gradient per expert; here the backward writes each gradient into its place.
On two cores this trains at 7,700 tokens/s where ``grouped_mm`` reaches 5,800 (E = 64, K = 4, H = 128, F = 48).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "sorted_linear"


class _GroupedLinear(torch.autograd.Function):
    """``y[rows of e] = x[rows of e] @ weight[e].T`` for rows sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """Take x [S, I], weight [E, O, I] and rows per expert (sum S); return [S, O]."""
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(x.shape[0], weight.shape[1])
        for w, source, out in zip(weight.unbind(0), torch.split(x, counts), torch.split(y, counts), strict=True):
            if len(source):
                torch.mm(source, w.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and weight."""
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        counts = ctx.counts
        parts = zip(
            weight.unbind(0),
            dweight.unbind(0),
            torch.split(x, counts),
            torch.split(dx, counts),
            torch.split(grad, counts),
            strict=True,
        )
        for w, dw, x_e, dx_e, grad_e in parts:
            if len(x_e):
                torch.mm(grad_e, w, out=dx_e)
                torch.mm(grad_e.t(), x_e, out=dw)
        return dx, dweight, None


def _grouped_linear(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    y: Tensor = _GroupedLinear.apply(x, weight, counts)  # type: ignore[no-untyped-call]
    return y


def sorted_linear_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the weighted sum of each token's experts.

    Args:
        experts: Module with ``gate_up_proj`` [E, 2F, H], ``down_proj`` [E, H, F], ``num_experts``, ``act_fn``.
        hidden_states: [N, H].
        top_k_index: [N, K], int64.
        top_k_weights: [N, K].

    Returns:
        [N, H].
    """
    num_tokens, top_k = top_k_index.shape
    expert_of_slot = top_k_index.reshape(-1)
    order = torch.argsort(expert_of_slot, stable=True)
    counts: list[int] = torch.bincount(expert_of_slot, minlength=experts.num_experts).tolist()
    rows = hidden_states.index_select(0, order // top_k)
    gate, up = _grouped_linear(rows, experts.gate_up_proj, counts).chunk(2, dim=-1)
    weights = top_k_weights.reshape(-1).index_select(0, order).unsqueeze(1)
    out = _grouped_linear(experts.act_fn(gate) * up * weights, experts.down_proj, counts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return out.index_select(0, place).view(num_tokens, top_k, -1).sum(dim=1)


def use_sorted_experts(model: nn.Module) -> None:
    """Register the implementation and select it for a transformers MoE model."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, sorted_linear_experts)
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of a linear head without ever holding all logits; gradients are made in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        """Take hidden [N, H], weight [V, H], labels [N]; return the mean loss in nats."""
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for h, dh, y in zip(
            torch.split(hidden, chunk), torch.split(d_hidden, chunk), torch.split(labels, chunk), strict=True
        ):
            log_probs = F.log_softmax(h @ weight.t(), dim=-1)
            total -= log_probs.gather(1, y[:, None]).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, y[:, None], grad.new_full((len(y), 1), -1.0))
            torch.mm(grad, weight, out=dh)
            d_weight.addmm_(grad.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.count = len(labels)
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale the gradients made in the forward."""
        d_hidden, d_weight = ctx.saved_tensors
        scale = grad / ctx.count
        return d_hidden * scale, d_weight * scale, None, None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 1024) -> Tensor:
    """Return the mean cross-entropy in nats of ``hidden @ weight.T`` against `labels`, for training.

    Args:
        hidden: [N, H].
        weight: [V, H], the (tied) head.
        labels: [N], int64.
        chunk: Rows per chunk; 1,024 × 2,048 logits are 8 MB.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk)  # type: ignore[no-untyped-call]
    return loss


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory: returning it costs a page fault per page and step, 10 to 15 % of the time."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another libc: nothing to tune
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
