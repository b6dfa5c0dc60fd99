"""How far does a predictor carry: to other kinds of text, to longer text, with less context?

    python -m checkpoints.recipe traces
    python benchmarks/predictor_transfer.py --parts matrix,length \
        --prompts questions=gsm8k.jsonl+mt_bench.jsonl,humaneval=humaneval.jsonl
    python benchmarks/predictor_transfer.py --parts window

Writes ``predictor_transfer.json``, ``predictor_transfer.md`` and ``predictor_transfer.svg``. Parts may run at
different times into one folder: each replaces its own results and leaves the others.

1. ``matrix``: train on one kind of text, test on every kind. Kinds are the datasets of the stores, and what the
   target writes after prompts of files, which are divided into training and test prompts.
2. ``length``: train on short or on long windows of the same texts, test on long ones, by position.
3. ``window``: a trained predictor is given only the last W tokens; beside it what its KV cache of W tokens takes.

Training runs as `ecospec` commands below ``--work``, which are not repeated when the script is run again. Nothing
is timed, so other work may run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from benchmarks.transfer_training import (
    Recipe,
    TrainingSet,
    collect,
    named_files,
    require_new_groups,
    store_of_kind,
    store_paths,
    train,
)
from ecospec.eval.tables import interval_of, percent_interval

PARTS = ("matrix", "length", "window")
TRACES = "runs/recipe/traces"
#: Lengths of a whole context whose cache is shown.
WHOLE = (4096, 32768)
NAME = "predictor_transfer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictorTransferConfig:
    """Overlap on other kinds of text, at other lengths, and with less context."""

    parts: str = ",".join(PARTS)
    """What to measure: matrix, length, window, separated by commas."""
    target: Path = Path("checkpoints/target")
    """Folder of the target."""
    stores: str = f"{TRACES}/predictor_train/text,{TRACES}/predictor_train/greedy,{TRACES}/predictor_train/sampled"
    """Trace stores to train on, one kind of text a dataset; several, separated by commas."""
    test_stores: str = f"{TRACES}/report/text,{TRACES}/report/greedy"
    """Trace stores to test on, of other groups."""
    prompts: str = ""
    """Further kinds, from files of prompts: KIND=FILE+FILE, several separated by commas."""
    samples_per_prompt: int = 3
    """Texts that the target writes after each of them."""
    new_tokens: int = 192
    """Tokens of each at most."""
    temperature: float = 0.8
    """Temperature they are sampled at."""
    long_stores: str = f"{TRACES}/predictor_train/text"
    """Trace stores of long texts to train on, for the part length."""
    long_test_stores: str = f"{TRACES}/report/text"
    """Trace stores of long texts to test on, for the parts length and window."""
    lengths: tuple[int, ...] = (128, 2048)
    """Longest training windows that are compared; the last is what the others are compared with."""
    least_length: int = 1024
    """Shortest text that the part length tests on, in tokens."""
    predictor: Path = Path("checkpoints/predictor")
    """Bundle of the part window."""
    windows: tuple[int, ...] = (16, 64, 128, 512)
    """Tokens it is given."""
    positions: int = 2000
    """Positions scored for each of them."""
    steps: int = 240
    """Optimiser steps of every predictor."""
    batch_tokens: int = 4096
    """Positions of a batch, padding included."""
    context_length: int = 512
    """Longest training window of the part matrix, in tokens."""
    backbone: dict[str, Any] | None = None
    """Changes to the preset tiny that is trained."""
    test_tokens: int = 60_000
    """Tokens of each kind that are tested on, at most."""
    work: Path = Path("runs/transfer")
    """Folder of what is collected and trained; what is there is used."""
    out: Path = common.RESULTS
    """Folder of the results."""
    seed: int = 0
    """Seed of splits, sampling, weights and positions."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Without meaning here: nothing is timed."""

    def __post_init__(self) -> None:
        """Validate parts and windows."""
        if not self.chosen() or not set(self.chosen()) <= set(PARTS):
            raise ValueError(f"--parts must be some of {', '.join(PARTS)}, got {self.parts!r}")
        for name in ("steps", "positions", "test_tokens", "least_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("windows", "lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1 or sorted(set(values)) != list(values):
                raise ValueError(f"--{name} must be ascending numbers from 1, got {list(values)}")
        named_files(self.prompts)

    def chosen(self) -> list[str]:
        """The parts to run."""
        return [part.strip() for part in self.parts.split(",") if part.strip()]

    def recipe(self) -> Recipe:
        """How predictors are trained."""
        names = [field.name for field in dataclasses.fields(Recipe)]
        return Recipe(**{name: getattr(self, name) for name in names})


def run(config: PredictorTransferConfig) -> None:
    """Run the chosen parts and write the files anew."""
    conditions = common.prepare(threads=config.threads, allow_load=True)
    functions = {"matrix": run_matrix, "length": run_length, "window": run_window}
    for part in config.chosen():
        measured = functions[part](config)
        path = config.out / f"{NAME}.json"
        earlier = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
        whole = common.result(NAME, conditions, config, {})
        about = {name: whole[name] for name in ("conditions", "provenance", "options")}
        found = earlier | {part: measured | about}
        results = {name: found[name] for name in PARTS if name in found}
        common.write_json(path, whole | {"results": results})
        print("\n\n".join(write_pages(config.out, conditions, results)))


def write_pages(out: Path, conditions: common.Conditions, results: Mapping[str, Any]) -> list[str]:
    """Write page and picture of all parts that there are; returns the paragraphs of the page."""
    pages = {"matrix": matrix_page, "length": length_page, "window": window_page}
    parts = [text for name, page in pages.items() if name in results for text in page(results[name])]
    # No timing is on the page, so the warning of a busy machine has no place there; the JSON keeps the condition.
    quiet = dataclasses.replace(conditions, allow_load=False)
    common.write_page(out / f"{NAME}.md", "How far a predictor carries", quiet, parts)
    if "matrix" in results:
        draw(results["matrix"], out / f"{NAME}.svg")
    return parts


def run_matrix(config: PredictorTransferConfig) -> dict[str, Any]:
    """Collect, train on every kind and on all, and test each on each."""
    from benchmarks.transfer_measures import TestText, load_all, matrix  # noqa: PLC0415 - the help needs none of it
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.train.arrays import open_stores  # noqa: PLC0415

    spec, recipe, stores = routing_spec_of(config.target), config.recipe(), store_paths(config.stores)
    opened = open_stores(stores, spec)
    kinds = sorted({entry.dataset for store in opened for entry in store.index()})
    sampling = {"max-new-tokens": config.new_tokens, "temperature": config.temperature,
                "samples-per-prompt": config.samples_per_prompt}  # fmt: skip
    written = {kind: collect(recipe, kind, files, sampling) for kind, files in named_files(config.prompts).items()}
    tests = (*store_paths(config.test_stores), *(test for _, test in written.values()))
    training = {kind: store_of_kind(config.work, opened, kind) for kind in kinds}
    training |= {kind: store for kind, (store, _) in written.items()}
    sets = [TrainingSet(kind, (store,)) for kind, store in training.items()]
    sets.append(TrainingSet("all", tuple(training.values())))
    require_new_groups(sets[-1].stores, tests, spec)
    facts = {part.name: train(recipe, part, spec, config.context_length) for part in sets}
    text = TestText(tests, spec, config.test_tokens)
    bundles = {name: config.work / "bundles" / name for name in facts}
    tables = {name: config.work / "tables" / name / "bigram_table" for name in facts}
    found = matrix(load_all(config.target, bundles, spec), load_all(config.target, tables, spec), text, spec)
    return {"training": facts, **found}


def run_length(config: PredictorTransferConfig) -> dict[str, Any]:
    """Train on windows of every length, and test on long texts."""
    from benchmarks.transfer_measures import TestText, by_position, load_all  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415

    spec, recipe, stores = routing_spec_of(config.target), config.recipe(), store_paths(config.long_stores)
    tests = store_paths(config.long_test_stores)
    require_new_groups(stores, tests, spec)
    names = {length: f"length-{length}" for length in config.lengths}
    facts = {str(length): train(recipe, TrainingSet(name, stores), spec, length) for length, name in names.items()}
    # Together at most as many tokens as the matrix tests on; datasets are not told apart here.
    text = TestText(tests, spec, config.test_tokens, least=config.least_length)
    bundles = {"bigram_table": config.work / "tables" / names[config.lengths[-1]] / "bigram_table"}
    bundles |= {str(length): config.work / "bundles" / name for length, name in names.items()}
    return {
        "training": facts,
        "test": text.tokens,
        **by_position(load_all(config.target, bundles, spec), text, spec),
    }


def run_window(config: PredictorTransferConfig) -> dict[str, Any]:
    """Score the same positions with every window, and compute what the caches take."""
    from benchmarks.transfer_measures import TestText, by_window, cache_bytes, load_all  # noqa: PLC0415
    from ecospec.predictor.backbones import BACKBONE_PRESETS  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415

    spec, first = routing_spec_of(config.target), config.windows[-1]
    predictor = load_all(config.target, {"predictor": config.predictor}, spec)["predictor"]
    if predictor.config.backbone is None:
        raise ValueError(
            f"--predictor {config.predictor} has no backbone whose context could be cut; name a neural one"
        )
    tests = store_paths(config.long_test_stores)
    text = TestText(tests, spec, sys.maxsize, least=first + 1)
    found = by_window(predictor, text, spec, config.windows, first=first, count=config.positions, seed=config.seed)
    backbones = {"predictor": predictor.config.backbone}
    backbones |= {name: BACKBONE_PRESETS[name] for name in ("qwen3-0.6b", "deepseek-r1-distill-qwen-1.5b")}
    kept = (*config.windows, *WHOLE)
    caches = {name: {str(n): cache_bytes(one, n) for n in kept} for name, one in backbones.items()}
    facts = {name: predictor.config.training_data.get(name) for name in ("fingerprint", "tokens")}
    return {"predictor": facts, "first_position": first, **found, "cache_bytes": caches}


def _table(
    rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str], *, signed: bool = False
) -> list[list[str]]:
    """Cells of intervals in per cent; a dash where there is none."""
    return [
        [name, *(percent_interval(interval_of(row[c]), signed=signed) if row.get(c) else "–" for c in columns)]
        for name, row in rows.items()
    ]


def matrix_page(part: Mapping[str, Any]) -> list[str]:
    """Paragraphs and tables of the matrix."""
    options, test = part["options"], part["test"]
    kinds = [kind for kind in part["training"] if kind in test]
    headers = ["trained on", *kinds]
    setting = (
        f"Preset `tiny` from scratch, {options['steps']} optimiser steps of at most {options['batch_tokens']:,} "
        f"positions for every row, windows of at most {options['context_length']} tokens, best checkpoint by a "
        "validation split of its own kind. Tables are fitted on the same training split, all of it. `all`: every "
        "kind at once, each in the share of its tokens, the same number of steps. "
        "Kinds `stdlib_*` are texts that the target reads and greedy or "
        f"sampled texts that it writes; the others are what it writes after prompts at temperature "
        f"{options['temperature']:g}, at most {options['new_tokens']} tokens. Test texts are of other documents or "
        "prompts. Intervals: 95 %, bootstrap over groups (documents or prompts)."
    )
    training = [
        [name, f"{one['tokens']:,}", one["groups"], one["steps"], round(one["passes"], 2),
         f"{test[name]['tokens']:,}" if name in test else "–", test[name]["groups"] if name in test else "–"]
        for name, one in part["training"].items()
    ]  # fmt: skip
    return [
        "## Train on one kind of text, test on another",
        f"{part['conditions']['date']}. {setting}",
        f"![overlap by kind of text]({NAME}.svg)",
        common.markdown_table(
            ["kind", "training tokens", "groups", "steps", "passes", "test tokens", "test groups"], training
        ),
        "Predictor: top-K overlap, %",
        common.markdown_table(headers, _table(part["network"], kinds)),
        "Table of bigrams with back-off: top-K overlap, %",
        common.markdown_table(headers, _table(part["bigram_table"], kinds)),
        "Predictor less table of the same row, points, paired",
        common.markdown_table(headers, _table(part["network_minus_table"], kinds, signed=True)),
        "Predictor less the one that was trained on the kind it is tested on, points, paired",
        common.markdown_table(headers, _table(part["network_minus_own"], kinds, signed=True)),
        "Table less the one that was fitted on the kind it is tested on, points, paired",
        common.markdown_table(headers, _table(part["table_minus_own"], kinds, signed=True)),
    ]


def length_page(part: Mapping[str, Any]) -> list[str]:
    """Paragraphs and tables of training windows."""
    options, ranges = part["options"], list(part["tokens"])
    headers = ["trained on windows of at most", *(f"{label} ({part['tokens'][label]:,})" for label in ranges)]
    last = str(options["lengths"][-1])
    tokens = part["training"][last]["tokens"]
    setting = (
        f"Trained on {options['long_stores']} ({tokens:,} tokens; {options['steps']} steps of at most "
        f"{options['batch_tokens']:,} positions for each), tested on texts of at least {options['least_length']:,} "
        "tokens, each scored whole, so that a predictor trained on short windows meets positions it never saw. "
        "Columns: position in the text (tokens). Top-K overlap, %."
    )
    return [
        "## Train on short windows, test on long texts",
        f"{part['conditions']['date']}. {setting}",
        common.markdown_table(headers, _table(part["overlap"], ranges)),
        f"Less the predictor trained on windows of {last}, points, paired",
        common.markdown_table(headers, _table(part["difference"], ranges, signed=True)),
    ]


def window_page(part: Mapping[str, Any]) -> list[str]:
    """Paragraphs and tables of context windows."""
    options, caches = part["options"], part["cache_bytes"]
    setting = (
        f"`{options['predictor']}` is given only the last W tokens, the one whose experts it predicts included, "
        "numbered from 0; `full` is the whole text up to it. "
        f"{part['positions']:,} positions from {part['first_position']} on of {part['groups']} documents, the same "
        "for every W. (Dropping old rows from a running cache would leave deeper layers a trace of what was "
        "dropped; here nothing of it is left.)"
    )
    overlap = _table({name: {"overlap": one} for name, one in part["overlap"].items()}, ["overlap"])
    less = _table({name: {"less": part["difference"].get(name)} for name in part["overlap"]}, ["less"], signed=True)
    rows = [[*row, difference] for row, (_, difference) in zip(overlap, less, strict=True)]
    memory = [
        [f"{int(kept):,}", *(f"{one[kept] / 2**20:,.2f}" for one in caches.values())]
        for kept in next(iter(caches.values()))
    ]
    return [
        "## Less context",
        f"{part['conditions']['date']}. {setting}",
        common.markdown_table(["W", "top-K overlap, %", "less full, points, paired"], rows),
        "KV cache of one sequence in bf16, MiB: 2 · layers · KV heads · head size · tokens · 2 bytes",
        common.markdown_table(["tokens kept", *caches], memory),
    ]


def draw(part: Mapping[str, Any], path: Path) -> None:
    """Draw both matrices as heat maps on one scale."""
    import matplotlib as mpl  # noqa: PLC0415 - only here

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "ecospec", "font.size": 9})
    sets = list(part["training"])
    kinds = [kind for kind in sets if kind in part["test"]]
    panels = {"predictor": part["network"], "table of bigrams": part["bigram_table"]}
    values = {name: [[100 * rows[a][b]["mean"] for b in kinds] for a in sets] for name, rows in panels.items()}
    every = [value for rows in values.values() for row in rows for value in row]
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.5 * len(sets) + 1.4), layout="constrained", sharey=True)
    image = None
    for axis, (name, rows) in zip(axes, values.items(), strict=True):
        image = axis.imshow(rows, cmap="cividis", vmin=min(every), vmax=max(every), aspect="auto")
        axis.set_xticks(range(len(kinds)), kinds, rotation=25, ha="right")
        axis.set_yticks(range(len(sets)), sets)
        axis.set(title=name, xlabel="tested on")
        dark = (min(every) + max(every)) / 2
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                axis.text(
                    j, i, f"{value:.1f}", ha="center", va="center", color="white" if value < dark else "black"
                )
    axes[0].set_ylabel("trained on")
    figure.colorbar(image, ax=list(axes), label="top-K overlap, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    common.run_script(PredictorTransferConfig, run)
