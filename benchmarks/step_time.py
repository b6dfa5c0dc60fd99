"""How long does a step take, against tokens and unique experts, at both cost levels, and with which experts code?

    python benchmarks/step_time.py --target checkpoints/target

Writes ``step_time.json``, ``step_time.md`` and ``step_time.svg``. Three questions:

1. Does time follow the experts a step touches, at the same number of tokens? (T(n, U) of `calibrate-cost`.)
2. How much longer is a step of n tokens than a step of one, with the target's own routing (C(n)), bare and with
   ballast?
3. What do other implementations of the experts take for the same steps?
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.decoding.calibration import CalibrationConfig, calibrate
from ecospec.decoding.cost_model import CostModel
from ecospec.decoding.experts_choice import CANDIDATES, use_experts
from ecospec.decoding.experts_kernel import IMPLEMENTATION
from ecospec.decoding.forced_routing import ForcedRouting, forced_routes
from ecospec.decoding.measurement import interleaved, measure_seconds
from ecospec.decoding.target import TargetModel
from ecospec.decoding.widening import COST_LEVELS, CostLevelReport, add_ballast_, apply_cost_level_, remove_ballast_
from ecospec.decoding.workload import Workload, nested_trees, text_workload
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.hooks import find_moe_layers

NODES = 16
LEVEL_KEYS = ("ballast_bytes_per_layer", "table", "mean_curve", "mean_unique")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimeConfig:
    """Step time against tokens and unique experts, at both cost levels."""

    target: Path | None = None
    """Folder of the target; None takes a random one of the demo target's shape."""
    prompts: str = "stdlib:tuning"
    """Text that is processed."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus."""
    contexts: int = 8
    """Number of prompts."""
    context_length: int = 128
    """Tokens in the cache."""
    repeats: int = 9
    """Measurements of each cell."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of prompts, routing and order."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""


def run(config: StepTimeConfig) -> None:
    """Measure and write the three files."""
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    model, spec, prompts = _load(config)
    levels: dict[str, CostModel] = {}
    report = apply_cost_level_(model, COST_LEVELS["bare"])
    target = TargetModel(model)
    workload = text_workload(prompts, context_length=config.context_length, nodes=NODES)
    kernels = compare_implementations(target, spec, workload, config, report.experts_implementation)
    settings = CalibrationConfig(repeats=config.repeats, seed=config.seed)
    for name, level in COST_LEVELS.items():
        print(f"measuring {name}", flush=True)
        if level.ballast_bytes_per_layer:
            add_ballast_(model, level.ballast_bytes_per_layer)
        levels[name] = calibrate(target, spec, level, workload, settings, provenance={})
        remove_ballast_(model)
    results: dict[str, Any] = {
        "target": "random, of the demo target's shape" if config.target is None else str(config.target),
        "expert_bytes": report.widening.expert_bytes,
        "widening_extra_bytes": report.widening.memory.extra_bytes,
        "levels": {name: {key: cost.to_dict()[key] for key in LEVEL_KEYS} for name, cost in levels.items()},
        "experts_implementation": report.experts_implementation,
        "experts_implementations": kernels,
    }
    common.write_json(config.out / "step_time.json", common.result("step_time", conditions, config, results))
    draw(levels, config.out / "step_time.svg")
    parts = _page(results["target"], report, levels, kernels)
    common.write_page(config.out / "step_time.md", "Step time", conditions, parts)
    print("\n\n".join(parts))


def _load(config: StepTimeConfig) -> tuple[Any, RoutingSpec, list[Tensor]]:
    """The target, its spec and token ids."""
    length = config.context_length + NODES
    if config.target is None:
        return _random_target(config.seed), _random_spec(), _random_prompts(config, length)
    from ecospec.cli.calibrate_cost import CalibrateCostConfig, load_target_and_prompts  # noqa: PLC0415

    options = CalibrateCostConfig(
        target=config.target,
        out=config.out,
        prompts=config.prompts,
        groups=config.groups,
        contexts=config.contexts,
        context_length=config.context_length,
        max_tokens=NODES,
        seed=config.seed,
    )
    prompts, model = load_target_and_prompts(options)
    return model, routing_spec_of(config.target), prompts


def _random_target(seed: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - only for the random target

    torch.manual_seed(seed)
    shape = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return Qwen3MoeForCausalLM(shape).eval()


def _random_spec() -> RoutingSpec:
    return RoutingSpec(6, tuple(range(6)), 64, 4, 2048, "0" * 64, "random", "0" * 64)


def _random_prompts(config: StepTimeConfig, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    return [torch.randint(0, 2048, (length,), generator=generator) for _ in range(config.contexts)]


@torch.inference_mode()
def compare_implementations(
    target: TargetModel, spec: RoutingSpec, workload: Workload, config: StepTimeConfig, chosen: str
) -> list[dict[str, Any]]:
    """Time the same steps with every experts implementation, and go back to the chosen one.

    Returns:
        One row per (tokens, unique): both, and the median seconds of each implementation.
    """
    model: Any = target.model
    k, experts = spec.top_k, spec.num_experts
    # Few, typical and most unique experts; unions of real routing are near five eighths of n * K.
    cells = [
        (n, u)
        for n in (1, 2, 4, 8, 16)
        for u in sorted({max(k, min(experts, share * n * k // 8)) for share in (0, 5, 8)})
    ]
    jobs = [(name, cell) for name in CANDIDATES for cell in cells]
    samples: dict[Any, list[float]] = {job: [] for job in jobs}
    trees = nested_trees(workload, NODES)[0]
    forced = ForcedRouting(find_moe_layers(model))
    generator = torch.Generator().manual_seed(config.seed)
    with target.session() as session, forced.active():
        session.extend(workload.contexts[0])
        for done, job in enumerate(interleaved(jobs, config.repeats + 1, config.seed)):
            name, (tokens, unique) = job
            model.set_experts_implementation(name)
            forced.set([forced_routes(tokens, k, unique, experts, generator) for _ in range(spec.num_layers)])
            tree = trees[tokens - 1]
            seconds = measure_seconds(functools.partial(session.verify, tree), target.device)
            session.keep([])
            if done >= len(jobs):  # the first round warms up
                samples[job].append(seconds)
    use_experts(model, chosen)
    return [
        {"tokens": tokens, "unique": unique}
        | {name: statistics.median(samples[name, (tokens, unique)]) for name in CANDIDATES}
        for tokens, unique in cells
    ]


def _page(
    target: str, report: CostLevelReport, levels: dict[str, CostModel], kernels: list[dict[str, Any]]
) -> list[str]:
    """Paragraphs and tables of the page."""
    widening = report.widening
    setting = (
        f"Target: {target}; experts widened by {widening.factor} to {widening.expert_bytes / 2**20:.2f} MiB each "
        f"({widening.memory.extra_bytes / 2**30:.2f} GiB more in all). `ballast` adds "
        f"{levels['ballast'].ballast_bytes_per_layer / 2**20:.0f} MiB per MoE layer that are read at every step "
        "and change nothing. Milliseconds of one forward of the target over n tokens behind a context of "
        f"{levels['bare'].context_length}."
    )
    own = [f"{name}, {what}" for name in levels for what in ("ms", "x one")]
    return [
        setting,
        "![step time](step_time.svg)",
        "## The target's own routing",
        common.markdown_table(
            ["tokens", "unique experts per layer", *own],
            [
                [n, round(levels["bare"].mean_unique[n - 1], 1)]
                + [
                    value
                    for cost in levels.values()
                    for value in (
                        round(cost.mean_curve[n - 1] * 1e3, 1),
                        round(cost.mean_curve[n - 1] / cost.mean_curve[0], 2),
                    )
                ]
                for n in range(1, len(levels["bare"].mean_curve) + 1)
            ],
        ),
        "## Routing forced to U unique experts per layer",
        common.markdown_table(
            ["tokens", "unique", *(f"{name}, ms" for name in levels)],
            [
                [row.tokens, int(unique), *_milliseconds(levels, row.tokens, unique)]
                for row in levels["bare"].table
                for unique in row.unique
            ],
        ),
        "## Experts implementations, `bare`",
        (
            f"`{IMPLEMENTATION}` is `decoding/experts_kernel.py`; the others are transformers' own. Which is "
            "fastest depends on the processor: a short measurement chose "
            f"`{report.experts_implementation}` for the tables above."
        ),
        common.markdown_table(
            ["tokens", "unique", *(f"{name}, ms" for name in CANDIDATES)],
            [
                [row["tokens"], row["unique"], *(round(row[name] * 1e3, 1) for name in CANDIDATES)]
                for row in kernels
            ],
        ),
    ]


def _milliseconds(levels: dict[str, CostModel], tokens: int, unique: float) -> list[float]:
    return [round(cost.time(tokens, unique) * 1e3, 1) for cost in levels.values()]


def draw(levels: dict[str, CostModel], path: Path) -> None:
    """Draw time against unique experts (left) and the ratio to one token (right)."""
    import matplotlib as mpl  # noqa: PLC0415 - only here

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "ecospec", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    colours = dict(zip((1, 2, 4, 8, 11), ("#888888", "#4477aa", "#228833", "#ccbb44", "#ee6677"), strict=True))
    for name, style in (("bare", "-"), ("ballast", "--")):
        cost = levels[name]
        for row in cost.table:
            if row.tokens in colours:
                milliseconds = [seconds * 1e3 for seconds in row.seconds]
                label = f"{row.tokens} token{'s' if row.tokens > 1 else ''}" if name == "bare" else None
                left.plot(row.unique, milliseconds, style, marker="o", ms=3, color=colours[row.tokens], label=label)
        counts = range(1, len(cost.mean_curve) + 1)
        right.plot(counts, [s / cost.mean_curve[0] for s in cost.mean_curve], style, color="black", label=name)
    left.set(xlabel="unique experts per layer (forced)", ylabel="step time, ms", ylim=(0, None))
    left.set_title("solid: bare, dashed: ballast", fontsize=9)
    left.legend(frameon=False)
    right.set(xlabel="tokens of a step", ylabel="time over a step of one token", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    common.run_script(StepTimeConfig, run)
