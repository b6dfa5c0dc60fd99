"""Drafter-attached predictors in an overlap report: every token of a text at every level of a tree.

Such a predictor scores a token from the drafter's state before it, and that state depends on how far below the root
the token lies. So it stands in the report once for each level: the token as a root, as a child of the root, and so
on. Target and drafter run over a text once for all levels.

Shapes: T tokens, D deepest level, F width of what describes a token, L MoE layers, E experts.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ecospec.predictor.attached import DrafterAttachedPredictor
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.attached import DrafterView


class TextDescriptions:
    """What describes the tokens of a text, ``[D + 1, T, F]``; that of the last texts is kept.

    Args:
        view: Target and drafter.
        kept_tokens: Texts are kept as long as all of them have no more tokens; at least one is.
    """

    def __init__(self, view: DrafterView, kept_tokens: int) -> None:
        self._view = view
        self._kept_tokens = kept_tokens
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def __call__(self, ids: Tensor) -> Tensor:
        """Describe a text, int64 ``[T]``."""
        key = tuple(ids.tolist())
        if key not in self._kept:
            before = self._view.text_states(ids)
            tokens = self._view.token_states(ids).to(before.dtype)
            self._kept[key] = torch.cat((tokens.expand(before.shape[0], -1, -1), before), dim=-1)
            while len(self._kept) > 1 and sum(map(len, self._kept)) > self._kept_tokens:
                self._kept.popitem(last=False)
        return self._kept[key]


class LevelScorer:
    """A drafter-attached predictor at one level, for `ecospec.eval.overlap_report.measure_overlap`.

    Args:
        predictor: The predictor.
        describe: The texts' states.
        level: Levels below the root, 0 for the root itself.
    """

    def __init__(self, predictor: DrafterAttachedPredictor, describe: TextDescriptions, level: int) -> None:
        self._predictor, self._describe, self._level = predictor, describe, level

    @property
    def spec(self) -> RoutingSpec:
        """The target it was made for."""
        return self._predictor.spec

    def score_sequence(self, ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """Scores ``[T, L, E]`` of int64 ``[T]``; the first tokens lie as deep as a tree can have them."""
        del experts
        return self._predictor.score_states(self._describe(ids)[self._level])
