r"""How good is each way of predicting experts, and what do its training and one step of decoding cost?

    python -m checkpoints.recipe traces backbone
    ecospec collect-trees --target checkpoints/target --drafter checkpoints/drafter \
        --traces runs/recipe/traces/report/greedy --limit 24 --out runs/recipe/report_trees
    python benchmarks/predictor_variants.py --parts train
    python benchmarks/predictor_variants.py --parts steps,overlap,page

Writes ``predictor_variants.json`` and ``predictor_variants.md``. The part ``train`` runs `ecospec` commands below
``--work``, one after another, and goes on where it was stopped; two may run side by side with different ``--only``.
``steps`` times what a session takes for a tree (`predictor_steps.py`) and alone needs a quiet machine; ``overlap``
measures every token of the report groups and the nodes of recorded draft trees; ``page`` puts them together.

Training takes the same tokens, passes and split everywhere; the pretrained backbone has the shape of the one that
is trained from scratch. Training time is processor time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from benchmarks.predictor_steps import step_times

_PRETRAINED = ("--backbone-path", "{backbone}")
_FULL = (*_PRETRAINED, "--optimizer", "muon", "--muon-learning-rate", "0.01")
_OWN = ("--input-mode", "backbone_embedding")
#: Options of `train-predictor` by variant, beside those that all share.
NETWORKS: dict[str, tuple[str, ...]] = {
    "scratch_target_embedding": (),
    "scratch_backbone_embedding": _OWN,
    "pretrained_full_target_embedding": _FULL,
    "pretrained_full_backbone_embedding": (*_FULL, *_OWN),
    "pretrained_lora": (*_PRETRAINED, "--finetune", "lora", "--backbone-learning-rate", "2e-3"),
}
ATTACHED, BASELINES = "attached", "baselines"
PARTS = ("train", "steps", "overlap", "page")
TABLES = ("mlp", "bigram_table", "token_table", "last_token", "frequency", "random")
WHAT = {
    "shipped": "checkpoints/predictor: as scratch_target_embedding, eight passes in four cycles",
    "scratch_target_embedding": "transformer from scratch on the target's embedding",
    "scratch_backbone_embedding": "transformer from scratch on an embedding of its own",
    "pretrained_full_target_embedding": "pretrained backbone on the target's embedding, all weights trained",
    "pretrained_full_backbone_embedding": "pretrained backbone on its own embedding, all weights trained",
    "pretrained_lora": "pretrained backbone on the target's embedding, LoRA of rank 16",
    ATTACHED: "low-rank heads on the drafter's states",
    "mlp": "perceptron on the last tokens' embeddings",
    "bigram_table": "most used experts per token pair, with back-off",
    "token_table": "most used experts per token, with back-off",
    "last_token": "the experts of the last verified token",
    "frequency": "the K most used experts of each layer",
    "random": "K experts at random",
}
COLUMNS = ("root", "candidates", "accepted 1", "accepted 2", "accepted 3", "rejected 1", "rejected 2", "rejected 3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictorVariantsConfig:
    """Quality and cost of predictors of every kind."""

    target: Path = Path("checkpoints/target")
    """Folder of the target."""
    drafter: Path = Path("checkpoints/drafter")
    """Folder of the EAGLE-3 head."""
    backbone: Path = Path("runs/recipe/backbone")
    """Folder of the pretrained backbone."""
    traces: Path = Path("runs/recipe/traces")
    """Folder of the recipe's trace stores."""
    trees: Path = Path("runs/recipe/report_trees")
    """Draft trees on the greedy texts of the report groups."""
    work: Path = Path("runs/variants")
    """Folder of the trained predictors."""
    parts: str = ",".join(PARTS)
    """What to do: train, steps, overlap, page."""
    only: str = ""
    """Variants to train, separated by commas; empty: all."""
    extra: str = ""
    """Further bundles for the report, NAME=PATH, separated by commas."""
    epochs: int = 2
    """Passes over the training tokens."""
    context_length: int = 2048
    """Longest training window, in tokens."""
    training_dtype: str = "bfloat16"
    """Arithmetic of the networks' training."""
    steps: int = 200
    """Trees that are timed."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Time steps although other work runs; the page then says so."""

    def __post_init__(self) -> None:
        """Validate names.

        Raises:
            ValueError: An unknown part or variant.
        """
        known = [*NETWORKS, ATTACHED, BASELINES]
        for flag, values, allowed in (("parts", self.parts, PARTS), ("only", self.only, known)):
            for value in filter(None, values.split(",")):
                if value not in allowed:
                    raise ValueError(f"--{flag} must be among {', '.join(allowed)}, got {value!r}")

    def stores(self, split: str, *names: str) -> str:
        """Trace stores of a split, separated by commas."""
        return ",".join(str(self.traces / split / name) for name in names)

    def report(self, kind: str) -> Path:
        """Folder of a report, on tokens or trees."""
        return self.work / "report" / kind


def run(config: PredictorVariantsConfig) -> None:
    """Do the parts that are asked for."""
    parts = config.parts.split(",")
    if "train" in parts:
        for name in config.only.split(",") if config.only else [*NETWORKS, ATTACHED, BASELINES]:
            train(config, name)
    bundles = dict(found_bundles(config))
    if "steps" in parts:
        conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
        greedy = Path(config.stores("report", "greedy"))
        times = step_times(config.target, config.drafter, greedy, bundles, config.steps)
        common.write_json(
            config.work / "steps.json", {"conditions": dataclasses.asdict(conditions), "times": times}
        )
    if "overlap" in parts:
        measure_overlaps(config, bundles)
    if "page" in parts:
        write_results(config, bundles)


def train(config: PredictorVariantsConfig, name: str) -> None:
    """Train one variant, or go on with it; its bundle and its cost lie in a folder of its name."""
    folder = config.work / name
    if (folder / "cost.json").is_file():
        print(f"{name}: finished")
        return
    traces = config.stores("predictor_train", "text", "greedy", "sampled")
    shared: list[object] = [
        "--target", config.target, "--validation-fraction", 0.05, "--threads", config.threads
    ]  # fmt: skip
    if name == BASELINES:
        cost = ecospec(["fit-baselines", *shared, "--traces", traces, "--full-tables", "--out", folder / "bundle"])
    elif name == ATTACHED:
        # Target and drafter run over these: the target's own text, which is what draft trees grow on.
        own = config.stores("predictor_train", "greedy")
        options = ["--rank", 512, "--epochs", 3 * config.epochs, "--baseline-tokens", 300_000]
        cost = ecospec([
            "train-attached", *shared, "--traces", own, "--drafter", config.drafter, *options,
            "--out", folder / "bundle",
        ])  # fmt: skip
    else:
        choices = [option.format(backbone=config.backbone) for option in NETWORKS[name]]
        cost = ecospec([
            "train-predictor", *shared, "--traces", traces, *choices, "--out", folder / "run",
            "--context-length", config.context_length, "--max-epochs", config.epochs,
            "--dtype", config.training_dtype, "--baseline-tokens", 300_000, *resume_of(folder / "run"),
        ])  # fmt: skip
        ecospec([
            "export-predictor", "--target", config.target, "--checkpoint", folder / "run",
            "--out", folder / "bundle",
        ])  # fmt: skip
    common.write_json(folder / "cost.json", {"cpu_seconds": cost})


def resume_of(folder: Path) -> list[str]:
    """The flag that goes on with a run, if there is one."""
    return ["--resume", "true"] if (folder / "checkpoints" / "last.ckpt").exists() else []


def ecospec(arguments: Sequence[object]) -> float:
    """Run an `ecospec` command; return its processor time in seconds.

    Raises:
        ValueError: It failed; it has said why.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from ecospec.cli.main import main; main()", *map(str, arguments)]
    if subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:  # noqa: S603
        raise ValueError(f"ecospec {arguments[0]} failed; its message is above")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_overlaps(config: PredictorVariantsConfig, bundles: Mapping[str, Path]) -> None:
    """Run the two overlap reports on all predictors."""
    shared = ["--target", config.target, "--drafter", config.drafter, "--threads", config.threads]
    ecospec([
        "report-overlap", *shared, "--traces", config.stores("report", "text", "greedy"),
        "--predictor", _named({name: path for name, path in bundles.items() if name not in TABLES}),
        "--baselines", config.work / BASELINES / "bundle", "--out", config.report("tokens"), "--resume", "true",
    ])  # fmt: skip
    ecospec([
        "report-tree-overlap", *shared, "--traces", config.stores("report", "greedy"), "--trees", config.trees,
        "--predictor", _named(bundles), "--out", config.report("trees"), "--resume", "true",
    ])  # fmt: skip


def write_results(config: PredictorVariantsConfig, bundles: Mapping[str, Path]) -> None:
    """Put steps and overlaps together and write the two files."""
    steps = json.loads((config.work / "steps.json").read_text(encoding="utf-8"))
    conditions = common.Conditions(**steps["conditions"])
    results = {
        "predictors": {name: costs(config, name, path) | steps["times"][name] for name, path in bundles.items()},
        **{
            kind: json.loads((config.report(kind) / "report.json").read_text(encoding="utf-8"))
            for kind in ("tokens", "trees")
        },
    }
    common.write_json(
        config.out / "predictor_variants.json", common.result("predictor_variants", conditions, config, results)
    )
    parts = page(config, results)
    common.write_page(config.out / "predictor_variants.md", "Predictors of every kind", conditions, parts)
    print("\n\n".join(parts))


def _named(bundles: Mapping[str, Path]) -> str:
    return ",".join(f"{name}={path}" for name, path in bundles.items())


def found_bundles(config: PredictorVariantsConfig) -> Iterator[tuple[str, Path]]:
    """Name and folder of every predictor of the report.

    Raises:
        FileNotFoundError: One is not trained yet.
    """
    for name in (*NETWORKS, ATTACHED):
        yield name, config.work / name / "bundle"
    for entry in filter(None, config.extra.split(",")):
        name, _, path = entry.partition("=")
        yield name, Path(path)
    for name in TABLES:
        yield name, config.work / BASELINES / "bundle" / name


def costs(config: PredictorVariantsConfig, name: str, folder: Path) -> dict[str, Any]:
    """Numbers a bundle holds, and processor minutes of its training where they are known."""
    from safetensors import safe_open  # noqa: PLC0415 - the script's help needs none of it

    with safe_open(folder / "model.safetensors", framework="np") as tensors:
        values = sum(int(np.prod(tensors.get_slice(key).get_shape())) for key in tensors.keys())  # noqa: SIM118
    cost = config.work / (BASELINES if name in TABLES else name) / "cost.json"
    known = cost.is_file() and name not in set(TABLES) - {"mlp"}
    minutes = json.loads(cost.read_text(encoding="utf-8"))["cpu_seconds"] / 60 if known else None
    return {"values": values, "training_cpu_minutes": minutes}


def page(config: PredictorVariantsConfig, results: Mapping[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    tokens, trees = results["tokens"], results["trees"]
    names = sorted(
        results["predictors"], key=lambda name: -tokens["predictors"][_token_name(name)]["overlap"]["mean"]
    )
    setting = (
        f"Networks: {config.epochs} passes over the recipe's predictor_train traces (2.2 M tokens, 5 % of the "
        f"groups kept for validation), windows of up to {config.context_length} tokens, {config.training_dtype}, "
        "one thread; all have the shape of the preset `tiny` (hidden size 192, 4 layers). The pretrained backbone "
        "is a language model of that shape, trained on the target's own training groups. Tables and perceptron are "
        "fitted on the same traces, the attached heads on the greedy ones (0.7 M tokens). Measured on "
        f"{tokens['tokens']:,} tokens of {tokens['groups']} report groups "
        f"and on {trees['trees']:,} draft trees on greedy texts of them. Top-K overlap in %; intervals: 95 %, "
        "2,000 bootstrap resamples of groups."
    )
    timing = (
        "Training: processor minutes; the perceptron's include the tables, those of pretrained variants leave out "
        "the language model. Step: one session scores root and candidates of a tree and takes in the root "
        "and, if it was drafted, the next token; median and 95th percentile of "
        f"{min(results['predictors'][name]['steps'] for name in names)} trees behind 128 tokens and more, every "
        "predictor in turn at each. The attached predictor's overlap on tokens is that of tokens as roots; its "
        "step leaves out what the drafter computes in any case."
    )
    return [setting, _main_table(results, names), timing, "## Nodes of draft trees", _tree_table(trees, names),
            "acc.: on the path that the target takes; rej.: off it; the number is the depth.",
            "## By layer", _layer_table(tokens, names)]  # fmt: skip


def _token_name(name: str) -> str:
    """Name of a predictor in the report on tokens, which shows an attached one at every level."""
    return f"{name}@0" if name == ATTACHED else name


def _percent(entry: Mapping[str, float]) -> str:
    return f"{100 * entry['mean']:.1f} [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]"


def _main_table(results: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = []
    for name in names:
        entry, overlap = results["predictors"][name], results["trees"]["overlap"].get(name)
        minutes = entry["training_cpu_minutes"]
        rows.append([
            f"`{name}`", WHAT.get(name, ""),
            _percent(results["tokens"]["predictors"][_token_name(name)]["overlap"]),
            _percent(overlap["candidates"]) if overlap else "–",
            f"{entry['values']:,}", "–" if minutes is None else f"{minutes:.1f}",
            f"{entry['step_ms_p50']:.2f} / {entry['step_ms_p95']:.2f}",
        ])  # fmt: skip
    headers = [
        "predictor",
        "what",
        "tokens [95 %]",
        "candidates [95 %]",
        "stored values",
        "training, min",
        "step, ms",
    ]
    return common.markdown_table(headers, rows)


def _tree_table(trees: Mapping[str, Any], names: Sequence[str]) -> str:
    columns = [column for column in COLUMNS if column in trees["nodes"]]
    rows = [
        [f"`{name}`", *(_percent(trees["overlap"][name][column]) for column in columns)]
        for name in names
        if name in trees["overlap"]
    ]
    rows.append(["nodes", *(f"{trees['nodes'][column]:,}" for column in columns)])
    shown = [column.replace("accepted", "acc.").replace("rejected", "rej.") for column in columns]
    return common.markdown_table(["predictor", *shown], rows)


def _layer_table(tokens: Mapping[str, Any], names: Sequence[str]) -> str:
    layers = tokens["routing"]["layer_indices"]
    rows = [
        [f"`{name}`", *(_percent(entry) for entry in tokens["predictors"][_token_name(name)]["per_layer"])]
        for name in names
    ]
    return common.markdown_table(["predictor", *(f"layer {layer}" for layer in layers)], rows)


if __name__ == "__main__":
    common.run_script(PredictorVariantsConfig, run)
