"""Recording draft trees: all candidates of a tree with what the target does at each of them.

`record_text` takes every position of a given text: the tree that the drafter proposes below each token, as a
decoding loop that came to this token would see it, for the tree depends on the prefix alone. `record_tree` takes
one tree at the end of a session's context; the decoding loop calls it at every step where it is asked to.

A text is worked through in stretches of B tokens, two forwards each. The first gives the drafter the target's
states of the stretch. The second verifies the B trees at once, grafted onto the stretch as their trunk
(`ecospec.decoding.tree.graft`), so each node sees the text up to its root and its own path, nothing else; then the
trunk joins the context and the candidates are forgotten.

Shapes: B trees of one forward, N nodes of a tree, M nodes of the joint tree, L MoE layers, K top-k, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ecospec.decoding.capability import require_positions
from ecospec.decoding.choosing import Greedy, TokenChooser
from ecospec.decoding.drafters.base import Drafter
from ecospec.decoding.target import TargetModel, TargetOutput, TargetSession
from ecospec.decoding.tree import DraftTree, chain, graft
from ecospec.decoding.verify import accepted_path


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecordedTree:
    """A draft tree and what the target does at each of its nodes; everything lies on the host.

    Attributes:
        position: Position of the root in the sequence, 0 for the first token.
        tree: The tree, N nodes.
        experts: int16 ``[N, L, K]``, the executed experts, ids ascending within a layer.
        target_logprobs: float32 ``[N]``, log-probability of each node's token under the target's softmax at its
            parent, not cumulative and without any temperature; 0 for the root.
        emitted: int64 ``[N]``, the target's own next token at each node.
        accepted: bool ``[N]``, whether the node lies on the path that the target's own tokens take from the root.
    """

    position: int
    tree: DraftTree
    experts: Tensor
    target_logprobs: Tensor
    emitted: Tensor
    accepted: Tensor


@torch.no_grad()
def record_tree(session: TargetSession, tree: DraftTree, chooser: TokenChooser) -> RecordedTree:
    """Run the target over a whole tree, then forget it.

    Args:
        session: Records experts; its context, the tokens before the root, is unchanged afterwards.
        tree: N nodes, root included.
        chooser: How the target's next token is chosen.
    """
    output = session.verify(tree)
    session.keep([])
    return _recorded(output, tree, [tree], session.length, chooser)[0]


@torch.no_grad()  # not inference mode: caches and tables that the drafter grows here outlive the call
def record_text(
    target: TargetModel,
    drafter: Drafter,
    ids: Tensor,
    positions: range,
    *,
    depth: int = 3,
    top_k: int = 2,
    beam: int = 2,
    trees_per_forward: int = 16,
    chooser: TokenChooser | None = None,
) -> list[RecordedTree]:
    """Record the tree below every token of a stretch of text.

    The host waits for the device once per ``trees_per_forward`` trees.

    Args:
        target: The target.
        drafter: Made for this target; it is reset before and after.
        ids: int64 ``[T]``, the text.
        positions: Positions of the roots, consecutive, at least 1 (a drafter needs a processed token).
        depth: Draft forwards per tree.
        top_k: Candidates per expanded node.
        beam: Nodes expanded per level.
        trees_per_forward: B.
        chooser: How the target's next token is chosen; greedy unless told.

    Returns:
        One tree per position, in order.

    Raises:
        ValueError: Positions outside of the text, ``trees_per_forward`` below 1, or a context beyond the target's
            positions.
    """
    if positions.step != 1 or not 1 <= positions.start < positions.stop <= ids.shape[0]:
        raise ValueError(
            f"positions must be consecutive, from 1 to at most {ids.shape[0] - 1}, the last of the text, "
            f"got {positions}"
        )
    if trees_per_forward < 1:
        raise ValueError(f"trees_per_forward must be at least 1, got {trees_per_forward}")
    require_positions(target.model, positions.start, len(positions), depth)
    ids = ids.to(target.device)
    chooser = chooser if chooser is not None else Greedy()
    recorded: list[RecordedTree] = []
    drafter.reset()
    with target.session(aux_layers=drafter.required_aux_layers) as session:
        before = ids[: positions.start]
        drafter.prefill(before, session.extend(before).drafter_states)
        for start in range(positions.start, positions.stop, trees_per_forward):
            roots = ids[start : min(start + trees_per_forward, positions.stop)]
            states = session.verify(chain(roots)).drafter_states
            session.keep([])
            trees = []
            for row in range(roots.shape[0]):
                root = roots[row : row + 1]
                trees.append(drafter.draft(root, depth=depth, top_k=top_k, beam=beam))
                drafter.extend(root, states[row : row + 1])
            joint = graft(trees)
            output = session.verify(joint)
            session.keep(range(len(trees)))
            recorded += _recorded(output, joint, trees, start, chooser)
    drafter.reset()
    return recorded


def _recorded(
    output: TargetOutput, joint: DraftTree, trees: Sequence[DraftTree], context: int, chooser: TokenChooser
) -> list[RecordedTree]:
    """Take the trees of one forward apart.

    Args:
        output: What the target gave for the joint tree, M rows.
        joint: `graft` of the trees, or the only tree itself.
        trees: B trees.
        context: Tokens before the first root.
        chooser: How the target's next token is chosen.
    """
    assert output.experts is not None, "the session must record experts"
    chosen = chooser.choose(output.logits, context + joint.depths + 1).cpu()
    target_logprobs = _given_parents(output.logits, joint).cpu()
    experts = output.experts.to(torch.int16).cpu()
    sizes = [len(tree) for tree in trees]
    whole = torch.cat([torch.stack([tree.tokens, tree.parents, tree.depths]) for tree in trees], dim=1).cpu()
    draft_logprobs = torch.cat([tree.logprobs for tree in trees]).cpu()
    recorded, start = [], len(trees)
    for row, (numbers, logprobs) in enumerate(
        zip(torch.split(whole, sizes, dim=1), torch.split(draft_logprobs, sizes), strict=True)
    ):
        rows = torch.arange(start - 1, start - 1 + len(logprobs))
        start += len(logprobs) - 1
        rows[0] = row
        tokens, parents, depths = numbers.unbind()
        emitted, given = chosen[rows], target_logprobs[rows]
        given[0] = 0.0  # of the trunk's tokens too, where the tree before has it
        accepted = torch.zeros(len(logprobs), dtype=torch.bool)
        accepted[accepted_path(tokens.tolist(), parents.tolist(), emitted.tolist())] = True
        tree = DraftTree(tokens, parents, logprobs, depths)
        recorded.append(RecordedTree(context + row, tree, experts[rows], given, emitted, accepted))
    return recorded


def _given_parents(logits: Tensor, tree: DraftTree) -> Tensor:
    """Log-probability of each node's token at its parent, float32 ``[M]``; the root's is meaningless.

    Args:
        logits: ``[M, V]``.
        tree: M nodes.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.to(wide).log_softmax(dim=-1)
    return logprobs[tree.parents.clamp(min=0), tree.tokens].to(torch.float32)
