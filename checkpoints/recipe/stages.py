"""The registry of stages, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.recipe.backbone import backbone_complete, make_backbone
from checkpoints.recipe.corpus import make_manifest, manifest_complete
from checkpoints.recipe.head import head_complete, make_head
from checkpoints.recipe.predictor import make_predictor, make_traces, predictor_complete, traces_complete
from checkpoints.recipe.settings import Settings
from checkpoints.recipe.tables import make_tables, tables_complete
from checkpoints.recipe.target import make_target, target_complete
from checkpoints.recipe.tokenizer import make_tokenizer, tokenizer_complete


@dataclass(frozen=True)
class Stage:
    """One step of the recipe.

    Attributes:
        run: Produces the outputs; continues where an interrupted run stopped.
        complete: Says whether the outputs exist, so that the stage is skipped.
        summary: One line for the help text.
        shipped: Whether its outputs are among the finished files; the others are run only when named.
    """

    run: Callable[[Settings], None]
    complete: Callable[[Settings], bool]
    summary: str
    shipped: bool = True


#: Add a stage here; later stages may read what earlier ones wrote.
STAGES: dict[str, Stage] = {
    "manifest": Stage(make_manifest, manifest_complete, "groups of the standard library and their splits"),
    "tokenizer": Stage(make_tokenizer, tokenizer_complete, "byte-level BPE of 2,048 tokens"),
    "target": Stage(make_target, target_complete, "Qwen3-MoE target, 64 experts top-4, about 35 minutes"),
    "head": Stage(make_head, head_complete, "EAGLE-3 head of the target, about 40 minutes"),
    "traces": Stage(make_traces, traces_complete, "routing traces to train the predictor on, about 15 minutes"),
    "tables": Stage(make_tables, tables_complete, "tables and perceptron of the same traces, 6 minutes"),
    "predictor": Stage(make_predictor, predictor_complete, "predictor of the target's experts, about an hour"),
    "backbone": Stage(
        make_backbone,
        backbone_complete,
        "language model that benchmarks start predictors from, 20 minutes; only when named",
        shipped=False,
    ),
}
