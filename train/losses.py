"""The training objective: a pure function of scores and executed experts.

Shapes: T tokens (any leading axes), L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from torch import Tensor


def selected_expert_cross_entropy(scores: Tensor, experts: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy against equal mass 1/K on the K selected experts (the paper's loss).

    ``-(1/K) Σ_k log softmax(scores)[e_k]``, written as ``logsumexp(scores) - mean_k scores[e_k]`` so that no dense
    target and no normalised copy of the scores is ever stored.

    Args:
        scores: Float ``[..., T, L, E]``, unnormalised.
        experts: Integer ``[..., T, L, K]``, distinct ids below E; uint8 is widened here.
        mask: Bool ``[..., T]``, true where a token counts; None counts all.

    Returns:
        Scalar, float32 or wider: the mean over counted tokens and layers, in nats. Its minimum is log K.
    """
    wide = scores.float() if scores.dtype.itemsize < 4 else scores
    chosen = wide.gather(-1, experts.long()).mean(dim=-1)
    loss = (wide.logsumexp(dim=-1) - chosen).mean(dim=-1)
    if mask is None:
        return loss.mean()
    # Multiplication, not indexing: boolean indexing would synchronise with the device.
    weight = mask.to(loss.dtype)
    return (loss * weight).sum() / weight.sum().clamp_min(1)
