"""Trivial predictors that every report and decoding run may stand beside: random, frequency, last token.

They implement the same protocol as the neural predictor and are saved as bundles. What they know of a node is its
token, the token before it, its position, and the experts of the last verified token. The token tables are in
`ecospec.predictor.table_predictors`; fitting (counting) is in ``ecospec.train``.

Shapes: N nodes, T tokens, L MoE layers, E experts, K top-k, V vocabulary.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ecospec.predictor.bundle_files import PredictorBundle, StoredBundle, require_tensors
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec

# Least probability, so that experts never seen get a finite logit that float16 holds (log 1e-7 = -16.1).
PROBABILITY_FLOOR = 1e-7

# Share of probability that the last token's predictor leaves to the frequencies: enough to order the experts
# outside the set, too little to lift one of them above it (K experts share 0.9).
_LAST_TOKEN_BACK_OFF = 0.1

# Multipliers of the splitmix64 finaliser as signed 64-bit integers.
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


class TrivialPredictor(PredictorBundle):
    """Base of the predictors that need no network."""

    #: Tensor names and shapes in terms of L, E, K and V; -1 accepts any size.
    tensor_shapes: ClassVar[Mapping[str, tuple[str | int, ...]]] = {}

    @abc.abstractmethod
    def node_scores(
        self, tokens: Tensor, previous: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """Uncalibrated scores of some nodes.

        Args:
            tokens: int64 ``[N]``.
            previous: int64 ``[N]``, the token before each, -1 where there is none.
            positions: int64 ``[N]``, position in the sequence.
            last_experts: int64 ``[N, L, K]``, experts of the last token whose experts are known; None where no
                experts are known.

        Returns:
            ``[N, L, E]``.
        """

    def session(self) -> TrivialSession:
        """Open a session for one sequence."""
        return TrivialSession(self)

    @torch.no_grad()
    def score_sequence(self, ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """See `PredictorBundle.score_sequence`."""
        ids = ids.to(self.device)
        previous = torch.cat([ids.new_full((1,), -1), ids[:-1]])[: ids.shape[0]]
        positions = torch.arange(ids.shape[0], device=ids.device)
        if experts is None or not self.needs_experts or not ids.shape[0]:
            return self.calibrated(self.node_scores(ids, previous, positions, None))
        experts = experts.to(device=self.device, dtype=torch.int64)
        first = self.node_scores(ids[:1], previous[:1], positions[:1], None)
        others = self.node_scores(ids[1:], previous[1:], positions[1:], experts[:-1])
        return self.calibrated(torch.cat([first, others]))

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


class TrivialSession:
    """Session of a trivial predictor; see `ecospec.predictor.session.PredictorSession`."""

    def __init__(self, predictor: TrivialPredictor) -> None:
        self._predictor: TrivialPredictor | None = predictor
        self._length = 0
        self._last_token = torch.full((), -1, dtype=torch.int64, device=predictor.device)
        self._last_experts: Tensor | None = None
        self._tree: Tensor | None = None

    def prefill(self, ids: Tensor, experts: Tensor | None = None) -> None:
        """Append tokens to the context; see the protocol.

        Raises:
            ValueError: Wrong shape, or the session is closed.
        """
        predictor = self._open()
        if ids.ndim != 1:
            raise ValueError(f"prefill takes token ids of shape [T], got {tuple(ids.shape)}")
        self._tree = None
        self._append(ids.to(predictor.device), experts)

    @torch.no_grad()
    def score(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Score every node of a draft tree; see the protocol.

        Raises:
            ValueError: Wrong shapes, or the session is closed.
        """
        predictor = self._open()
        if tokens.ndim != 1 or tokens.shape != parents.shape or not tokens.shape[0]:
            raise ValueError(
                f"score takes tokens and parents of one shape [N], N > 0, got {tuple(tokens.shape)} "
                f"and {tuple(parents.shape)}"
            )
        tokens, parents = tokens.to(predictor.device), parents.to(predictor.device)
        self._tree = tokens
        previous = torch.where(parents < 0, self._last_token, tokens[parents.clamp(min=0)])
        depths = torch.zeros_like(parents)
        above = parents
        # Every pass climbs one edge in all nodes at once; a path has at most N nodes, known from the shape.
        for _ in range(parents.shape[0] - 1):
            depths = depths + (above >= 0)
            above = torch.where(above >= 0, parents[above.clamp(min=0)], above)
        last = self._last_experts
        experts = None if last is None else last.expand(tokens.shape[0], *last.shape)
        return predictor.calibrated(predictor.node_scores(tokens, previous, depths + self._length, experts))

    def commit(self, path: Tensor, experts: Tensor | None = None) -> None:
        """Move nodes of the last scored tree into the context; see the protocol.

        Raises:
            ValueError: No scored tree, wrong shape, or the session is closed.
        """
        predictor = self._open()
        if self._tree is None:
            raise ValueError("commit needs a scored tree; call score first")
        if path.ndim != 1 or not 0 < path.shape[0] <= self._tree.shape[0]:
            raise ValueError(
                f"commit takes a path of shape [n] with 1 to {self._tree.shape[0]} nodes, got {tuple(path.shape)}"
            )
        tokens = self._tree[path.to(predictor.device)]
        self._tree = None
        self._append(tokens, experts)

    def close(self) -> None:
        """Release the session; it cannot be used afterwards."""
        self._predictor = None
        self._tree = None
        self._last_experts = None

    def _append(self, tokens: Tensor, experts: Tensor | None) -> None:
        """Remember the last token and, where known, its experts."""
        predictor = self._open()
        count = tokens.shape[0]
        if not count:
            return
        self._length += count
        self._last_token = tokens[-1]
        if experts is not None:
            expected = (count, predictor.spec.num_layers, predictor.spec.top_k)
            if tuple(experts.shape) != expected:
                raise ValueError(f"experts must be [tokens, L, K] = {expected}, got {tuple(experts.shape)}")
            self._last_experts = experts[-1].to(device=predictor.device, dtype=torch.int64)

    def _open(self) -> TrivialPredictor:
        """The predictor of an open session."""
        if self._predictor is None:
            raise ValueError("this predictor session is closed; open another with predictor.session()")
        return self._predictor


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
        self, tokens: Tensor, previous: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `TrivialPredictor.node_scores`."""
        del previous, last_experts
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
        self, tokens: Tensor, previous: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `TrivialPredictor.node_scores`."""
        del previous, positions, last_experts
        return self.log_probs.expand(tokens.shape[0], *self.log_probs.shape)


class LastTokenPredictor(FrequencyPredictor):
    """The experts of the last verified token, for every node; the frequencies where no experts are known yet."""

    kind = "last_token"
    needs_experts = True

    def node_scores(
        self, tokens: Tensor, previous: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `TrivialPredictor.node_scores`."""
        prior = super().node_scores(tokens, previous, positions, last_experts)
        if last_experts is None:
            return prior
        share = (1.0 - _LAST_TOKEN_BACK_OFF) / self.spec.top_k
        mixed = _LAST_TOKEN_BACK_OFF * prior.exp()
        mixed = mixed.scatter_add(-1, last_experts, torch.full_like(last_experts, share, dtype=mixed.dtype))
        return mixed.log()
