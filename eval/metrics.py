"""Metrics of expert prediction as pure functions on tensors.

Legend: T tokens, L MoE layers, E experts, K top-k, n window length. ``...`` stands for any leading axes, usually
``[T, L]``. The *predicted set* at rank k' is the k' experts with the highest scores; the *true set* is the K
experts the target used.

- top-K overlap = |predicted top-K ∩ true| / K (`ecospec.predictor.overlap`);
- recall@k' = |predicted top-k' ∩ true| / K (`hits_at_ranks`);
- set-exact = all K predicted experts are the true ones: hits at rank K equal K;
- union error: size of the predicted against the true union of n consecutive tokens (`union_sizes`);
- expected calibration error of the probabilities that an expert is used (`ecospec.predictor.calibration`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ecospec.predictor.overlap import overlap_counts


def membership(experts: Tensor, num_experts: int) -> Tensor:
    """Expert sets as indicator vectors.

    Args:
        experts: Integer ``[..., K]``, distinct ids along the last axis.
        num_experts: E.

    Returns:
        bool ``[..., E]``.

    Raises:
        ValueError: An id is outside ``0 … E-1``.
    """
    ids = experts.long()
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_experts):
        raise ValueError(f"expert ids must be in 0 … {num_experts - 1}, got {int(ids.min())} … {int(ids.max())}")
    found = torch.zeros(*ids.shape[:-1], num_experts, dtype=torch.bool, device=ids.device)
    return found.scatter_(-1, ids, value=True)


def hits_at_ranks(ranked: Tensor, true: Tensor, ranks: Sequence[int]) -> Tensor:
    """Number of true experts among the first k' predicted ones, for several k'.

    Args:
        ranked: int64 ``[..., R]``, predicted experts, best first (``scores.topk(R).indices``).
        true: Integer ``[..., K]``, distinct expert ids.
        ranks: The k' wanted, each in 1 … R.

    Returns:
        int64 ``[..., len(ranks)]``, each between 0 and min(k', K).

    Raises:
        ValueError: A rank is outside 1 … R.

    >>> hits_at_ranks(torch.tensor([2, 0, 1]), torch.tensor([1, 2]), [1, 2, 3]).tolist()
    [1, 1, 2]
    """
    if not all(1 <= rank <= ranked.shape[-1] for rank in ranks):
        raise ValueError(f"ranks must be in 1 … {ranked.shape[-1]}, got {list(ranks)}")
    return torch.stack([overlap_counts(ranked[..., :rank], true) for rank in ranks], dim=-1)


def union_sizes(predicted_sets: Tensor, true_sets: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes of the unions of expert sets over windows of consecutive tokens.

    A draft tree pays for the union of its nodes' experts; the error of the predicted union over a window of as many
    tokens as the budget has nodes is what a cost estimate inherits. Relative size error of a window = predicted /
    true - 1; Jaccard index = common / (predicted + true - common).

    Args:
        predicted_sets: bool ``[T, L, E]``.
        true_sets: bool ``[T, L, E]``.
        window: n >= 1.

    Returns:
        int64 ``[T-n+1, L]`` each (no rows if T < n): size of the predicted union, of the true union, of their
        intersection.

    Raises:
        ValueError: ``window`` is below 1 or the shapes differ.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if predicted_sets.shape != true_sets.shape:
        raise ValueError(f"shapes differ: {tuple(predicted_sets.shape)} and {tuple(true_sets.shape)}")
    if predicted_sets.shape[0] < window:
        empty = torch.zeros(0, predicted_sets.shape[1], dtype=torch.int64, device=predicted_sets.device)
        return empty, empty, empty
    rows = predicted_sets.shape[0] - window + 1
    predicted = predicted_sets[:rows].clone()
    true = true_sets[:rows].clone()
    for shift in range(1, window):
        predicted |= predicted_sets[shift : shift + rows]
        true |= true_sets[shift : shift + rows]
    return predicted.sum(-1), true.sum(-1), (predicted & true).sum(-1)


def independent_union(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected size of the union of independent, uniform sets: ``E·(1-(1-K/E)^n)`` (design §4).

    >>> round(independent_union(256, 8, 4), 1)
    30.5
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def normalised_entropy(counts: Tensor) -> Tensor:
    """Entropy of the experts' shares divided by log E: 1 = all experts equally used.

    Args:
        counts: ``[..., E]``, how often each expert was used.

    Returns:
        float64 ``[...]``; NaN where nothing was counted.
    """
    shares = counts.double() / counts.double().sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(shares).sum(-1)
    return entropy / torch.log(torch.tensor(float(counts.shape[-1]), dtype=torch.float64))
