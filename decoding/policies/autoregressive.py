"""``autoregressive``: no drafting, one token a step. The baseline of every table."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ecospec.decoding.policies.base import SelectionContext
from ecospec.decoding.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Verify the root alone; the loop neither drafts nor predicts for it."""

    name: ClassVar[str] = "autoregressive"
    needs_draft: ClassVar[bool] = False
    needs_predictor: ClassVar[bool] = False
    needs_oracle: ClassVar[bool] = False

    def select(self, tree: DraftTree, sets: Tensor | None, context: SelectionContext) -> Tensor:  # noqa: ARG002 (protocol)
        """Return the root's index."""
        return torch.zeros(1, dtype=torch.int64, device=tree.tokens.device)
