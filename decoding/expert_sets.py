"""Expert sets as masks, and how many experts a set of tokens touches.

Shapes: N tokens or tree nodes, L MoE layers, E routed experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sets_from_ids(experts: Tensor, num_experts: int) -> Tensor:
    """Turn expert ids (int64 ``[N, L, K]``) into a mask (bool ``[N, L, E]``)."""
    size = (*experts.shape[:-1], num_experts)
    return torch.zeros(size, dtype=torch.bool, device=experts.device).scatter_(-1, experts, value=True)


def sets_from_scores(scores: Tensor, top_k: int) -> Tensor:
    """Turn predicted scores (float ``[N, L, E]``) into the mask of the K best experts (bool ``[N, L, E]``)."""
    return sets_from_ids(scores.topk(top_k, dim=-1, sorted=False).indices, scores.shape[-1])


def unique_experts(experts: Tensor, num_experts: int) -> Tensor:
    """Count the distinct experts of all tokens together.

    Args:
        experts: int64 ``[N, L, K]``.
        num_experts: E.

    Returns:
        int64 ``[L]``.
    """
    layers = experts.shape[1]
    touched = torch.zeros(layers, num_experts, dtype=torch.int64, device=experts.device)
    return touched.scatter_(1, experts.transpose(0, 1).reshape(layers, -1), 1).sum(dim=1)
