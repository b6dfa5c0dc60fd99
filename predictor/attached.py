"""Drafter-attached predictor: low-rank heads on what a drafter already knows of every candidate.

An EAGLE-3 head has computed a hidden state before each candidate, the one it proposed the candidate from. This
predictor maps that state and the candidate's embedding to the scores of all experts of all layers::

    scores = up · act(down · [token half, state half]) + bias        down [r, F], up [L * E, r]

so it runs no backbone, keeps no cache, and costs two small matrix products a tree. Which F numbers describe a node
is the drafter's business (``StateDrafter.node_states``); the bundle names the drafter by the fingerprint of the
weights that make its states, and decoding refuses another.

Shapes: N nodes, F width of a node's states, r rank, L MoE layers, E experts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecospec.predictor.bundle_files import PredictorBundle, StoredBundle, require_tensors
from ecospec.predictor.choices import require_choice
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec

_ADVICE = "decode with a drafter, or report with --drafter"


class Activation(enum.StrEnum):
    """What stands between the two matrices: nothing (one matrix of rank r), or SiLU."""

    NONE = "none"
    SILU = "silu"


class AttachedHeads(nn.Module):
    """The two matrices.

    Args:
        spec: The target.
        state_size: F.
        rank: r.
        activation: What stands between them.
    """

    def __init__(self, spec: RoutingSpec, state_size: int, rank: int, activation: str = Activation.SILU) -> None:
        super().__init__()
        self.spec = spec
        self.activation = Activation(activation)
        self.down = nn.Linear(state_size, rank, bias=False)
        self.up = nn.Linear(rank, spec.num_layers * spec.num_experts)

    def forward(self, states: Tensor) -> Tensor:
        """Scores ``[..., L, E]`` of states ``[..., F]``, in float32 at least, not calibrated."""
        inner = self.down(states.to(device=self.down.weight.device, dtype=self.down.weight.dtype))
        if self.activation is Activation.SILU:
            inner = F.silu(inner)
        scores: Tensor = self.up(inner)
        shape = (*scores.shape[:-1], self.spec.num_layers, self.spec.num_experts)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).view(shape)


class DrafterAttachedPredictor(PredictorBundle):
    """The heads as a bundle; satisfies `ecospec.predictor.session.AttachedPredictor`.

    Args:
        config: Its config; `from_heads` makes it.
        heads: The trained matrices.

    Raises:
        ValueError: The config lacks one of the kind's options.
    """

    kind = "drafter_attached"

    def __init__(self, config: PredictorConfig, heads: AttachedHeads) -> None:
        super().__init__(config)
        _require_options(config)
        self.heads = heads

    @classmethod
    def from_heads(
        cls,
        heads: AttachedHeads,
        drafter_fingerprint: str,
        *,
        temperature: tuple[float, ...] = (),
        options: Mapping[str, Any] | None = None,
        training_data: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> DrafterAttachedPredictor:
        """Wrap trained heads, by reference.

        Args:
            heads: The matrices.
            drafter_fingerprint: ``state_fingerprint`` of the drafter whose states they read.
            temperature: One per MoE layer; ones by default.
            options: Further settings worth keeping.
            training_data: Fingerprint of the traces.
            metrics: Measured quality.
            provenance: Versions, command, seeds.
        """
        rank, size = heads.down.weight.shape
        own = {"state_size": size, "rank": rank, "activation": heads.activation.value}
        config = PredictorConfig(
            kind=cls.kind,
            spec=heads.spec,
            temperature=temperature,
            options={**(options or {}), **own, "drafter_fingerprint": drafter_fingerprint},
            training_data=training_data or {},
            metrics=metrics or {},
            provenance=provenance or {},
        )
        return cls(config, heads)

    @property
    def drafter_fingerprint(self) -> str:
        """``state_fingerprint`` of the drafter whose states the heads read."""
        return str(self.config.options["drafter_fingerprint"])

    @property
    def state_size(self) -> int:
        """F."""
        return int(self.config.options["state_size"])

    def session(self) -> DrafterAttachedSession:
        """Open a session for one sequence; it keeps nothing, the drafter's states hold the context."""
        return DrafterAttachedSession(self)

    @torch.no_grad()
    def score_states(self, states: Tensor) -> Tensor:
        """Scores of described nodes.

        Args:
            states: floating ``[..., F]``.

        Returns:
            ``[..., L, E]`` calibrated logits, float32 (float64 for a float64 predictor).

        Raises:
            ValueError: Another width than F.
        """
        if states.shape[-1] != self.state_size:
            raise ValueError(
                f"this predictor reads states of width {self.state_size}, the drafter gives {states.shape[-1]}; "
                "use the drafter it was trained with"
            )
        return self.calibrated(self.heads(states))

    def score_sequence(self, ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """Refused: token ids alone are not enough.

        Raises:
            ValueError: Always.
        """
        del ids, experts
        raise ValueError(f"a drafter_attached predictor reads a drafter's hidden states, not token ids; {_ADVICE}")

    def bundle_tensors(self, *, store_embedding: bool = False) -> dict[str, Tensor]:
        """See `PredictorBundle.bundle_tensors`; named ``down.weight``, ``up.weight``, ``up.bias``."""
        tensors = super().bundle_tensors(store_embedding=store_embedding)
        return {name.removeprefix("heads."): value for name, value in tensors.items()}

    @classmethod
    def from_stored(
        cls, stored: StoredBundle, embedding: nn.Module | Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """See `PredictorBundle.from_stored`; ``embedding`` is not looked at."""
        del embedding
        config = stored.config
        try:
            _require_options(config)
        except ValueError as error:
            raise ValueError(f"{stored.source}: {error}; export it again") from error
        options = config.options
        heads = AttachedHeads(config.spec, options["state_size"], options["rank"], options["activation"])
        shapes = {name: tuple(value.shape) for name, value in heads.state_dict().items()}
        require_tensors(stored.tensors, shapes, stored.source)
        heads.to(dtype or stored.tensors["up.weight"].dtype)
        heads.load_state_dict(dict(stored.tensors))
        return cls(config, heads)


class DrafterAttachedSession:
    """Session of a drafter-attached predictor; see `ecospec.predictor.session.AttachedSession`."""

    def __init__(self, predictor: DrafterAttachedPredictor) -> None:
        self._predictor: DrafterAttachedPredictor | None = predictor

    def prefill(self, ids: Tensor, experts: Tensor | None = None) -> None:
        """Nothing to do: the drafter keeps the context."""
        del ids, experts
        self._open()

    def score(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Refused: tokens alone are not enough.

        Raises:
            ValueError: Always.
        """
        del parents
        return self._open().score_sequence(tokens)

    def score_states(self, tokens: Tensor, parents: Tensor, states: Tensor) -> Tensor:
        """Score every node; see `ecospec.predictor.session.AttachedSession`.

        Args:
            tokens: int64 ``[N]``; only its length is looked at, the states describe the tokens.
            parents: Not looked at.
            states: floating ``[N, F]``.

        Raises:
            ValueError: Wrong shapes, or the session is closed.
        """
        del parents
        if states.ndim != 2 or states.shape[0] != tokens.shape[0]:
            raise ValueError(f"score_states takes states [{tokens.shape[0]}, F], got {list(states.shape)}")
        return self._open().score_states(states)

    def commit(self, path: Tensor, experts: Tensor | None = None) -> None:
        """Nothing to do: the drafter learns what was accepted."""
        del path, experts
        self._open()

    def close(self) -> None:
        """The session cannot be used afterwards."""
        self._predictor = None

    def _open(self) -> DrafterAttachedPredictor:
        if self._predictor is None:
            raise ValueError("this predictor session is closed; open another with predictor.session()")
        return self._predictor


def _require_options(config: PredictorConfig) -> None:
    """Refuse a config without what the kind needs."""
    options = config.options
    for name in ("state_size", "rank"):
        value = options.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"options.{name} of a drafter_attached predictor must be a positive integer, got {value!r}"
            )
    require_choice("options.activation", options.get("activation"), [choice.value for choice in Activation])
    if not isinstance(options.get("drafter_fingerprint"), str):
        raise ValueError(
            "options.drafter_fingerprint of a drafter_attached predictor must name the drafter's weights"
        )
