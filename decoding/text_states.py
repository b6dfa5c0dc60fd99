"""A drafter's hidden states along a text that the target reads once; what attached predictors are trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from ecospec.decoding.capability import require_positions
from ecospec.decoding.drafters.base import StateDrafter
from ecospec.decoding.target import TargetModel


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
