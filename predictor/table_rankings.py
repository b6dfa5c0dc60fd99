"""Table predictors reduced to what an overlap report needs: the K best experts, in order.

The rows of `ecospec.predictor.table_predictors` are distributions, 2 L E bytes each: too much to ship for every
pair of tokens. What a table predicts is decided by its K best experts per layer, so a ranking keeps their ids and
nothing else, L K bytes a row up to 256 experts. Rankings are made from fitted tables (``compact()``), never fitted.

Sets and order of the K best are exactly the table's, ties falling as in ``topk(K)``. Scores say no more than that
order: they are no logits, so there is no calibration error, no probability, and no expert beyond rank K
(``ranks_only``).

Shapes: N nodes, V vocabulary, P pairs, R rows, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecospec.predictor.baselines import TrivialPredictor
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec


class TokenRankingPredictor(TrivialPredictor):
    """The K best experts of a token table; made by `TokenTablePredictor.compact`.

    Args:
        config: Its config.
        row_of_token: int32 ``[V]``, row of each token; row 0 is for tokens never seen.
        token_experts: ``[R, L, K]`` of the spec's expert type, expert ids, best first.

    Raises:
        ValueError: A type or a value is not as described; the message names the tensor.
    """

    kind = "token_ranking"
    ranks_only = True
    tensor_shapes = {"row_of_token": ("V",), "token_experts": (-1, "L", "K")}  # noqa: RUF012 - as in the base

    row_of_token: Tensor
    token_experts: Tensor

    def __init__(self, config: PredictorConfig, row_of_token: Tensor, token_experts: Tensor) -> None:
        super().__init__(config)
        _require_rankings("token_experts", token_experts, config.spec)
        rows = token_experts.shape[0]
        if row_of_token.dtype != torch.int32 or bool(((row_of_token < 0) | (row_of_token >= rows)).any()):
            raise ValueError(f"row_of_token must be int32 and below the {rows} rows of token_experts")
        self.register_buffer("row_of_token", row_of_token)
        self.register_buffer("token_experts", token_experts)

    def node_experts(self, tokens: Tensor, previous: Tensor) -> Tensor:
        """The predicted experts of some nodes.

        Args:
            tokens: int64 ``[N]``.
            previous: int64 ``[N]``, the token before each, -1 where there is none.

        Returns:
            int64 ``[N, L, K]``, best first.
        """
        del previous
        return self.token_experts[self.row_of_token[tokens].long()].long()

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`: K for the best expert down to 1 for the K-th, 0 for all others."""
        del positions, last_experts
        spec = self.spec
        ranked = self.node_experts(tokens, context[:, 0])
        values = torch.arange(spec.top_k, 0, -1, dtype=torch.float32, device=ranked.device)
        scores = values.new_zeros(ranked.shape[0], spec.num_layers, spec.num_experts)
        return scores.scatter_(-1, ranked, values.expand(ranked.shape))


class BigramRankingPredictor(TokenRankingPredictor):
    """The K best experts of a pair table; made by `BigramTablePredictor.compact`.

    Args:
        config: Its config.
        row_of_token: As in `TokenRankingPredictor`.
        token_experts: As in `TokenRankingPredictor`.
        pair_keys: ``[P]`` of `pair_key_dtype`, ascending, ``previous * V + token``; pairs that rank as their token
            does are left out.
        pair_experts: ``[P, L, K]`` of the spec's expert type, expert ids, best first.

    Raises:
        ValueError: A type or a value is not as described; the message names the tensor.
    """

    kind = "bigram_ranking"
    tensor_shapes = {  # noqa: RUF012 - as in the base
        **TokenRankingPredictor.tensor_shapes,
        "pair_keys": (-1,),
        "pair_experts": (-1, "L", "K"),
    }

    pair_keys: Tensor
    pair_experts: Tensor

    def __init__(
        self,
        config: PredictorConfig,
        row_of_token: Tensor,
        token_experts: Tensor,
        pair_keys: Tensor,
        pair_experts: Tensor,
    ) -> None:
        super().__init__(config, row_of_token, token_experts)
        _require_rankings("pair_experts", pair_experts, config.spec)
        _require_keys(pair_keys, config.spec)
        if pair_keys.shape[0] != pair_experts.shape[0]:
            raise ValueError(f"{pair_keys.shape[0]} pair_keys but {pair_experts.shape[0]} rows of pair_experts")
        self.register_buffer("pair_keys", pair_keys)
        self.register_buffer("pair_experts", pair_experts)

    def node_experts(self, tokens: Tensor, previous: Tensor) -> Tensor:
        """See `TokenRankingPredictor.node_experts`."""
        backed_off = super().node_experts(tokens, previous)
        if not self.pair_keys.shape[0]:
            return backed_off
        # Negative, so unknown, at a start.
        keys = (previous * self.spec.vocab_size + tokens).to(self.pair_keys.dtype)
        rows = torch.searchsorted(self.pair_keys, keys).clamp(max=self.pair_keys.shape[0] - 1)
        found = self.pair_keys[rows] == keys
        return torch.where(found[:, None, None], self.pair_experts[rows].long(), backed_off)


def pair_key_dtype(spec: RoutingSpec) -> torch.dtype:
    """Smallest stored type of a pair key: int32 where V * V fits, up to a vocabulary of 46,340, else int64."""
    return torch.int32 if spec.vocab_size**2 <= 2**31 else torch.int64


def _require_rankings(name: str, experts: Tensor, spec: RoutingSpec) -> None:
    """Refuse ids of another type, out of range, or twice in one layer."""
    if experts.dtype != getattr(torch, spec.expert_dtype):
        raise ValueError(f"{name} must be {spec.expert_dtype}, got {experts.dtype}")
    ids = experts.to(torch.int32)  # torch has few operations on uint16
    if bool((ids >= spec.num_experts).any()):
        raise ValueError(f"{name} must hold expert ids below {spec.num_experts}, found {int(ids.max())}")
    ordered = ids.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ValueError(f"{name} names one expert twice in a layer")


def _require_keys(keys: Tensor, spec: RoutingSpec) -> None:
    """Refuse keys of another type, unsorted, or out of range."""
    expected = pair_key_dtype(spec)
    if keys.dtype != expected:
        raise ValueError(f"pair_keys must be {expected} at V = {spec.vocab_size}, got {keys.dtype}")
    if bool((keys[1:] <= keys[:-1]).any()):
        raise ValueError("pair_keys must be ascending and distinct")
    if keys.shape[0] and not (int(keys[0]) >= 0 and int(keys[-1]) < spec.vocab_size**2):
        raise ValueError(f"pair_keys must be previous * V + token with V = {spec.vocab_size}")
