"""The training objectives: pure functions of scores and executed experts.

None of them builds a dense target, or a second copy of the scores that outlives the call.

Shapes: T tokens (any leading axes), L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec.train.config import Objective


def objective_loss(objective: str, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Loss of a batch under one of the objectives.

    Args:
        objective: See `ecospec.train.config.Objective`.
        scores: Float ``[B, T, L, E]``.
        batch: With ``experts``, ``mask`` and, for ``router_weighted``, ``weights``; see `ecospec.train.data`.

    Returns:
        Scalar, float32 or wider.
    """
    experts, mask = batch["experts"], batch["mask"]
    if objective == Objective.BCE:
        return selected_expert_bce(scores, experts, mask)
    if objective == Objective.ROUTER_WEIGHTED:
        return router_weighted_cross_entropy(scores, experts, batch["weights"], mask)
    return selected_expert_cross_entropy(scores, experts, mask)


def selected_expert_cross_entropy(scores: Tensor, experts: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy against equal mass 1/K on the K selected experts (the paper's loss).

    ``-(1/K) Σ_k log softmax(scores)[e_k]``, written as ``logsumexp(scores) - mean_k scores[e_k]``.

    Args:
        scores: Float ``[..., T, L, E]``, unnormalised.
        experts: Integer ``[..., T, L, K]``, distinct ids below E; uint8 is widened here.
        mask: Bool ``[..., T]``, true where a token counts; None counts all.

    Returns:
        Scalar, float32 or wider: the mean over counted tokens and layers, in nats. Its minimum is log K.
    """
    wide = _wide(scores)
    chosen = wide.gather(-1, experts.long()).mean(dim=-1)
    return _mean(wide.logsumexp(dim=-1) - chosen, mask)


def router_weighted_cross_entropy(
    scores: Tensor, experts: Tensor, weights: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Cross-entropy against the weights that the experts' outputs were combined with.

    Args:
        scores: Float ``[..., T, L, E]``, unnormalised.
        experts: Integer ``[..., T, L, K]``, distinct ids below E.
        weights: Float ``[..., T, L, K]``, at least 0, aligned with ``experts``; renormalised here to sum to 1.
            Where all are 0 the mass is equal.
        mask: Bool ``[..., T]``, true where a token counts; None counts all.

    Returns:
        Scalar, float32 or wider: the mean over counted tokens and layers, in nats. Its minimum is the mean entropy
        of the normalised weights.
    """
    wide = _wide(scores)
    mass = weights.to(wide.dtype)
    total = mass.sum(dim=-1, keepdim=True)
    mass = torch.where(total > 0, mass / total.clamp_min(torch.finfo(wide.dtype).tiny), 1 / experts.shape[-1])
    chosen = (wide.gather(-1, experts.long()) * mass).sum(dim=-1)
    return _mean(wide.logsumexp(dim=-1) - chosen, mask)


def selected_expert_bce(scores: Tensor, experts: Tensor, mask: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of every expert: selected or not.

    ``softplus(s) - s·[selected]``, summed over the experts as ``Σ_e softplus(s_e) - Σ_k s[e_k]``.

    Args:
        scores: Float ``[..., T, L, E]``, logits.
        experts: Integer ``[..., T, L, K]``, distinct ids below E.
        mask: Bool ``[..., T]``, true where a token counts; None counts all.

    Returns:
        Scalar, float32 or wider: the mean over counted tokens, layers and experts, in nats.
    """
    wide = _wide(scores)
    chosen = wide.gather(-1, experts.long()).sum(dim=-1)
    return _mean((F.softplus(wide).sum(dim=-1) - chosen) / scores.shape[-1], mask)


def _wide(scores: Tensor) -> Tensor:
    """At least float32: sums over hundreds of experts need it."""
    return scores.float() if scores.dtype.itemsize < 4 else scores


def _mean(loss: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of ``[..., T, L]`` over layers and counted tokens."""
    loss = loss.mean(dim=-1)
    if mask is None:
        return loss.mean()
    # Multiplication, not indexing: boolean indexing would synchronise with the device.
    weight = mask.to(loss.dtype)
    return (loss * weight).sum() / weight.sum().clamp_min(1)
