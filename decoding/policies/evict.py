"""``evict``: adapt the number of verified candidates to what verification costs (arXiv 2605.00342).

Training-free: of the prefixes of the probability order, verify the one with the most expected tokens per second::

    n* = argmax over n <= γ of (1 + Σ P of the n-1 best candidates) / C(n)

C(n) is the profiled mean time of a target pass over n tokens; it knows how many tokens are verified, not which
experts they touch. n counts the root.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from ecospec.decoding.policies.base import SelectionContext, path_probabilities, probability_order
from ecospec.decoding.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Evict:
    """Prefix of the probability order with the best expected tokens per second.

    Attributes:
        mean_curve: Seconds of a target pass over 1, 2, … tokens; at least as long as the budget.

    Raises:
        ValueError: The curve is empty or holds a number that is not positive.
    """

    mean_curve: tuple[float, ...]
    name: ClassVar[str] = "evict"
    needs_draft: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = False
    needs_oracle: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate the curve."""
        object.__setattr__(self, "mean_curve", tuple(float(seconds) for seconds in self.mean_curve))
        if not self.mean_curve or not all(math.isfinite(seconds) and seconds > 0 for seconds in self.mean_curve):
            raise ValueError(
                "evict: mean_curve must list the positive seconds of passes over 1, 2, … tokens, "
                f"got {self.mean_curve}; measure it with calibrate-cost"
            )

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:  # noqa: ARG002 (protocol)
        """Choose nodes; see `SelectionPolicy.select`.

        The number of nodes decides tensor shapes, so the host waits for the device once.

        Raises:
            ValueError: The curve is shorter than the budget.
        """
        if len(self.mean_curve) < context.budget:
            raise ValueError(
                f"evict: mean_curve covers {len(self.mean_curve)} tokens, the budget is {context.budget}; "
                "calibrate the cost up to the budget or lower the budget"
            )
        order = probability_order(tree)[: context.budget]
        seconds = torch.tensor(self.mean_curve[: len(order)], dtype=torch.float64, device=order.device)
        # The root's P is 1: the running sum is already 1 + ΣP of the candidates.
        tokens = path_probabilities(tree)[order].cumsum(dim=0)
        count = int((tokens / seconds).argmax()) + 1
        return order[:count].sort().values
