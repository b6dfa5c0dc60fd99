r"""``ecospec``, ``ecospec_oracle`` and ``ecospec_static``: probability per newly touched expert (arXiv 2607.12696).

The paper's rule, for a buffer B of (layer, expert) pairs that the selected nodes already touch::

    S(t) = P(t) / (ΔC(t | B) + ε),   ΔC(t | B) = |E_traj(t) \ B|

P is the draft probability of the path to t, E_traj(t) the union of predicted pairs along that path. The best node
is taken, its pairs join B, scores are recomputed, until the budget is used. P falls and E_traj grows along a path,
so no child scores above its parent; with ties resolved towards the shallower node the result is prefix closed
without a further rule. Left open by the paper and decided here: B starts with the root's pairs
(``buffer_init="root"``) or empty; ε = ε'·L·K, so that one ε' fits targets of any size; the root, which is always
verified, lies on every path.

``ecospec_static`` is the ablation with the cost of the whole path, S(t) = P(t) / (|E_traj(t)| + ε), not recomputed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ecospec.decoding.policies.base import SelectionContext, path_probabilities, tie_order, trajectories
from ecospec.decoding.tree import DraftTree

BufferInit = Literal["root", "empty"]

#: ε' used unless tuned.
DEFAULT_EPSILON = 0.25


def _check_epsilon(name: str, epsilon: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"{name}: epsilon must be positive, got {epsilon!r}; the default is {DEFAULT_EPSILON}")


def _sets_of(name: str, sets: Tensor | None) -> Tensor:
    if sets is None:
        raise ValueError(f"policy {name} needs expert sets; give the decoding loop a predictor")
    return sets


def _scaled_epsilon(epsilon: float, paths: Tensor) -> Tensor:
    """ε = ε'·L·K, float64 scalar; L·K is the number of pairs on the root's path, so K need not be passed around."""
    return paths[0].sum().to(torch.float64) * epsilon


@dataclasses.dataclass(frozen=True)
class EcoSpec:
    """The paper's greedy rule on predicted sets.

    Attributes:
        epsilon: ε', in units of the pairs one token touches (L·K).
        buffer_init: Whether B starts with the root's pairs or empty.

    Raises:
        ValueError: ``epsilon`` is not positive or ``buffer_init`` unknown.
    """

    epsilon: float = DEFAULT_EPSILON
    buffer_init: BufferInit = "root"
    name: ClassVar[str] = "ecospec"
    needs_draft: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = True
    needs_oracle: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate the options."""
        _check_epsilon(self.name, self.epsilon)
        if self.buffer_init not in get_args(BufferInit):
            raise ValueError(
                f"{self.name}: buffer_init is {self.buffer_init!r}, allowed: {', '.join(get_args(BufferInit))}"
            )

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:
        """Choose nodes; see `SelectionPolicy.select`. Reads nothing back from the device."""
        sets = _sets_of(self.name, sets)
        # In tie order the first maximum is the wanted one, so argmax resolves ties.
        order = tie_order(tree)
        probability = path_probabilities(tree)[order]
        paths = trajectories(tree, sets)[order]
        epsilon = _scaled_epsilon(self.epsilon, paths)
        uncovered = 1.0 - paths[0] if self.buffer_init == "root" else torch.ones_like(paths[0])  # not in B
        picked = torch.zeros(len(tree), dtype=torch.bool, device=order.device)
        picked[0] = True
        for _ in range(min(context.budget, len(tree)) - 1):
            new_pairs = (paths @ uncovered).to(torch.float64)
            score = (probability / (new_pairs + epsilon)).masked_fill(picked, -1.0)
            best = score.argmax(dim=0, keepdim=True)
            picked = picked.index_fill(0, best, True)  # noqa: FBT003 (the fill value)
            uncovered = uncovered * (1.0 - paths.index_select(0, best)[0])
        return _picked_nodes(order, picked, min(context.budget, len(tree)))


@dataclasses.dataclass(frozen=True)
class EcoSpecOracle(EcoSpec):
    """The same rule given the true sets of all candidates: what a perfect predictor would reach."""

    name: ClassVar[str] = "ecospec_oracle"
    needs_predictor: ClassVar[bool] = False
    needs_oracle: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class EcoSpecStatic:
    """The static-cost ablation: every node pays for its whole path, whatever else is selected.

    Attributes:
        epsilon: ε', in units of the pairs one token touches (L·K).

    Raises:
        ValueError: ``epsilon`` is not positive.
    """

    epsilon: float = DEFAULT_EPSILON
    name: ClassVar[str] = "ecospec_static"
    needs_draft: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = True
    needs_oracle: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate the options."""
        _check_epsilon(self.name, self.epsilon)

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:
        """Choose nodes; see `SelectionPolicy.select`. Reads nothing back from the device."""
        sets = _sets_of(self.name, sets)
        order = tie_order(tree)
        paths = trajectories(tree, sets)[order]
        cost = paths.sum(dim=1).to(torch.float64) + _scaled_epsilon(self.epsilon, paths)
        score = path_probabilities(tree)[order] / cost
        best = torch.argsort(score, descending=True, stable=True)
        return order[best[: context.budget]].sort().values


def _picked_nodes(order: Tensor, picked: Tensor, count: int) -> Tensor:
    """Indices of picked nodes, ascending; ``count`` is known, so no device synchronisation as in ``nonzero``."""
    rank = torch.argsort(picked.to(torch.int8), descending=True, stable=True)[:count]
    return order[rank].sort().values
