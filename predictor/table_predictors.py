"""Table predictors: which experts a token, or a pair of tokens, used.

Each row is a distribution over the experts of every layer, shrunk towards a broader one by its count: with n
occurrences, observed shares q and prior p, the row is ``(n q + s p) / (n + s)``. The token table's prior is the
frequencies, the pair table's prior is its token's row. ``s`` (shrinkage) is the number of occurrences the prior is
worth.

Rows are float16 logarithms, and only of what was seen; 100,000 pairs of the demo target (6 layers x 64 experts)
take 77 MB. `TokenTablePredictor.compact` keeps only which experts are predicted, 24 bytes a row there.
Shapes: N nodes, V vocabulary, P pairs, R rows, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ecospec.predictor.baselines import TrivialPredictor, frequencies, log_probabilities
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.table_rankings import BigramRankingPredictor, TokenRankingPredictor, pair_key_dtype

_CHUNK_ROWS = 4096


class TokenTablePredictor(TrivialPredictor):
    """The experts each token used most, backed off to the frequencies.

    Args:
        config: Its config.
        row_of_token: int64 ``[V]``, row of each token; row 0 holds the frequencies, for tokens never seen.
        token_log_probs: float16 ``[R, L, E]``.
    """

    kind = "token_table"
    tensor_shapes = {"row_of_token": ("V",), "token_log_probs": (-1, "L", "E")}  # noqa: RUF012 - as in the base

    row_of_token: Tensor
    token_log_probs: Tensor

    def __init__(self, config: PredictorConfig, row_of_token: Tensor, token_log_probs: Tensor) -> None:
        super().__init__(config)
        self.register_buffer("row_of_token", row_of_token)
        self.register_buffer("token_log_probs", token_log_probs)

    @classmethod
    def from_counts(
        cls,
        spec: RoutingSpec,
        counts: Tensor,
        token_counts: Tensor | None = None,
        *,
        shrinkage: float = 1.0,
        training_data: Mapping[str, Any] | None = None,
    ) -> TokenTablePredictor:
        """Fit.

        Args:
            spec: The target.
            counts: Integer ``[V, L, E]`` or ``[V, L*E]`` (dense, or sparse CSR): how often each token used each
                expert.
            token_counts: Integer ``[V]``, how often each token occurred; by default from ``counts``.
            shrinkage: Occurrences the frequencies are worth; > 0.
            training_data: Fingerprint of the traces, for the config.

        Raises:
            ValueError: Wrong shapes, nothing counted, or shrinkage not positive.
        """
        rows = _Rows(spec, counts, spec.vocab_size, "token counts")
        _require_shrinkage(shrinkage)
        occurrences = rows.occurrences() if token_counts is None else token_counts
        if tuple(occurrences.shape) != (spec.vocab_size,):
            raise ValueError(f"token_counts must be [V] = ({spec.vocab_size},), got {tuple(occurrences.shape)}")
        prior = frequencies(spec, rows.total())
        seen = occurrences.nonzero().squeeze(-1)
        table = rows.shrunk_log_probs(seen, occurrences, lambda ids: prior.expand(len(ids), -1, -1), shrinkage)
        back_off = log_probabilities(prior).half().unsqueeze(0)
        row_of_token = torch.zeros(spec.vocab_size, dtype=torch.int64)
        row_of_token[seen] = torch.arange(1, len(seen) + 1)
        config = PredictorConfig(
            kind="token_table",
            spec=spec,
            options={"shrinkage": float(shrinkage)},
            training_data=training_data or {},
        )
        return cls(config, row_of_token, torch.cat([back_off, table]))

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`."""
        del context, positions, last_experts
        return self.token_log_probs[self.row_of_token[tokens]].float()

    def compact(self) -> TokenRankingPredictor:
        """Reduce the table to the K best experts of every row: the same predictions, no probabilities."""
        config = dataclasses.replace(self.config, kind=TokenRankingPredictor.kind, temperature=())
        return TokenRankingPredictor(
            config, self.row_of_token.to(torch.int32), self._best_experts(self.token_log_probs)
        )

    def _best_experts(self, log_probs: Tensor) -> Tensor:
        """Ids of the K best experts, best first, of log-probabilities ``[n, L, E]``, as ``[n, L, K]``."""
        spec = self.spec
        shape = (log_probs.shape[0], spec.num_layers, spec.top_k)
        best = torch.empty(shape, dtype=getattr(torch, spec.expert_dtype), device=log_probs.device)
        for start in range(0, shape[0], _CHUNK_ROWS):
            # Calibrated float32, as nodes are scored, so that ties fall the same way.
            scores = self.calibrated(log_probs[start : start + _CHUNK_ROWS].float())
            best[start : start + _CHUNK_ROWS] = scores.topk(spec.top_k, dim=-1).indices.to(best.dtype)
        return best


class BigramTablePredictor(TokenTablePredictor):
    """The experts each pair (previous token, token) used most, backed off to the token table.

    Args:
        config: Its config.
        row_of_token: As in `TokenTablePredictor`.
        token_log_probs: As in `TokenTablePredictor`.
        pair_keys: int64 ``[P]``, ascending, ``previous * V + token``.
        pair_log_probs: float16 ``[P, L, E]``.
    """

    kind = "bigram_table"
    tensor_shapes = {  # noqa: RUF012 - as in the base
        **TokenTablePredictor.tensor_shapes,
        "pair_keys": (-1,),
        "pair_log_probs": (-1, "L", "E"),
    }

    pair_keys: Tensor
    pair_log_probs: Tensor

    def __init__(
        self,
        config: PredictorConfig,
        row_of_token: Tensor,
        token_log_probs: Tensor,
        pair_keys: Tensor,
        pair_log_probs: Tensor,
    ) -> None:
        super().__init__(config, row_of_token, token_log_probs)
        if pair_keys.shape[0] != pair_log_probs.shape[0]:
            raise ValueError(
                f"{pair_keys.shape[0]} pair keys but {pair_log_probs.shape[0]} rows; fit the table again"
            )
        self.register_buffer("pair_keys", pair_keys)
        self.register_buffer("pair_log_probs", pair_log_probs)

    @classmethod
    def from_counts(  # type: ignore[override]  # a pair table is fitted on top of a token table
        cls,
        tokens: TokenTablePredictor,
        keys: Tensor,
        counts: Tensor,
        pair_counts: Tensor | None = None,
        *,
        shrinkage: float = 1.0,
        training_data: Mapping[str, Any] | None = None,
    ) -> BigramTablePredictor:
        """Fit on top of a token table.

        Args:
            tokens: The token table, fitted on the same traces.
            keys: int64 ``[P]``, ascending and distinct, ``previous * V + token``; leave out rare pairs to bound
                memory.
            counts: Integer ``[P, L, E]`` or ``[P, L*E]`` (dense of any integer type, or sparse CSR).
            pair_counts: Integer ``[P]``, how often each pair occurred; by default from ``counts``.
            shrinkage: Occurrences the token's row is worth; > 0.
            training_data: Fingerprint of the traces, for the config; by default the token table's.

        Raises:
            ValueError: Wrong shapes, keys not ascending, or shrinkage not positive.
        """
        spec = tokens.spec
        _require_shrinkage(shrinkage)
        if keys.ndim != 1 or keys.dtype != torch.int64 or bool((keys[1:] <= keys[:-1]).any()):
            raise ValueError("pair keys must be int64 [P], ascending and distinct")
        if len(keys) and not (int(keys[0]) >= 0 and int(keys[-1]) < spec.vocab_size**2):
            raise ValueError(f"pair keys must be previous * V + token with V = {spec.vocab_size}")
        rows = _Rows(spec, counts, len(keys), "pair counts")
        occurrences = rows.occurrences() if pair_counts is None else pair_counts
        if tuple(occurrences.shape) != (len(keys),):
            raise ValueError(f"pair_counts must be [P] = ({len(keys)},), got {tuple(occurrences.shape)}")

        def prior(ids: Tensor) -> Tensor:
            token = keys[ids] % spec.vocab_size
            return tokens.token_log_probs[tokens.row_of_token[token]].float().exp()

        table = rows.shrunk_log_probs(torch.arange(len(keys)), occurrences, prior, shrinkage)
        options = {"token_shrinkage": tokens.config.options["shrinkage"], "shrinkage": float(shrinkage)}
        data = tokens.config.training_data if training_data is None else training_data
        config = PredictorConfig(kind="bigram_table", spec=spec, options=options, training_data=data)
        return cls(config, tokens.row_of_token, tokens.token_log_probs, keys, table)

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`."""
        backed_off = super().node_scores(tokens, context, positions, last_experts)
        if not self.pair_keys.shape[0]:
            return backed_off
        keys = context[:, 0] * self.spec.vocab_size + tokens  # negative, so unknown, at a start
        rows = torch.searchsorted(self.pair_keys, keys).clamp(max=self.pair_keys.shape[0] - 1)
        found = self.pair_keys[rows] == keys
        return torch.where(found[:, None, None], self.pair_log_probs[rows].float(), backed_off)

    def compact(self) -> BigramRankingPredictor:
        """Reduce the table to the K best experts of every row, without pairs that rank as their token does."""
        tokens = super().compact()
        best = self._best_experts(self.pair_log_probs)
        backed_off = tokens.token_experts[tokens.row_of_token[self.pair_keys % self.spec.vocab_size].long()]
        kept = (best != backed_off).flatten(1).any(dim=-1)
        return BigramRankingPredictor(
            dataclasses.replace(self.config, kind=BigramRankingPredictor.kind, temperature=()),
            tokens.row_of_token,
            tokens.token_experts,
            self.pair_keys[kept].to(pair_key_dtype(self.spec)),
            best[kept],
        )


def _require_shrinkage(shrinkage: float) -> None:
    """Refuse a prior that is worth nothing: unseen experts would have probability 0."""
    if not shrinkage > 0:
        raise ValueError(f"shrinkage must be positive, got {shrinkage}")


class _Rows:
    """Count rows, dense or sparse CSR, read a chunk at a time as float32 ``[rows, L, E]``."""

    def __init__(self, spec: RoutingSpec, counts: Tensor, expected: int, what: str) -> None:
        self.spec = spec
        self.counts = counts
        width = spec.num_layers * spec.num_experts
        shapes = [(expected, width), (expected, spec.num_layers, spec.num_experts)]
        if tuple(counts.shape) not in shapes:
            raise ValueError(f"{what} must be {shapes[0]} or {shapes[1]}, got {tuple(counts.shape)}")
        if counts.layout not in {torch.strided, torch.sparse_csr}:
            raise ValueError(f"{what} must be dense or sparse CSR, got {counts.layout}")

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    def dense(self, ids: Tensor) -> Tensor:
        """Some rows."""
        shape = (len(ids), self.spec.num_layers, self.spec.num_experts)
        if self.counts.layout == torch.strided:
            return self.counts[ids].to(torch.float32).view(shape)
        starts = self.counts.crow_indices()
        lengths = starts[ids + 1] - starts[ids]
        row = torch.repeat_interleave(torch.arange(len(ids)), lengths)
        within = torch.arange(len(row)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        entry = starts[ids][row] + within
        filled = torch.zeros(len(ids), shape[1] * shape[2])
        filled[row, self.counts.col_indices()[entry]] = self.counts.values()[entry].to(torch.float32)
        return filled.view(shape)

    def chunks(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Row numbers in pieces of bounded size."""
        pieces: tuple[Tensor, ...] = torch.split(ids, _CHUNK_ROWS)
        return pieces

    def occurrences(self) -> Tensor:
        """How often each row's token or pair occurred: every occurrence counts K experts in each layer."""
        if not len(self):
            return torch.zeros(0)
        pieces = [
            self.dense(ids)[:, 0].sum(dim=-1) / self.spec.top_k for ids in self.chunks(torch.arange(len(self)))
        ]
        return torch.cat(pieces)

    def total(self) -> Tensor:
        """Sum of all rows, float64 ``[L, E]``."""
        total = torch.zeros(self.spec.num_layers, self.spec.num_experts, dtype=torch.float64)
        for ids in self.chunks(torch.arange(len(self))):
            total += self.dense(ids).sum(dim=0, dtype=torch.float64)
        return total

    def shrunk_log_probs(
        self, ids: Tensor, occurrences: Tensor, prior: Callable[[Tensor], Tensor], shrinkage: float
    ) -> Tensor:
        """Rows ``ids`` shrunk towards ``prior(ids)`` ``[n, L, E]``, as float16 logarithms."""
        shape = (len(ids), self.spec.num_layers, self.spec.num_experts)
        table = torch.empty(shape, dtype=torch.float16)
        for start, chunk in zip(range(0, len(ids), _CHUNK_ROWS), self.chunks(ids), strict=False):
            weight = occurrences[chunk].to(torch.float32)[:, None, None]
            observed = self.dense(chunk) / self.spec.top_k
            mixed = (observed + shrinkage * prior(chunk)) / (weight + shrinkage)
            table[start : start + len(chunk)] = log_probabilities(mixed).half()
        return table
