"""Choosing ε' of ``ecospec`` on tuning prompts, by modelled time per token.

ε' trades probability against new experts. Each value of the grid decodes the tuning prompts once; the number of
verified nodes and the unique experts of every step then give the time of the steps by a measured cost table.
Decoding is deterministic and a cost level changes no routing, so one set of runs on the plain target serves all
levels, nothing is timed here, and the result can be reproduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ecospec.decoding.cost_model import CostModel
from ecospec.decoding.drafters.base import Drafter
from ecospec.decoding.loop import DecodingLoop
from ecospec.decoding.policies import make_policy
from ecospec.decoding.records import StepRecord
from ecospec.decoding.target import TargetModel
from ecospec.eval.decoding_benchmark import BenchmarkPrompt, BenchmarkSettings
from ecospec.predictor.session import Predictor

#: Values of ε' that are tried (design §8).
EPSILON_GRID = (0.03, 0.1, 0.25, 0.5, 1.0, 2.0)


@dataclasses.dataclass(frozen=True, slots=True)
class EpsilonTrial:
    """One value of ε' on the tuning prompts.

    Attributes:
        epsilon: ε'.
        accepted: Tokens per step, bonus included.
        experts: Unique experts per MoE layer and step.
        seconds_per_token: Cost level → modelled seconds of the target's steps per emitted token.
    """

    epsilon: float
    accepted: float
    experts: float
    seconds_per_token: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class EpsilonTuning:
    """Result of tuning.

    Attributes:
        best: Cost level → ε' with the least modelled time per token; the smaller one at ties.
        trials: All values tried.
        prompts: Number of tuning prompts.
    """

    best: dict[str, float]
    trials: tuple[EpsilonTrial, ...]
    prompts: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "best": self.best,
            "prompts": self.prompts,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
        }


def modelled_seconds(steps: Sequence[StepRecord], cost: CostModel) -> float:
    """Sum of T(n, U) over steps: n verified nodes, U unique experts per layer."""
    return sum(cost.time(step.nodes, step.mean_unique_experts) for step in steps)


def tune_epsilon(
    target: TargetModel,
    drafter: Drafter,
    predictor: Predictor,
    prompts: Sequence[BenchmarkPrompt],
    costs: Mapping[str, CostModel],
    *,
    settings: BenchmarkSettings,
    grid: Sequence[float] = EPSILON_GRID,
    progress: Callable[[float], None] | None = None,
) -> EpsilonTuning:
    """Decode the tuning prompts with every ε' of the grid.

    Args:
        target: The target; widening and ballast change nothing but the time this takes.
        drafter: Made for it.
        predictor: Made for it.
        prompts: Tuning prompts, disjoint from those reported on.
        costs: Cost tables by level.
        settings: Budget, tree and number of tokens.
        grid: Values of ε'.
        progress: Called with ε' after each prompt.

    Raises:
        ValueError: No prompt, no cost table or an empty grid.
    """
    if not prompts or not costs or not grid:
        raise ValueError(
            f"tuning needs prompts, cost tables and a grid, got {len(prompts)}, {len(costs)} and {len(grid)}"
        )
    trials = []
    for epsilon in sorted(grid):
        loop = DecodingLoop(
            target,
            drafter,
            predictor,
            make_policy("ecospec", epsilon=epsilon),
            budget=settings.budget,
            depth=settings.depth,
            top_k=settings.top_k,
            beam=settings.beam,
            timing=False,
        )
        steps: list[StepRecord] = []
        for prompt in prompts:
            ids = torch.tensor(prompt.ids, dtype=torch.int64)
            steps.extend(loop.generate(ids, settings.max_new_tokens, settings.eos).steps)
            if progress is not None:
                progress(epsilon)
        tokens = sum(step.emitted for step in steps)
        trials.append(
            EpsilonTrial(
                epsilon,
                tokens / len(steps),
                sum(step.mean_unique_experts for step in steps) / len(steps),
                {level: modelled_seconds(steps, cost) / tokens for level, cost in costs.items()},
            )
        )
    best = {level: min(trials, key=lambda trial: trial.seconds_per_token[level]).epsilon for level in costs}
    return EpsilonTuning(best, tuple(trials), len(prompts))
