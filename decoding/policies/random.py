"""``random``: a random prefix-closed set of candidates, the floor of every comparison."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ecospec.decoding.policies.base import SelectionContext
from ecospec.decoding.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Random:
    """Grow the selection by a uniformly drawn child of a selected node until the budget is used.

    The draw depends on the seed and the root's position only, so a run can be repeated and resumed.

    Attributes:
        seed: Seed of the draws.
    """

    seed: int = 0
    name: ClassVar[str] = "random"
    needs_draft: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = False
    needs_oracle: ClassVar[bool] = False

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:  # noqa: ARG002 (protocol)
        """Choose nodes; see `SelectionPolicy.select`. Reads nothing back from the device."""
        size, device = len(tree), tree.tokens.device
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + context.position) % 2**63)
        count = min(context.budget, size)
        draws = torch.rand(count, size, generator=generator).to(device)
        picked = torch.zeros(size, dtype=torch.bool, device=device)
        picked[0] = True
        parents = tree.parents.clamp(min=0)
        for step in range(count - 1):
            frontier = picked[parents] & ~picked
            best = draws[step].masked_fill(~frontier, -1.0).argmax(dim=0, keepdim=True)
            picked = picked.index_fill(0, best, True)  # noqa: FBT003 (the fill value)
        return torch.argsort(picked.to(torch.int8), descending=True, stable=True)[:count]
