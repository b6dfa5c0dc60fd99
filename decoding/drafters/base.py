"""The drafter protocol: what a decoding loop asks of anything that proposes candidate tokens.

A drafter follows one sequence. It learns about tokens only after the target has processed them, so that its tree is
a pure function of the prefix, whatever was drafted, verified or skipped before::

    drafter.prefill(prompt_ids[:-1], aux_hidden)     # may be called again: appends, for prompts in chunks
    tree = drafter.draft(prompt_ids[-1])             # the root is the last emitted token, not yet processed
    drafter.extend(path_ids, path_aux_hidden)        # root and accepted candidates, with the target's states
    drafter.reset()                                  # the next sequence

`StateDrafter` adds what predictors attached to a drafter read; a drafter need not have it.
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


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """A drafter whose hidden states predictors may read (`ecospec.predictor.attached`).

    Shapes as in `Drafter`; F = F_token + F_state is the width of what describes a node.

    A node is described by its token and by the state before it: what the target's states make of the last processed
    token for the root, the drafter's own state of the parent for a candidate. Both exist for every candidate when
    the tree is grown, those at its leaves included, so reading them costs no forward.
    """

    @property
    def state_fingerprint(self) -> str:
        """SHA-256 hex of the weights that make the states; equal states mean equal fingerprints in any dtype."""
        ...

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Width of what describes a token, and of the state before it."""
        ...

    def node_states(self, tree: DraftTree) -> Tensor:
        """Describe the nodes of a tree that `draft` returned: floating ``[N, F]``, tokens first."""
        ...

    def token_states(self, ids: Tensor) -> Tensor:
        """Describe tokens alone: floating ``[..., F_token]`` of int64 ``[...]``."""
        ...

    def text_states(self, ids: Tensor, aux_hidden: Tensor, depth: int) -> Tensor:
        """States before every token of a text, as if a tree d levels above had proposed it, for d = 0 to `depth`.

        Args:
            ids: int64 ``[T]``.
            aux_hidden: floating ``[T, A * H]``, as in `prefill`.
            depth: Deepest level.

        Returns:
            Floating ``[depth + 1, T, F_state]``: entry ``[d, t]`` is what `node_states` gives for token t where it
            lies d levels below the root, on the text's own path. A root needs a token before it: there the deepest
            level that exists is taken, and row 0, before which there is nothing, holds zeros.
        """
        ...
