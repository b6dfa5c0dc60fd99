"""The predictor protocol: what a decoding loop asks of anything that predicts experts.

A *session* follows one sequence. Its context is the list of tokens the target has processed. The draft tree of a
step has node 0 = the root (the last emitted token, not yet processed by the target) and candidate nodes after it,
parents before children::

    session = predictor.session()
    session.prefill(prompt_ids[:-1])                 # may be called again: appends to the context
    scores = session.score(tokens, parents)          # [N, L, E] for root and candidates
    session.commit(path, experts=verified)           # root and accepted nodes join the context
    session.close()
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ecospec.predictor.routing_spec import RoutingSpec


@runtime_checkable
class PredictorSession(Protocol):
    """Expert prediction along one sequence. Shapes: N tree nodes, L MoE layers, E experts, K top-k."""

    def prefill(self, ids: Tensor, experts: Tensor | None = None) -> None:
        """Append tokens to the context (the prompt, or tokens decoded without speculation).

        Args:
            ids: int64 ``[T]``, target token ids.
            experts: int64 ``[T, L, K]``, the experts the target used for them, where known.
        """
        ...

    def score(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Score the experts of every node of a draft tree; the context is not changed.

        Args:
            tokens: int64 ``[N]``, node 0 the root.
            parents: int64 ``[N]``, -1 for the root, else an index below the node's own.

        Returns:
            float32 ``[N, L, E]`` logits, calibrated where the predictor is: the top-K along E are the predicted
            experts and the softmax over E is the predictor's distribution.
        """
        ...

    def commit(self, path: Tensor, experts: Tensor | None = None) -> None:
        """Move nodes of the last scored tree into the context.

        Args:
            path: int64 ``[n]``, node indices from the root (index 0) downwards, each the parent of the next.
            experts: int64 ``[n, L, K]``, the experts the target used for them, for predictors that learn from it.
        """
        ...

    def close(self) -> None:
        """Release the session's memory; the session cannot be used afterwards."""
        ...


@runtime_checkable
class Predictor(Protocol):
    """Anything that opens predictor sessions for one target."""

    @property
    def spec(self) -> RoutingSpec:
        """The target this predictor was made for."""
        ...

    def session(self) -> PredictorSession:
        """Open a session for one sequence."""
        ...


@runtime_checkable
class AttachedSession(PredictorSession, Protocol):
    """Session of a predictor that reads a drafter's hidden states; `score` alone cannot serve it and says so."""

    def score_states(self, tokens: Tensor, parents: Tensor, states: Tensor) -> Tensor:
        """`score`, given the drafter's states.

        Args:
            tokens: int64 ``[N]``, node 0 the root.
            parents: int64 ``[N]``, as in `score`.
            states: floating ``[N, F]``, what the drafter knows of each node (``StateDrafter.node_states``).
        """
        ...


@runtime_checkable
class AttachedPredictor(Predictor, Protocol):
    """A predictor that reads the hidden states of one drafter."""

    @property
    def drafter_fingerprint(self) -> str:
        """``state_fingerprint`` of the drafter it was trained with."""
        ...


def top_k_experts(scores: Tensor, top_k: int) -> Tensor:
    """Predicted experts, ids ascending.

    Args:
        scores: ``[..., E]`` scores or logits.
        top_k: K.

    Returns:
        int64 ``[..., K]``, ascending along the last axis.
    """
    return scores.topk(top_k, dim=-1, sorted=False).indices.sort(dim=-1).values
