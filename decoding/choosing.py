"""How the next token is chosen at each verified node.

The seam for sampling: noise must be a function of (seed, sequence, absolute position) and nothing else, so that
every policy, budget and drafter emits the tokens plain autoregressive sampling would. So choosers get positions.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class TokenChooser(Protocol):
    """Chooses the target's next token at every node."""

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Choose one token per node; must not read back from the device.

        Args:
            logits: ``[N, V]``, the target's logits at each node.
            positions: int64 ``[N]``, absolute position of the token to be chosen (the node's own plus one).

        Returns:
            int64 ``[N]``.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Greedy:
    """The most probable token; the lowest id at exact ties, as in `torch.argmax`."""

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 (protocol)
        """Choose tokens; see `TokenChooser.choose`."""
        return logits.argmax(dim=-1)
