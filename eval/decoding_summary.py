"""From benchmark runs to the numbers of a decoding report: pure functions, JSON types out.

Definitions:

- *speed-up*: summed decoding time of the reference over that of the policy, on the same prompts. The reference is
  the faster of our autoregressive loop and transformers' ``generate``, by summed time. Paired bootstrap over groups
  of prompts.
- *accepted*: tokens emitted per step, the bonus token included (autoregressive: 1).
- *experts*: distinct routed experts per MoE layer that the verified nodes of a step touch, mean over layers and
  steps.
- *step_ms*: milliseconds of a step and of its stages; ``other`` is what no stage covers. Without the oracle's own
  work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.decoding.policies import POLICIES
from ecospec.eval.bootstrap import Interval, paired_difference, ratio_interval
from ecospec.eval.decoding_benchmark import AUTOREGRESSIVE, GENERATE, BenchmarkPrompt, Run

STAGES = ("predict", "draft", "select", "verify")
#: (policy, the policy it is compared with, at the same budget).
PAIRS = (("ecospec", "probability"), ("evict", "probability"), ("ecospec_oracle", "ecospec"))

Array = npt.NDArray[np.float64]


def summarise_runs(
    runs: Sequence[Run],
    prompts: Sequence[BenchmarkPrompt],
    *,
    top_k: int,
    pairs: Sequence[tuple[str, str]] = PAIRS,
) -> dict[str, Any]:
    """All numbers of every cost level.

    Args:
        runs: Every policy and reference on every prompt at every level.
        prompts: The prompts, for their groups.
        top_k: K, the experts per layer that plain decoding touches.
        pairs: Which are compared, each with the one it is compared with.

    Returns:
        Level → ``reference``, ``policies`` and ``comparisons``.
    """
    groups = [prompt.group_id for prompt in prompts]
    by_level: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        by_level.setdefault(run.level, {}).setdefault(run.policy, {})[run.prompt] = run
    return {level: _level(found, groups, top_k, pairs) for level, found in by_level.items()}


def _level(
    found: Mapping[str, Mapping[int, Run]], groups: Sequence[str], top_k: int, pairs: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    seconds = {name: _per_group(runs, groups, lambda run: run.seconds) for name, runs in found.items()}
    reference = min((AUTOREGRESSIVE, GENERATE), key=lambda name: float(seconds[name].sum()))
    total = {
        name: seconds[name] + _per_group(runs, groups, lambda run: run.prefill) for name, runs in found.items()
    }
    policies = {
        name: _speed(seconds[reference], seconds[name], total[reference], total[name])
        | _policy(runs, groups, top_k)
        | {"achievable": _achievable(name)}
        for name, runs in found.items()
    }
    comparisons = {
        f"{name}_over_{other}": _comparison(found, groups, seconds, (name, other))
        for name, other in pairs
        if name in found and other in found
    }
    return {"reference": reference, "policies": policies, "comparisons": comparisons}


def _achievable(name: str) -> bool:
    policy = POLICIES.get(name)
    return not getattr(policy, "needs_oracle", False)


def _per_group(runs: Mapping[int, Run], groups: Sequence[str], value: Any) -> Array:
    """Sum a value of the runs over the prompts of each group, float64 ``[G]``."""
    order = {group: index for index, group in enumerate(dict.fromkeys(groups[prompt] for prompt in sorted(runs)))}
    sums = np.zeros(len(order))
    for prompt, run in runs.items():
        sums[order[groups[prompt]]] += value(run)
    return sums


def _speed(reference: Array, own: Array, reference_total: Array, own_total: Array) -> dict[str, Any]:
    speedup = ratio_interval(reference, own)
    return {
        "speedup": speedup.mean,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "speedup_with_prefill": ratio_interval(reference_total, own_total).mean,
        "groups": speedup.groups,
    }


def _policy(runs: Mapping[int, Run], groups: Sequence[str], top_k: int) -> dict[str, Any]:
    steps = [step for run in runs.values() for step in run.steps]
    tokens = sum(len(run.tokens) for run in runs.values())
    seconds = sum(run.seconds for run in runs.values())
    decoded = tokens - len(runs)  # the first token of a run is the prompt's
    shared = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": decoded / seconds,
        "first_token_ms": _spread([1000 * run.prefill for run in runs.values()]),
    }
    if not steps:  # transformers' generate: one token a step, nothing but the target's forward
        totals = [1000 * run.seconds / max(1, len(run.tokens) - 1) for run in runs.values()]
        times = dict.fromkeys((*STAGES, "other"), _spread([0.0])) | {
            "verify": _spread(totals),
            "total": _spread(totals),
        }
        return shared | {
            "steps": decoded, "accepted": 1.0, "accepted_low": 1.0, "accepted_high": 1.0, "experts": float(top_k),
            "nodes": 1.0, "candidates": 0.0, "step_ms": times, "oracle_ms": 0.0,
        }  # fmt: skip
    accepted = _mean_over_steps(runs, groups, lambda step: step.emitted)
    times = {stage: _spread([1000 * getattr(step, stage) for step in steps]) for stage in (*STAGES, "total")}
    others = [1000 * (s.total - sum(getattr(s, stage) for stage in STAGES)) for s in steps]
    return shared | {
        "steps": len(steps),
        "accepted": accepted.mean,
        "accepted_low": accepted.low,
        "accepted_high": accepted.high,
        "experts": float(np.mean([step.mean_unique_experts for step in steps])),
        "nodes": float(np.mean([step.nodes for step in steps])),
        "candidates": float(np.mean([step.candidates for step in steps])),
        "step_ms": times | {"other": _spread(others)},
        "oracle_ms": 1000 * float(np.mean([step.oracle for step in steps])),
    }


def _mean_over_steps(runs: Mapping[int, Run], groups: Sequence[str], value: Any) -> Interval:
    top = _per_group(runs, groups, lambda run: sum(value(step) for step in run.steps))
    return ratio_interval(top, _per_group(runs, groups, lambda run: len(run.steps)))


def _spread(values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    p50, p95 = np.quantile(array, [0.5, 0.95])
    return {"mean": float(array.mean()), "p50": float(p50), "p95": float(p95)}


def _comparison(
    found: Mapping[str, Mapping[int, Run]],
    groups: Sequence[str],
    seconds: Mapping[str, Array],
    pair: tuple[str, str],
) -> dict[str, Any]:
    """Paired comparison of two policies: differences per step, and the ratio of summed times."""
    name, other = pair
    steps = {n: _per_group(found[n], groups, lambda run: len(run.steps)) for n in pair}

    def difference(value: Any) -> dict[str, Any]:
        sums = {n: _per_group(found[n], groups, lambda run: sum(value(s) for s in run.steps)) for n in pair}
        return paired_difference(sums[name], sums[other], steps[name], steps[other]).to_dict()

    return {
        "experts": difference(lambda step: step.mean_unique_experts),
        "accepted": difference(lambda step: step.emitted),
        "speedup": ratio_interval(seconds[other], seconds[name]).to_dict(),
    }
