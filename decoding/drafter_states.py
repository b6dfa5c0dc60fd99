"""A drafter's hidden states for predictors attached to it: along a text, and whether the two belong together."""

from __future__ import annotations

import torch
from torch import Tensor

from ecospec.decoding.capability import require_positions
from ecospec.decoding.drafters.base import Drafter, StateDrafter
from ecospec.decoding.target import TargetModel
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
