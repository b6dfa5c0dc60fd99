"""Trivial predictors that every report and decoding run may stand beside: random, frequency, last token.

They implement the same protocol as the neural predictor and are saved as bundles. The token tables are in
`ecospec.predictor.table_predictors`, what they all know of a node in `ecospec.predictor.window_predictor`; fitting
(counting) is in ``ecospec.train``.

Shapes: N nodes, C context tokens, L MoE layers, E experts, K top-k, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ecospec.predictor.bundle_files import StoredBundle, require_tensors
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.window_predictor import WindowPredictor

# Least probability, so that experts never seen get a finite logit that float16 holds (log 1e-7 = -16.1).
PROBABILITY_FLOOR = 1e-7

# Share of probability that the last token's predictor leaves to the frequencies: enough to order the experts
# outside the set, too little to lift one of them above it (K experts share 0.9).
_LAST_TOKEN_BACK_OFF = 0.1

# Multipliers of the splitmix64 finaliser as signed 64-bit integers.
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


class TrivialPredictor(WindowPredictor):
    """Base of the predictors that need no network."""

    #: Tensor names and shapes in terms of L, E, K and V; -1 accepts any size.
    tensor_shapes: ClassVar[Mapping[str, tuple[str | int, ...]]] = {}

    @classmethod
    def from_stored(
        cls, stored: StoredBundle, embedding: nn.Module | Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """See `PredictorBundle.from_stored`; ``embedding`` and ``dtype`` are not looked at."""
        del embedding, dtype
        spec = stored.config.spec
        sizes = {"L": spec.num_layers, "E": spec.num_experts, "K": spec.top_k, "V": spec.vocab_size}
        shapes = {
            name: tuple(sizes[size] if isinstance(size, str) else size for size in shape)
            for name, shape in cls.tensor_shapes.items()
        }
        require_tensors(stored.tensors, shapes, stored.source)
        try:
            return cls(stored.config, **stored.tensors)
        except ValueError as error:
            raise ValueError(f"{stored.source}: {error}; export it again") from error


def frequencies(spec: RoutingSpec, counts: Tensor) -> Tensor:
    """How often each expert of a layer is used, relative to the layer's total.

    Args:
        spec: The target.
        counts: Integer ``[L, E]``.

    Returns:
        float32 ``[L, E]``, rows summing to 1.

    Raises:
        ValueError: Wrong shape, or a layer without counts.
    """
    if tuple(counts.shape) != (spec.num_layers, spec.num_experts):
        expected = (spec.num_layers, spec.num_experts)
        raise ValueError(f"expert counts must be [L, E] = {expected}, got {tuple(counts.shape)}")
    totals = counts.double().sum(dim=-1, keepdim=True)
    if not bool((totals > 0).all()):
        raise ValueError("expert counts are empty for some layer; fit the predictor on at least one token")
    return (counts.double() / totals).float()


def log_probabilities(probabilities: Tensor) -> Tensor:
    """Logarithm with `PROBABILITY_FLOOR` under it."""
    return probabilities.clamp(min=PROBABILITY_FLOOR).log()


class RandomPredictor(TrivialPredictor):
    """Uniformly random experts: a hash of (seed, position, token, layer, expert).

    A hash and not a generator, so that a node's scores depend neither on the tree around it nor on the device, and
    sessions agree with `score_sequence`.
    """

    kind = "random"

    @classmethod
    def create(cls, spec: RoutingSpec, *, seed: int = 0) -> RandomPredictor:
        """Make one for a target.

        Args:
            spec: The target.
            seed: Other seeds give other experts.
        """
        return cls(PredictorConfig(kind="random", spec=spec, options={"seed": seed}))

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`."""
        del context, last_experts
        spec = self.spec
        seed = int(self.config.options.get("seed", 0))
        key = _mix(_mix(positions + seed * 1_000_003) ^ tokens)
        cells = torch.arange(spec.num_layers * spec.num_experts, device=tokens.device)
        mixed = _mix(key.unsqueeze(-1) + cells * _GOLDEN)
        uniform = ((mixed >> 40) & 0xFFFFFF).float() / 2**24
        return uniform.view(-1, spec.num_layers, spec.num_experts)


def _mix(value: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64, wrapping around."""
    value = (value ^ _shifted(value, 30)) * _MIX_1
    value = (value ^ _shifted(value, 27)) * _MIX_2
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic, whose copies of the sign bit would cancel in the finaliser."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


class FrequencyPredictor(TrivialPredictor):
    """The most used experts of each layer, whatever the token.

    Args:
        config: Its config.
        log_probs: float32 ``[L, E]``.
    """

    kind = "frequency"
    tensor_shapes = {"log_probs": ("L", "E")}  # noqa: RUF012 - the base declares it ClassVar

    log_probs: Tensor

    def __init__(self, config: PredictorConfig, log_probs: Tensor) -> None:
        super().__init__(config)
        self.register_buffer("log_probs", log_probs)

    @classmethod
    def from_counts(
        cls, spec: RoutingSpec, counts: Tensor, *, training_data: Mapping[str, Any] | None = None
    ) -> Self:
        """Fit.

        Args:
            spec: The target.
            counts: Integer ``[L, E]``: how often each expert was used.
            training_data: Fingerprint of the traces, for the config.

        Raises:
            ValueError: Wrong shape, or a layer without counts.
        """
        config = PredictorConfig(kind=cls.kind, spec=spec, training_data=training_data or {})
        return cls(config, log_probabilities(frequencies(spec, counts)))

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`."""
        del context, positions, last_experts
        return self.log_probs.expand(tokens.shape[0], *self.log_probs.shape)


class LastTokenPredictor(FrequencyPredictor):
    """The experts of the last verified token, for every node; the frequencies where no experts are known yet."""

    kind = "last_token"
    needs_experts = True

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`."""
        prior = super().node_scores(tokens, context, positions, last_experts)
        if last_experts is None:
            return prior
        share = (1.0 - _LAST_TOKEN_BACK_OFF) / self.spec.top_k
        mixed = _LAST_TOKEN_BACK_OFF * prior.exp()
        mixed = mixed.scatter_add(-1, last_experts, torch.full_like(last_experts, share, dtype=mixed.dtype))
        return mixed.log()
