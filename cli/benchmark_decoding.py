"""``ecospec benchmark-decoding``: selection policies side by side, timed and checked for losslessness."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ecospec.cli.benchmark_parts import (
    Bench,
    BenchmarkDecodingConfig,
    ballast_switch,
    benchmark_policy,
    cost_levels,
    parts,
    read_costs,
    read_prompts,
)
from ecospec.cli.checks import require_drafter, require_predictor
from ecospec.cli.device import require_device
from ecospec.cli.output import check_output, prepare_output

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.decoding.cost_model import CostModel
    from ecospec.decoding.widening import CostLevel
    from ecospec.eval.decoding_benchmark import BenchmarkPrompt, LevelPlan

__all__ = ["BenchmarkDecodingConfig", "run"]


def run(config: BenchmarkDecodingConfig) -> None:
    """Measure, write the report, and show its tables."""
    require_device(config.device)
    check_output(config.out, resume=config.resume)
    require_drafter(config.drafter)
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.cli.tables import show_table  # noqa: PLC0415
    from ecospec.decoding.measurement import hardware_string, require_quiet  # noqa: PLC0415
    from ecospec.eval.decoding_benchmark import run_benchmark, single_thread  # noqa: PLC0415
    from ecospec.eval.decoding_rendering import lossless_line, summary_table  # noqa: PLC0415
    from ecospec.eval.decoding_report import decoding_report, write_decoding_report  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415

    console = Console(stderr=True)
    spec = routing_spec_of(config.target)
    require_predictor(config.predictor, spec, config.target)
    costs = read_costs(config, spec)
    levels = cost_levels(config, costs)
    sources = read_prompts(config)
    load = require_quiet(allow_load=config.allow_load)
    bench = Bench.open(config, spec, sources)
    prompts = bench.prompts(config.prompts, config.number, config.seed)
    prepare_output(config.out, resume=config.resume)
    with single_thread(config.threads):
        epsilons, tuned = _epsilons(bench, prompts, costs, levels, console)
        plans = _plans(bench, levels, costs, epsilons, console)
        runs = len(prompts) * len(plans) * (len(parts(config.policies)) + 1)
        with _progress(console, "decode", runs) as advance:
            result = run_benchmark(
                bench.model,
                prompts,
                plans,
                target=bench.target,
                drafter=bench.drafter,
                predictor=bench.predictor,
                settings=bench.settings,
                progress=lambda level, policy: advance(f"{level}: {policy}"),
            )
    evidence = {"hardware": hardware_string(bench.target.device), "threads": config.threads, "seed": config.seed}
    report = decoding_report(
        result,
        prompts,
        bench.settings,
        spec,
        levels={name: _level_facts(level, epsilons[name]) for name, level in levels.items()},
        inputs={
            "target": str(config.target),
            "drafter": str(config.drafter),
            "predictor": str(config.predictor),
            "prompts": config.prompts,
            "cost": config.cost,
            "epsilon": tuned,
        },
        provenance={**provenance(), **evidence, "dtype": config.dtype, "load_at_start": load},
        notes=_notes(bench, costs, load),
    )
    write_decoding_report(report, config.out)
    show_table(Console(), summary_table(report))
    Console().print(lossless_line(report), soft_wrap=True)
    Console().print(f"written to {config.out}", soft_wrap=True)


def _epsilons(
    bench: Bench,
    prompts: Sequence[BenchmarkPrompt],
    costs: Mapping[str, CostModel],
    levels: Mapping[str, CostLevel],
    console: Console,
) -> tuple[dict[str, float], dict[str, Any]]:
    """ε' of every level, and how it came about."""
    config = bench.config
    if not config.tune:
        return dict.fromkeys(levels, config.epsilon), {"given": config.epsilon}
    from ecospec.eval.overlap_report import require_disjoint  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.eval.tuning import EPSILON_GRID, tune_epsilon  # noqa: PLC0415

    tuning = bench.prompts(config.tuning_prompts, config.tuning_number, config.seed)
    require_disjoint(
        {prompt.group_id for prompt in tuning},
        {prompt.group_id for prompt in prompts},
        training=f"the tuning prompts {config.tuning_prompts}",
        report=f"the prompts {config.prompts}",
        advice="choose tuning prompts of other groups with --tuning-prompts",
    )
    with _progress(console, "tune ε'", len(EPSILON_GRID) * len(tuning)) as advance:
        found = tune_epsilon(
            bench.target,
            bench.drafter,
            bench.predictor,
            tuning,
            {name: costs[name] for name in levels},
            settings=bench.settings,
            progress=lambda epsilon: advance(f"ε' = {epsilon}"),
        )
    return found.best, {"tuned_on": config.tuning_prompts} | found.to_dict()


def _plans(
    bench: Bench,
    levels: Mapping[str, CostLevel],
    costs: Mapping[str, CostModel],
    epsilons: Mapping[str, float],
    console: Console,
) -> dict[str, LevelPlan]:
    """Widen the target once, and say for every level which policies run and how ballast comes and goes."""
    from ecospec.decoding.experts_choice import use_experts, use_fastest_experts  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.decoding.widening import widen_  # noqa: PLC0415
    from ecospec.eval.decoding_benchmark import LevelPlan  # noqa: PLC0415

    config = bench.config
    plans = {
        name: LevelPlan(
            {p: benchmark_policy(config, p, epsilons[name], costs.get(name)) for p in parts(config.policies)},
            ballast_switch(bench.model, level.ballast_bytes_per_layer),
        )
        for name, level in levels.items()
    }
    report = widen_(bench.model, next(iter(levels.values())).widening_factor)
    named = {cost.experts_implementation for cost in costs.values()}
    # Tables speak for the implementation they were measured with; without one, what is fastest here.
    experts = use_experts(bench.model, named.pop()) if len(named) == 1 else use_fastest_experts(bench.model)
    console.print(
        f"experts {report.width_before} -> {report.width_after} neurons, {report.expert_bytes / 1e6:.2f} MB each, "
        f"run by {experts}; the target grew by {report.memory.extra_bytes / 2**20:,.0f} MiB",
        soft_wrap=True,
    )
    return plans


def _level_facts(level: CostLevel, epsilon: float) -> dict[str, Any]:
    return {
        "widening_factor": level.widening_factor,
        "ballast_bytes_per_layer": level.ballast_bytes_per_layer,
        "epsilon": epsilon,
    }


def _notes(bench: Bench, costs: Mapping[str, CostModel], load: float) -> list[str]:
    """Caveats shown on top of the report."""
    from ecospec.decoding.measurement import MAX_LOAD, hardware_string  # noqa: PLC0415 - keeps `--help` fast

    here, threads = hardware_string(bench.target.device), bench.config.threads
    notes = []
    if load > MAX_LOAD:
        notes.append(
            f"Measured while other work ran (load average {load:.2f} at the start): times are less certain than "
            "their intervals say."
        )
    for name, cost in costs.items():
        if (cost.hardware, cost.threads) != (here, threads):
            notes.append(
                f"The cost table of {name} was measured on {cost.hardware} with {cost.threads} thread(s), the "
                f"benchmark on {here} with {threads}."
            )
    return notes


@contextlib.contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    from rich.progress import Progress  # noqa: PLC0415 - keeps `--help` fast

    with Progress(console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{what}, {text}")
