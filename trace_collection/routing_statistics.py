"""Pure functions about how a target spreads its tokens over its experts.

Shapes: N tokens, P pairs of tokens, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ecospec.trace_collection.records import Experts

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def expert_counts(experts: Experts, num_experts: int) -> Counts:
    """How often each layer used each expert.

    Args:
        experts: ``[N, L, K]``.
        num_experts: E; ids from E on are not counted.

    Returns:
        int64 ``[L, E]``.
    """
    layers = experts.shape[1]
    counts = np.zeros((layers, num_experts), np.int64)
    for layer in range(layers):
        found = np.bincount(experts[:, layer].reshape(-1), minlength=num_experts)
        counts[layer] = found[:num_experts]
    return counts


def usage_entropy(counts: Counts) -> Floats:
    """Shannon entropy of expert usage, in bits.

    Args:
        counts: ``[L, E]`` from `expert_counts`.

    Returns:
        float64 ``[L]``, from 0 (one expert does everything) to log2 E (all are used alike); 0 without tokens.

    >>> usage_entropy(np.array([[5, 5, 0, 0], [1, 1, 1, 1]]))
    array([1., 2.])
    """
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return np.asarray(-(shares * np.log2(np.where(shares > 0, shares, 1))).sum(-1) + 0.0)


def effective_experts(counts: Counts) -> Floats:
    """Effective number of experts: how many, used alike, would have the same `usage_entropy`; ``[L]``.

    >>> effective_experts(np.array([[5, 5, 0, 0], [1, 1, 1, 1]]))
    array([2., 4.])
    """
    return np.asarray(2.0 ** usage_entropy(counts))


def same_token_pairs(tokens: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs of neighbouring occurrences of one token id.

    Args:
        tokens: ``[N]``.

    Returns:
        Two int64 ``[P]`` of places in ``tokens``.

    >>> same_token_pairs(np.array([7, 8, 7, 7], np.int32))
    (array([0, 2]), array([2, 3]))
    """
    order = np.argsort(tokens, kind="stable")
    same = tokens[order[:-1]] == tokens[order[1:]]
    return order[:-1][same], order[1:][same]


def shared_experts(first: Experts, second: Experts) -> Floats:
    """Mean number of experts that two tokens have in common; ``[P, L, K]`` twice to float64 ``[L]``."""
    return np.asarray((first[..., :, None] == second[..., None, :]).sum((-1, -2)).mean(0))


def beyond_chance(shared: Floats, counts: Counts, top_k: int) -> Floats:
    """How far shared experts exceed what independent tokens with this usage share: 0 chance, 1 always the same.

    Two independent tokens share ``sum_e q_e**2`` experts, where expert e is in a token's set with probability q_e.

    Args:
        shared: ``[L]`` from `shared_experts`.
        counts: ``[L, E]`` from `expert_counts`.
        top_k: K.

    Returns:
        float64 ``[L]``; NaN in a layer that always uses the same experts, where the question has no answer.
    """
    chosen = counts * top_k / np.maximum(counts.sum(-1, keepdims=True), 1)
    chance = (chosen**2).sum(-1)
    room = top_k - chance
    return np.asarray(np.where(room > 1e-9, (shared - chance) / np.where(room > 1e-9, room, 1), np.nan))


def set_entropy(experts: Experts, num_experts: int) -> tuple[float, float]:
    """Zero-order entropy of one layer's sets of experts, in bits per token: two estimates of it.

    The plug-in estimate is the entropy of the observed frequencies. It is too low where sets are rare (never above
    log2 N); the estimate of Chao and Shen (2003, doi:10.1023/A:1026096204727) corrects for sets that were not seen.

    Args:
        experts: ``[N, K]``, one layer, ids ascending.
        num_experts: E; ``E**K`` must stay below ``2**63``.

    Returns:
        Plug-in and Chao-Shen estimate.

    >>> set_entropy(np.repeat(np.array([[0, 1], [2, 3]], np.uint8), 50, axis=0), 4)
    (1.0, 1.0)
    """
    codes = np.zeros(len(experts), np.int64)
    for place in range(experts.shape[1]):
        codes = codes * num_experts + experts[:, place]
    counts = np.unique(codes, return_counts=True)[1]
    total = counts.sum()
    shares = counts / total
    plug_in = -(shares * np.log2(shares)).sum() + 0.0
    singles = min(int((counts == 1).sum()), int(total) - 1)  # all sets seen once: coverage would be 0
    covered = (1 - singles / total) * shares
    chao_shen = -(covered * np.log2(covered) / -np.expm1(total * np.log1p(-covered))).sum() + 0.0
    return float(plug_in), float(chao_shen)
