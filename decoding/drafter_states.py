"""A drafter's hidden states for predictors attached to it: along a text, and whether the two belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ecospec.decoding.capability import require_positions
from ecospec.decoding.drafters.base import Drafter, StateDrafter
from ecospec.decoding.target import TargetModel
from ecospec.decoding.tree import DraftTree
from ecospec.predictor.session import AttachedPredictor, Predictor


@torch.no_grad()
def text_states(target: TargetModel, drafter: StateDrafter, ids: Tensor, *, depth: int) -> Tensor:
    """Run target and drafter over a text once.

    Args:
        target: The target.
        drafter: Made for this target; the sequence it follows is not touched.
        ids: int64 ``[T]``, the text.
        depth: Deepest level of a draft tree.

    Returns:
        Floating ``[depth + 1, T, F_state]``, see `StateDrafter.text_states`.

    Raises:
        ValueError: A text beyond the target's positions.
    """
    require_positions(target.model, int(ids.shape[0]), 0, 0)
    ids = ids.to(target.device)
    with target.session(aux_layers=drafter.required_aux_layers, record_experts=False) as session:
        aux = session.extend(ids).aux
    assert aux is not None, "a drafter with states reads the target's"
    return drafter.text_states(ids, aux, depth)


@torch.no_grad()
def draft_along(
    target: TargetModel,
    drafter: Drafter,
    ids: Tensor,
    positions: Sequence[int],
    *,
    depth: int = 3,
    top_k: int = 2,
    beam: int = 2,
) -> Iterator[DraftTree]:
    """Draft the trees below some tokens of a text; the target runs over the text, not over the trees.

    Args:
        target: The target.
        drafter: Made for this target; it is reset before and after.
        ids: int64 ``[T]``, the text.
        positions: Positions of the roots, ascending, at least 1.
        depth: Draft forwards per tree.
        top_k: Candidates per expanded node.
        beam: Nodes expanded per level.

    Yields:
        One tree per position, in order.
    """
    ids = ids.to(target.device)
    before = ids[: positions[-1]]
    with target.session(aux_layers=drafter.required_aux_layers) as session:
        aux = session.extend(before).drafter_states
    drafter.reset()
    done = 0
    for position in positions:
        drafter.extend(ids[done:position], aux[done:position])
        done = position
        yield drafter.draft(ids[position : position + 1], depth=depth, top_k=top_k, beam=beam)
    drafter.reset()


def require_states(drafter: Drafter | None, predictor: Predictor) -> None:
    """Refuse a predictor that reads hidden states which this drafter does not give.

    Args:
        drafter: The drafter, if there is one.
        predictor: Any predictor; one that reads no hidden states passes.

    Raises:
        ValueError: No drafter, one without states, or another than the predictor was trained with.
    """
    if not isinstance(predictor, AttachedPredictor):
        return
    advice = "use the drafter it was trained with, or another predictor"
    if not isinstance(drafter, StateDrafter):
        what = "there is no drafter" if drafter is None else f"{type(drafter).__name__} gives none"
        raise ValueError(f"the predictor reads a drafter's hidden states, and {what}; {advice}")
    if drafter.state_fingerprint != predictor.drafter_fingerprint:
        raise ValueError(
            f"the predictor reads the hidden states of another drafter: state fingerprint "
            f"{predictor.drafter_fingerprint[:12]} there, {drafter.state_fingerprint[:12]} here; {advice}"
        )
