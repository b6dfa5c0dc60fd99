"""Measuring the cost model: steps of the target with forced and with its own routing, and the size of its ballast.

Everything is timed through `TargetSession.verify`, the call the decoding loop makes, on a context of fixed length.

- **T(n, U)**: before each measurement the experts modules' index argument is replaced by one with exactly U
  distinct experts over the n tokens, drawn anew for every layer and repeat: no weights stay in a cache by chance.
- **C(n)**: the same trees with the target's own routing: the first n nodes of each in order of probability.

Measurements run in rounds, each round over all cells in random order; the median is kept.

Shapes: n tokens, K experts per token, E experts, U unique experts of a layer, T context tokens, N tree nodes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ecospec.decoding.cost_model import CostModel, CostRow
from ecospec.decoding.forced_routing import ForcedRouting, forced_routes, unique_grid
from ecospec.decoding.measurement import hardware_string, interleaved, load_average, measure_seconds
from ecospec.decoding.target import TargetModel, TargetSession
from ecospec.decoding.tree import DraftTree
from ecospec.decoding.widening import CostLevel, add_ballast_, remove_ballast_
from ecospec.decoding.workload import Workload, nested_trees
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.hooks import find_moe_layers

Stopwatch = Callable[[Callable[[], object], torch.device], float]
Progress = Callable[[int, int], None]
Report = Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """How to measure.

    Attributes:
        max_tokens: Largest n; 11 is a whole tree of 3 drafts x top-2.
        points_per_row: Values of U measured for each n, at most.
        repeats: Measurements of each (n, U); the median counts.
        curve_repeats: Measurements of each (tree, n) of the mean curve.
        seed: Of the forced routing and of the order.

    Raises:
        ValueError: A field is below 1 (``points_per_row`` below 2).
    """

    max_tokens: int = 11
    points_per_row: int = 5
    repeats: int = 7
    curve_repeats: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        for name, least in {"max_tokens": 1, "points_per_row": 2, "repeats": 1, "curve_repeats": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"CalibrationConfig.{name} must be at least {least}, got {getattr(self, name)}")


@torch.inference_mode()
def calibrate(
    target: TargetModel,
    spec: RoutingSpec,
    level: CostLevel,
    workload: Workload,
    config: CalibrationConfig,
    *,
    provenance: dict[str, Any],
    ballast_target_ratio: float | None = None,
    stopwatch: Stopwatch = measure_seconds,
    progress: Progress | None = None,
) -> CostModel:
    """Measure a cost model.

    Args:
        target: The target, at its cost level already.
        spec: Its RoutingSpec.
        level: The cost level it is at, for the record.
        workload: Trees of at least ``config.max_tokens`` nodes.
        config: How to measure.
        provenance: Evidence to store.
        ballast_target_ratio: Ratio that the ballast was sized for, where `suggest_ballast` sized it.
        stopwatch: Seconds of a call.
        progress: Called with (measurements done, all measurements).

    Raises:
        ValueError: A tree is too small.
    """
    load = load_average()
    rig = _Rig(target, workload, nested_trees(workload, config.max_tokens), stopwatch)
    cells = [
        (tokens, unique)
        for tokens in range(1, config.max_tokens + 1)
        for unique in unique_grid(tokens, spec.top_k, spec.num_experts, config.points_per_row)
    ]
    curve_total = len(workload.trees) * config.max_tokens * config.curve_repeats
    total = len(cells) * config.repeats + curve_total

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    curve, unique_curve = rig.curve(config.curve_repeats, config.seed, report)
    table = rig.table(spec, cells, config, lambda done: report(curve_total + done))
    return CostModel(
        level=level.name,
        widening_factor=level.widening_factor,
        ballast_bytes_per_layer=level.ballast_bytes_per_layer,
        ballast_target_ratio=ballast_target_ratio,
        spec=spec,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        hardware=hardware_string(target.device),
        experts_implementation=str(cast("Any", target.model.config)._experts_implementation),  # noqa: SLF001 - no public name
        context_length=int(workload.contexts[0].shape[0]),
        repeats=config.repeats,
        load_average=None if math.isnan(load) else load,
        table=table,
        workload=workload.origin,
        mean_curve=curve,
        mean_unique=unique_curve,
        provenance=provenance,
    )


@dataclasses.dataclass(frozen=True)
class _Rig:
    """A target and what to verify with it.

    Attributes:
        target: The target.
        workload: Contexts.
        steps: For each context, trees of 1, 2, ... nodes.
        stopwatch: Seconds of a call.
    """

    target: TargetModel
    workload: Workload
    steps: list[list[DraftTree]]
    stopwatch: Stopwatch

    def time(self, session: TargetSession, tree: DraftTree) -> float:
        """Seconds of verifying a tree; the context is left as it was."""
        seconds = self.stopwatch(lambda: session.verify(tree), self.target.device)
        session.keep([])
        return seconds

    def curve(self, repeats: int, seed: int, report: Report) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean seconds and mean unique experts per layer of steps of 1, 2, ... tokens."""
        sizes = range(len(self.steps[0]))
        seconds: list[list[float]] = [[] for _ in sizes]
        unique: list[list[float]] = [[] for _ in sizes]
        done = 0
        for number, (context, trees) in enumerate(zip(self.workload.contexts, self.steps, strict=True)):
            with self.target.session() as session:
                session.extend(context)
                for size in sizes:  # warm-up, and the routing to count
                    experts = session.verify(trees[size]).experts
                    session.keep([])
                    assert experts is not None
                    unique[size].append(_unique_per_layer(experts))
                samples: list[list[float]] = [[] for _ in sizes]
                for size in interleaved(sizes, repeats, seed + number):
                    samples[size].append(self.time(session, trees[size]))
                    done += 1
                    report(done)
            for size in sizes:
                seconds[size].append(statistics.median(samples[size]))
        return tuple(map(statistics.fmean, seconds)), tuple(map(statistics.fmean, unique))

    def table(
        self, spec: RoutingSpec, cells: Sequence[tuple[int, int]], config: CalibrationConfig, report: Report
    ) -> tuple[CostRow, ...]:
        """Median seconds of every (n, U), on the first context."""
        samples: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
        generator = torch.Generator().manual_seed(config.seed)
        forced = ForcedRouting(find_moe_layers(self.target.model))
        # The first round, one measurement of each cell, warms up and is thrown away.
        rounds = interleaved(cells, config.repeats + 1, config.seed)
        with self.target.session() as session, forced.active():
            session.extend(self.workload.contexts[0])
            for done, (tokens, unique) in enumerate(rounds, start=1 - len(cells)):
                routes = [
                    forced_routes(tokens, spec.top_k, unique, spec.num_experts, generator).to(self.target.device)
                    for _ in range(spec.num_layers)
                ]
                forced.set(routes)
                elapsed = self.time(session, self.steps[0][tokens - 1])
                if done > 0:
                    samples[tokens, unique].append(elapsed)
                    report(done)
        rows: dict[int, dict[int, float]] = {}
        for (tokens, unique), values in samples.items():
            rows.setdefault(tokens, {})[unique] = statistics.median(values)
        return tuple(
            CostRow(tokens, tuple(map(float, sorted(row))), tuple(row[unique] for unique in sorted(row)))
            for tokens, row in sorted(rows.items())
        )


def _unique_per_layer(experts: Tensor) -> float:
    """Mean over layers of the distinct ids in int64 ``[n, L, K]``; waits for the device."""
    return statistics.fmean(len(set(layer.flatten().tolist())) for layer in experts.unbind(1))


@dataclasses.dataclass(frozen=True, slots=True)
class BallastSuggestion:
    """How much ballast gives a target ratio of step times.

    Attributes:
        bytes_per_layer: Suggested size; 0 where the ratio is reached without any.
        target_ratio: The ratio asked for.
        bare_ratio: Measured ratio without ballast.
        ratio: Measured ratio with the suggested ballast.
    """

    bytes_per_layer: int
    target_ratio: float
    bare_ratio: float
    ratio: float


@torch.inference_mode()
def suggest_ballast(
    target: TargetModel,
    workload: Workload,
    *,
    target_ratio: float = 2.0,
    tokens: int = 4,
    overhead_seconds: float = 0.0,
    trial_bytes: int = 16 * 2**20,
    repeats: int = 3,
    stopwatch: Stopwatch = measure_seconds,
) -> BallastSuggestion:
    """Find the ballast at which a step of several tokens takes ``target_ratio`` times a step of one.

    The times of both steps are measured without ballast and with a trial amount, and taken as linear in between and
    beyond; the ratio is then measured at the size found. The target is bare before and after.

    Args:
        target: The target without ballast, widened.
        workload: Contexts and trees; the first ``tokens`` nodes in order of probability are verified.
        target_ratio: Step time over autoregressive step time.
        tokens: Nodes of the larger step.
        overhead_seconds: What a speculation step takes besides verification (drafting, selecting).
        trial_bytes: Ballast per layer of the second measurement.
        repeats: Measurements of each step and context.
        stopwatch: Seconds of a call.

    Raises:
        ValueError: No amount of ballast reaches the ratio.
    """
    rig = _Rig(target, workload, nested_trees(workload, tokens), stopwatch)

    def ends() -> tuple[float, float]:
        curve, _ = rig.curve(repeats, 0, lambda _: None)
        return curve[0], curve[-1] + overhead_seconds

    def ends_with(size: int) -> tuple[float, float]:
        add_ballast_(target.model, size)
        try:
            return ends()
        finally:
            remove_ballast_(target.model)

    one, many = ends()
    bare_ratio = many / one
    if bare_ratio <= target_ratio:
        return BallastSuggestion(0, target_ratio, bare_ratio, bare_ratio)
    trial_one, trial_many = ends_with(trial_bytes)
    slope_one, slope_many = (trial_one - one) / trial_bytes, (trial_many - many) / trial_bytes
    gain = target_ratio * slope_one - slope_many
    if gain <= 0:
        raise ValueError(
            f"ballast adds {slope_many / max(slope_one, 1e-30):.2f} times as much to a step of {tokens} tokens as "
            f"to a step of one, so the ratio never falls to {target_ratio}; choose a higher ratio"
        )
    size = max(1, round((many - target_ratio * one) / gain / 2**20)) * 2**20
    with_one, with_many = ends_with(size)
    return BallastSuggestion(size, target_ratio, bare_ratio, with_many / with_one)
