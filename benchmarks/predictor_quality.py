r"""How much does `ecospec` gain as its predictor gets better?

    ecospec train-predictor ... --keep-overlap 0.5,0.6,0.7 --out runs/sweep
    ecospec export-predictor --checkpoint runs/sweep/checkpoints/overlap-0.50.ckpt --target checkpoints/target \
        --out runs/sweep/overlap-0.50
    python benchmarks/predictor_quality.py --target checkpoints/target --drafter checkpoints/drafter \
        --predictors overlap50=runs/sweep/overlap-0.50,best=checkpoints/predictor

Writes ``predictor_quality.json``, ``predictor_quality.md`` and ``predictor_quality.svg``. Two routes, same rules:

- *replay*, exact and not timed: greedy texts of the prompts and the draft trees below every token of them are
  recorded once (in ``--work``); every predictor scores all tree nodes, and selection is replayed on the trees;
- *live*: the decoding loop on the widened target, timed, policies and predictors interleaved in random order.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.cli.benchmark_parts import (
    Bench,
    BenchmarkDecodingConfig,
    ballast_switch,
    cost_levels,
    parts,
    read_prompts,
)
from ecospec.cli.checks import require_above, require_at_least, require_drafter, require_predictor
from ecospec.cli.main import run_verb
from ecospec.cli.report_overlap import named_paths
from ecospec.decoding.experts_choice import use_fastest_experts
from ecospec.decoding.policies import POLICIES, SelectionPolicy, make_policy
from ecospec.decoding.widening import widen_
from ecospec.eval.bootstrap import paired_difference, ratio_interval
from ecospec.eval.decoding_benchmark import AUTOREGRESSIVE, GENERATE, LevelPlan, run_benchmark
from ecospec.eval.decoding_summary import summarise_runs
from ecospec.eval.tree_overlap import measure_tree_overlap, tree_overlap_report
from ecospec.eval.tree_replay import ReplayedStep, replay_texts
from ecospec.predictor.bundle import load_predictor
from ecospec.predictor.bundle_files import PredictorBundle
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStore

PROBABILITY, ORACLE = "probability", "ecospec_oracle"
_SPEED = ("speedup", "speedup_low", "speedup_high", "tokens_per_second", "accepted", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictorQualityConfig:
    """Gain of ecospec against the overlap of its predictor."""

    target: Path
    """Folder of the target."""
    drafter: Path
    """Folder of the EAGLE-3 head."""
    predictors: str
    """Predictor bundles, NAME=PATH, separated by commas."""
    prompts: str = "stdlib:report"
    """Prompts, of groups that nothing was trained or tuned on."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus, for stdlib: prompts."""
    prompt_tokens: int = 64
    """Tokens of a prompt."""
    max_new_tokens: int = 48
    """Tokens generated after each."""
    budget: int = 4
    """Nodes verified per step at most, root included."""
    epsilon: float = 0.25
    """ε' of ecospec."""
    texts: int = 32
    """Texts of the replay."""
    work: Path = Path("runs/benchmarks/predictor_quality")
    """Folder of their traces and trees; what is there is used again."""
    number: int = 16
    """Prompts of the live runs."""
    levels: str = "bare,ballast"
    """Cost levels of the live runs."""
    widening_factor: int | None = None
    """Factor by which experts are widened; None: the level's."""
    block: int = 2
    """Prompts between two switches of the cost level."""
    max_minutes: float = 3.5
    """No further block of live runs begins after this time."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of the choice of prompts and of the order of runs."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""

    def __post_init__(self) -> None:
        """Validate what no other config validates."""
        require_at_least(self, 1, "texts")
        require_above(self, 0, "epsilon")
        if taken := sorted({*POLICIES, GENERATE} & self.bundles().keys()):
            raise ValueError(f"--predictors: {taken[0]!r} is the name of a policy; write NAME=PATH with another")

    def bundles(self) -> dict[str, Path]:
        """Paths of the bundles by name."""
        return named_paths(self.predictors, baselines=True)

    def live(self) -> BenchmarkDecodingConfig:
        """The live runs as `benchmark-decoding` has them."""
        same = ("target", "drafter", "prompts", "groups", "prompt_tokens", "max_new_tokens", "budget", "epsilon")
        same += ("number", "levels", "widening_factor", "block", "max_minutes", "out", "seed", "threads")
        shared = {name: getattr(self, name) for name in same}
        first = next(iter(self.bundles().values()))
        return BenchmarkDecodingConfig(predictor=first, policies=f"{AUTOREGRESSIVE},{PROBABILITY}", **shared)


def run(config: PredictorQualityConfig) -> None:
    """Replay, measure, and write the three files."""
    spec, live = routing_spec_of(config.target), config.live()
    require_drafter(config.drafter)
    for path in config.bundles().values():
        require_predictor(path, spec, config.target)
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    bench = Bench.open(live, spec, read_prompts(live))
    predictors = {name: _load(path, bench, spec) for name, path in config.bundles().items()}
    overlaps, replayed = replay(config, predictors, spec)
    levels, facts = measure(config, bench, predictors)
    size = spec.num_layers * facts["expert_bytes"]
    rows: dict[str, Any] = {}
    for name in (PROBABILITY, *predictors, ORACLE):
        bundle = predictors.get(name)
        rows[name] = {
            "predictor": None if bundle is None else str(config.bundles()[name]),
            "validation_overlap": None if bundle is None else bundle.config.metrics.get("val_overlap"),
            "tree_overlap": overlaps["overlap"].get(name),
            "replay": _replay_row(replayed[name], replayed[PROBABILITY], size),
            "live": {level: _live_row(levels[level], name, size) for level in parts(config.levels)},
        }
    results = {
        "texts": sum(map(bool, replayed[PROBABILITY].values())),
        "trees": overlaps["trees"],
        "tree_nodes": overlaps["nodes"],
        **facts,
        "rows": rows,
    }
    common.write_json(
        config.out / "predictor_quality.json", common.result("predictor_quality", conditions, config, results)
    )
    draw(rows, config.out / "predictor_quality.svg")
    page = _page(config, results)
    common.write_page(config.out / "predictor_quality.md", "Gain against predictor quality", conditions, page)
    print("\n\n".join(page))


def _load(path: Path, bench: Bench, spec: RoutingSpec) -> PredictorBundle:
    embedding = bench.model.get_input_embeddings()
    return load_predictor(path, target_embedding=embedding, require_spec=spec, dtype=bench.model.dtype).eval()


def _policies(config: PredictorQualityConfig, names: Sequence[str]) -> dict[str, SelectionPolicy]:
    """The policies by the names of rows: `ecospec` stands once for each predictor."""
    return {
        PROBABILITY: make_policy(PROBABILITY),
        **{name: make_policy("ecospec", epsilon=config.epsilon) for name in names},
        ORACLE: make_policy(ORACLE, epsilon=config.epsilon),
    }


def replay(
    config: PredictorQualityConfig, predictors: Mapping[str, PredictorBundle], spec: RoutingSpec
) -> tuple[dict[str, Any], dict[str, dict[str, list[ReplayedStep]]]]:
    """Overlap on tree nodes (of `tree_overlap_report`), and the replayed steps by row and group."""
    store, trees = _record(config)
    texts = {text.sequence_id: text for text in store.iter_sequences(["experts"])}
    print("score all tree nodes", flush=True)
    report = tree_overlap_report(measure_tree_overlap(texts, trees.iter_trees(), predictors, spec), spec)
    by_text: dict[str, dict[int, TreeTrace]] = {}
    for tree in trees.iter_trees():
        by_text.setdefault(tree.sequence_id, {})[tree.position] = tree
    print("replay", flush=True)
    recorded = [text for sequence, text in texts.items() if sequence in by_text]
    steps = {
        name: replay_texts(recorded, by_text, policy, predictors.get(name), spec, budget=config.budget)
        for name, policy in _policies(config, list(predictors)).items()
    }
    return report, steps


def _record(config: PredictorQualityConfig) -> tuple[TraceStore, TreeStore]:
    """Greedy texts of the prompts and the trees below their tokens, recorded unless they are there."""
    traces, trees = config.work / "traces", config.work / "trees"
    texts = {"prompts": config.prompts, "groups": config.groups, "seed": config.seed}
    texts |= {"max_new_tokens": config.max_new_tokens, "max_prompt_tokens": config.prompt_tokens}
    for verb, out, own in (
        ("collect-traces", traces, texts),
        ("collect-trees", trees, {"traces": traces, "drafter": config.drafter}),
    ):
        options = {"target": config.target, "threads": config.threads, "limit": config.texts, "out": out} | own
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        run_verb(verb, [*words, *(["--resume"] if out.exists() else [])])
    return TraceStore(traces), TreeStore(trees)


def measure(
    config: PredictorQualityConfig, bench: Bench, predictors: Mapping[str, PredictorBundle]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Timed runs on the widened target.

    Returns:
        `summarise_runs` by level; and facts for the result: prompts, lossless counts, size of an expert.
    """
    prompts = bench.prompts(config.prompts, config.number, config.seed)
    levels = cost_levels(bench.config, {})
    policies = {AUTOREGRESSIVE: make_policy(AUTOREGRESSIVE), **_policies(config, list(predictors))}
    plans = {
        name: LevelPlan(policies, ballast_switch(bench.model, level.ballast_bytes_per_layer), predictors)
        for name, level in levels.items()
    }
    widening = widen_(bench.model, next(iter(levels.values())).widening_factor)
    experts = use_fastest_experts(bench.model)
    print(f"decode at {' and '.join(parts(config.levels))}, experts run by {experts}", flush=True)
    result = run_benchmark(
        bench.model,
        prompts,
        plans,
        target=bench.target,
        drafter=bench.drafter,
        predictor=None,
        settings=bench.settings,
    )
    pairs = [(name, PROBABILITY) for name in policies if name not in {AUTOREGRESSIVE, PROBABILITY}]
    facts = {
        "prompts": result.prompts,
        "lossless": result.lossless,
        "expert_bytes": widening.expert_bytes,
        "experts_implementation": experts,
    }
    return summarise_runs(result.runs, prompts, top_k=bench.target.top_k, pairs=pairs), facts


def _replay_row(
    steps: Mapping[str, list[ReplayedStep]], base: Mapping[str, list[ReplayedStep]], size: int
) -> dict[str, Any]:
    """Means over steps with intervals over groups, and differences from ``base``; ``size``: bytes of L experts."""
    groups = [group for group in steps if steps[group] and base[group]]

    def sums(found: Mapping[str, list[ReplayedStep]], value: Callable[[ReplayedStep], float]) -> list[float]:
        return [sum(map(value, found[group])) for group in groups]

    values: dict[str, Callable[[ReplayedStep], float]] = {
        "accepted": lambda step: step.emitted,
        "experts": lambda step: step.mean_unique_experts,
    }
    counts, base_counts = (sums(found, lambda _: 1) for found in (steps, base))
    row: dict[str, Any] = {
        name: ratio_interval(sums(steps, value), counts).to_dict() for name, value in values.items()
    }
    row |= {"steps": int(sum(counts)), "expert_bytes": row["experts"]["mean"] * size}
    row["over_probability"] = {
        name: paired_difference(sums(steps, value), sums(base, value), counts, base_counts).to_dict()
        for name, value in values.items()
    }
    return row


def _live_row(level: Mapping[str, Any], name: str, size: int) -> dict[str, Any]:
    found = level["policies"][name]
    row = {key: found[key] for key in _SPEED}
    row |= {stage: found["step_ms"][stage]["mean"] for stage in ("predict", "total")}
    row["expert_bytes"] = found["experts"] * size
    row["over_probability"] = level["comparisons"].get(f"{name}_over_{PROBABILITY}")
    return row


def _page(config: PredictorQualityConfig, results: Mapping[str, Any]) -> list[str]:
    """Paragraphs and tables of the page."""
    counts = results["lossless"]
    settings = (
        f"Target {config.target}, drafter {config.drafter}, trees of 3 x top-2, budget {config.budget} (root "
        f"included), ε' = {config.epsilon}, greedy. Replay: {results['texts']} texts of {config.prompts}, "
        f"{config.max_new_tokens} tokens each, {results['trees']:,} trees. Live: {results['prompts']} prompts, "
        f"{config.max_new_tokens} tokens each; an expert has {results['expert_bytes'] / 2**20:.2f} MiB after "
        f"widening, run by `{results['experts_implementation']}`; {counts['runs']} outputs compared with plain "
        f"decoding, {counts['mismatches']} mismatches, {counts['ties']} ties."
    )
    return [
        settings,
        (
            "Accepted: tokens per step, bonus included. Experts: distinct routed experts per MoE layer and step. "
            "Overlap: on all candidates of the recorded trees. The oracle's sets cannot be had in practice; what "
            "finds them is left out of its time. Intervals: 95 % over prompt groups, paired in differences."
        ),
        "![gain against overlap](predictor_quality.svg)",
        "## Replay: what is selected",
        common.markdown_table(
            ["policy", "overlap, %", "validation overlap, %", "accepted", "experts", "GB of experts a step",
             "accepted - probability", "experts - probability"],
            [
                [
                    _label(name),
                    _percent(_overlap(name, row)),
                    _percent(row["validation_overlap"]),
                    round(row["replay"]["accepted"]["mean"], 3),
                    round(row["replay"]["experts"]["mean"], 2),
                    round(row["replay"]["expert_bytes"] / 1e9, 3),
                    *(_change(row["replay"]["over_probability"][key]) for key in ("accepted", "experts")),
                ]
                for name, row in results["rows"].items()
            ],
        ),
        "## Live: what it takes",
        common.markdown_table(
            ["policy", "level", "tokens/s", "over plain decoding", "over probability", "accepted", "experts",
             "predicting, ms a step", "step, ms"],
            [
                [
                    _label(name),
                    level,
                    round(live["tokens_per_second"], 1),
                    _between(live["speedup"], live["speedup_low"], live["speedup_high"]),
                    _ratio(live["over_probability"]),
                    *(round(live[key], 2) for key in ("accepted", "experts", "predict", "total")),
                ]
                for name, row in results["rows"].items()
                for level, live in row["live"].items()
            ],
        ),
    ]  # fmt: skip


def _label(name: str) -> str:
    return name if name in {PROBABILITY, ORACLE} else f"ecospec, {name}"


def _overlap(name: str, row: Mapping[str, Any]) -> float | None:
    """Overlap on candidates, 0 to 1; the oracle's is 1, `probability` has none."""
    if name == ORACLE:
        return 1.0
    return None if row["tree_overlap"] is None else float(row["tree_overlap"]["candidates"]["mean"])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _between(mean: float, low: float | None, high: float | None, sign: str = "") -> str:
    return f"{mean:{sign}.3f}" + ("" if low is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]")


def _change(entry: Mapping[str, Any]) -> str:
    return _between(entry["mean"], entry["low"], entry["high"], "+")


def _ratio(comparison: Mapping[str, Any] | None) -> str:
    return "" if comparison is None else _between(*(comparison["speedup"][key] for key in ("mean", "low", "high")))


def draw(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw experts saved (left) and speed over `probability` (right) against the overlap on candidates."""
    import matplotlib as mpl  # noqa: PLC0415 - only here

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "ecospec", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    shown = sorted((name for name in rows if name != PROBABILITY), key=lambda name: _overlap(name, rows[name]) or 0)
    overlap = [100 * (_overlap(name, rows[name]) or 0) for name in shown]
    entries = [rows[name]["replay"]["over_probability"]["experts"] for name in shown]
    _curve(left, overlap, entries, "#0072b2", "replay")
    for level, colour in zip(rows[PROBABILITY]["live"], ("#0072b2", "#e69f00", "#009e73"), strict=False):
        entries = [rows[name]["live"][level]["over_probability"]["speedup"] for name in shown]
        _curve(right, overlap, entries, colour, level)
    for axes, base in ((left, 0.0), (right, 1.0)):
        axes.axhline(base, color="#888888", linestyle="--", linewidth=1)
        axes.set_xlabel("top-K overlap on candidates, % (100: the oracle)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    left.set_ylabel("experts per layer and step, against probability")
    right.set_ylabel("speed over probability, x")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _curve(axes: Any, overlap: list[float], entries: Sequence[Mapping[str, Any]], colour: str, label: str) -> None:
    means = [entry["mean"] for entry in entries]
    reach = [
        [0.0 if entry["low"] is None else entry["mean"] - entry["low"] for entry in entries],
        [0.0 if entry["high"] is None else entry["high"] - entry["mean"] for entry in entries],
    ]
    axes.errorbar(overlap, means, yerr=reach, color=colour, marker="o", ms=4, capsize=2, linewidth=1, label=label)


if __name__ == "__main__":
    common.run_script(PredictorQualityConfig, run)
