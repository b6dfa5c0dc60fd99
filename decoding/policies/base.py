"""What a selection policy is, and the orders that all policies share."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ecospec.decoding.tree import DraftTree


@dataclasses.dataclass(frozen=True, slots=True)
class SelectionContext:
    """What a policy may look at besides the tree and the expert sets.

    Attributes:
        budget: γ, the largest number of nodes to verify, root included.
        position: Absolute position of the root in the sequence, 0 for the first token.
        scores: float32 ``[N, L, E]``, the predictor's logits where there are any.
    """

    budget: int
    position: int
    scores: Tensor | None = None


@runtime_checkable
class SelectionPolicy(Protocol):
    """Chooses the nodes of a draft tree that the target verifies.

    A policy may use anything except the noise of positions that are not emitted yet; that keeps decoding lossless.
    """

    @property
    def name(self) -> str:
        """Name in the registry and in tables."""
        ...

    @property
    def needs_draft(self) -> bool:
        """Whether a draft tree is built at all."""
        ...

    @property
    def needs_predictor(self) -> bool:
        """Whether it wants predicted expert sets."""
        ...

    @property
    def needs_oracle(self) -> bool:
        """Whether it wants the true sets of all candidates (not achievable in practice)."""
        ...

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:
        """Choose nodes.

        Args:
            tree: N nodes.
            sets: bool ``[N, L, E]``, the experts each node is thought to touch; None for policies that ask for
                neither predictor nor oracle.
            context: Budget and position.

        Returns:
            int64 ``[M]``, ascending node indices, the root (0) first, M <= budget, with every node its parent.
        """
        ...


def probability_order(tree: DraftTree) -> Tensor:
    """Order nodes by cumulative draft probability.

    Ties go to the shallower node, then the lower index, so a parent always stands before its child and every prefix
    of the order is prefix closed.

    Returns:
        int64 ``[N]``, a permutation of node indices; the root is first.
    """
    by_depth = torch.argsort(tree.depths, stable=True)
    return by_depth[torch.argsort(tree.logprobs[by_depth], descending=True, stable=True)]


def tie_order(tree: DraftTree) -> Tensor:
    """Order nodes by how ties are resolved: shallower first, then more probable, then lower index.

    Returns:
        int64 ``[N]``, a permutation of node indices. In this order the first maximum of a score wins its ties.
    """
    by_probability = torch.argsort(tree.logprobs, descending=True, stable=True)
    return by_probability[torch.argsort(tree.depths[by_probability], stable=True)]


def path_probabilities(tree: DraftTree) -> Tensor:
    """P(t): float64 ``[N]``, draft probability of each node's path.

    Taken from log-probabilities in float64, so nodes whose float32 probabilities would underflow or collide keep
    their order.
    """
    return tree.logprobs.to(torch.float64).exp()


def trajectories(tree: DraftTree, sets: Tensor) -> Tensor:
    """E_traj: the (layer, expert) pairs on each node's path, root included.

    Args:
        tree: N nodes.
        sets: bool ``[N, L, E]``.

    Returns:
        float32 ``[N, L*E]`` of zeros and ones: as numbers, because counting pairs is then a matrix product, several
        times faster than summing booleans and exact below 2**24 pairs.
    """
    return (tree.ancestors.to(torch.float32) @ sets.flatten(1).to(torch.float32)).clamp_(max=1.0)
