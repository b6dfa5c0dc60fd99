"""``probability``: the candidates with the highest cumulative draft probability.

The rule of EAGLE-2 and EAGLE-3 (arXiv 2406.16858, 2503.01840): rerank the whole tree, keep the top nodes.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from ecospec.decoding.policies.base import SelectionContext, probability_order
from ecospec.decoding.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Probability:
    """Keep the ``budget`` most probable nodes, root included."""

    name: ClassVar[str] = "probability"
    needs_draft: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = False
    needs_oracle: ClassVar[bool] = False

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:  # noqa: ARG002 (protocol)
        """Choose nodes; see `SelectionPolicy.select`."""
        return probability_order(tree)[: context.budget].sort().values
