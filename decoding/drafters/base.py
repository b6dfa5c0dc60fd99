"""The drafter protocol: what a decoding loop asks of anything that proposes candidate tokens.

A drafter follows one sequence. It learns about tokens only after the target has processed them, so that its tree is
a pure function of the prefix, whatever was drafted, verified or skipped before::

    drafter.prefill(prompt_ids[:-1], aux_hidden)     # may be called again: appends, for prompts in chunks
    tree = drafter.draft(prompt_ids[-1])             # the root is the last emitted token, not yet processed
    drafter.extend(path_ids, path_aux_hidden)        # root and accepted candidates, with the target's states
    drafter.reset()                                  # the next sequence
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ecospec.decoding.tree import DraftTree


@runtime_checkable
class Drafter(Protocol):
    """Draft trees along one sequence. Shapes: T tokens, A auxiliary layers, H the target's hidden size, N nodes."""

    @property
    def required_aux_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target whose **output** hidden states the drafter wants, in order; may be empty.

        Index 0 is the output of the first decoder layer (not the embedding).
        """
        ...

    def prefill(self, ids: Tensor, aux_hidden: Tensor) -> None:
        """Append tokens that the target has processed, and do the work for them now.

        Args:
            ids: int64 ``[T]``, target token ids.
            aux_hidden: floating ``[T, A * H]``, their hidden states, layers concatenated in the order required.
        """
        ...

    def draft(self, root_token: Tensor, *, depth: int = 3, top_k: int = 2, beam: int = 2) -> DraftTree:
        """Propose a tree below the last emitted token; nothing about the sequence is changed.

        Args:
            root_token: int64 ``[]`` or ``[1]``, the last emitted token, which the target has not processed.
            depth: Draft forwards, hence levels of candidates, at least 1.
            top_k: Candidates per expanded node, at least 1.
            beam: Nodes expanded per level, at least 1.

        Returns:
            The tree, node 0 the root, then level by level.
        """
        ...

    def extend(self, ids: Tensor, aux_hidden: Tensor) -> None:
        """Append tokens that the target has processed, leaving the work to the next `draft`.

        Args:
            ids: int64 ``[T]``: the root of the last step and its accepted candidates.
            aux_hidden: floating ``[T, A * H]``, as in `prefill`.
        """
        ...

    def reset(self) -> None:
        """Forget the sequence."""
        ...
