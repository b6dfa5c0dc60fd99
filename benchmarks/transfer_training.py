"""What `predictor_transfer.py` trains on: stores by kind of text, and the `ecospec` commands that make bundles.

On disk, below ``--work``::

    prompts/<kind>/{train,test}.jsonl    # the files of --prompts, divided by the hash of each line
    traces/<kind>/train/                 # the sequences of one kind, or what the target wrote after its prompts
    traces/<kind>/test/                  # what it wrote after the test prompts
    cache/<hash>/                        # training stores as plain files
    runs/<name>/                         # train-predictor, resumable
    bundles/<name>/, tables/<name>/      # predictor, and tables fitted on the same split
    done/<step>.json                     # the command of a step that ended; it is not run again
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.predictor_variants import ecospec
from ecospec.eval.overlap_report import require_disjoint
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from ecospec.train.arrays import open_stores
from ecospec.train.batching import plan_epoch
from ecospec.train.cache import open_cache
from ecospec.train.splits import (
    TRAINING,
    SplitConfig,
    assign_splits,
    dataset_names,
    group_position,
    short_hash,
)

#: Share of the lines of a prompt file that are kept for tests.
TEST_SHARE = 0.2
#: Shares of groups for validation; the first that leaves `VALIDATION_GROUPS` of them is taken.
VALIDATION_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
VALIDATION_GROUPS = 2


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """Traces that one predictor is trained on.

    Attributes:
        name: Name of predictor and tables.
        stores: Trace stores.
    """

    name: str
    stores: tuple[Path, ...]

    @property
    def cache(self) -> str:
        """Name of the stores' copy as plain files; sets of the same stores share it."""
        return f"{short_hash(' '.join(map(str, self.stores))):016x}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How every predictor is trained.

    Attributes:
        target: Folder of the target.
        work: Folder of all that is made.
        steps: Optimiser steps.
        batch_tokens: Positions of a batch.
        backbone: Changes to the preset ``tiny``.
        seed: Seed of split, weights and order.
        threads: CPU threads.
    """

    target: Path
    work: Path
    steps: int
    batch_tokens: int
    backbone: Mapping[str, Any] | None
    seed: int
    threads: int


def once(work: Path, step: str, arguments: Sequence[object], out: Path, *, resumable: bool = False) -> None:
    """Run an `ecospec` command unless it ended before; what it left half made is resumed or removed.

    Args:
        work: Folder of all that is made.
        step: Name of the step.
        arguments: The command, its ``--out`` included.
        out: What it makes.
        resumable: Whether it takes ``--resume``.

    Raises:
        ValueError: The step was done by another command, or the command failed.
    """
    stamp = work / "done" / f"{step}.json"
    command = [str(argument) for argument in arguments]
    if stamp.exists():
        if json.loads(stamp.read_text(encoding="utf-8"))["command"] != command:
            raise ValueError(f"{out} was made with other options; name another --work, or remove {work}")
        return
    if out.exists() and not resumable:
        shutil.rmtree(out)
    print(f"ecospec {' '.join(command)}", flush=True)
    seconds = ecospec([*command, *(("--resume", "true") if out.exists() else ())])
    common.write_json(stamp, {"command": command, "cpu_seconds": seconds})


def named_files(text: str) -> dict[str, list[Path]]:
    """Prompt files by kind.

    Raises:
        ValueError: An entry is not ``KIND=FILE+FILE``.

    >>> named_files("questions=a.jsonl+b.jsonl,code=c.jsonl")
    {'questions': [PosixPath('a.jsonl'), PosixPath('b.jsonl')], 'code': [PosixPath('c.jsonl')]}
    """
    found: dict[str, list[Path]] = {}
    for entry in filter(None, text.split(",")):
        kind, _, files = entry.partition("=")
        if not kind or kind in found or not all(files.split("+")):
            raise ValueError(f"--prompts entry {entry!r} must be KIND=FILE+FILE, each kind once")
        found[kind] = [Path(file) for file in files.split("+")]
    return found


def divided(lines: Iterable[str], share: float = TEST_SHARE) -> tuple[list[str], list[str]]:
    """Lines for training and for tests: a pure function of each line, so the same line is never in both.

    >>> [len(part) for part in divided(f"line {number}" for number in range(1000))]
    [804, 196]
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        parts[short_hash(line) < share * 2**64].append(line)
    return parts


def collect(recipe: Recipe, kind: str, files: Sequence[Path], options: Mapping[str, object]) -> tuple[Path, Path]:
    """Divide prompt files and let the target write on; returns the training and the test store.

    Args:
        recipe: For target, folder, seed and threads.
        kind: Name of the dataset in the traces.
        files: JSONL files of prompts.
        options: Further options of ``collect-traces``.
    """
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    stores = []
    for name, part in zip(("train", "test"), divided(lines), strict=True):
        prompts = recipe.work / "prompts" / kind / f"{name}.jsonl"
        prompts.parent.mkdir(parents=True, exist_ok=True)
        records = [json.dumps(json.loads(line) | {"dataset": kind}) for line in part]
        prompts.write_text("\n".join(records) + "\n", encoding="utf-8")
        out = recipe.work / "traces" / kind / name
        command = ["collect-traces", "--target", recipe.target, "--prompts", prompts, "--out", out]
        for flag, value in {"seed": recipe.seed, "threads": recipe.threads, **options}.items():
            command += [f"--{flag}", value]
        once(recipe.work, f"traces-{kind}-{name}", command, out)
        stores.append(out)
    return stores[0], stores[1]


def validation_share(groups: Iterable[str], seed: int) -> float:
    """Share of groups for validation that is small and still leaves some.

    Raises:
        ValueError: There are too few groups for any.
    """
    positions = [group_position(group, seed) for group in set(groups)]
    for share in VALIDATION_SHARES:
        if VALIDATION_GROUPS <= sum(position < share for position in positions) < len(positions):
            return share
    raise ValueError(f"{len(positions)} groups are too few to keep {VALIDATION_GROUPS} of them for validation")


def epochs_of(steps: int, batches: Iterator[int]) -> tuple[int, int]:
    """Passes, and batches of each, whose product is the number of steps; as few passes as the batches allow.

    Args:
        steps: Optimiser steps.
        batches: Batches of the first pass, the second, ...

    >>> epochs_of(240, iter([524])), epochs_of(240, iter([50] * 240))
    ((1, 240), (5, 48))
    """
    least = steps
    for epochs, found in enumerate(batches, 1):
        least = min(least, found)
        if steps % epochs == 0 and steps // epochs <= least:
            return epochs, steps // epochs
    raise ValueError(f"{least} batches a pass are too few for {steps} steps")


def train(recipe: Recipe, part: TrainingSet, spec: RoutingSpec, context_length: int) -> dict[str, Any]:
    """Train, export and fit tables on one set, all on the same split; returns the facts of the set.

    Args:
        recipe: How.
        part: On what.
        spec: Routing of the target.
        context_length: Longest training window, in tokens.

    Returns:
        ``tokens``, ``groups``, ``sequences``, ``epochs``, ``steps``, ``passes`` (steps over batches of a whole
        pass), ``validation_fraction`` and ``cpu_seconds`` of the training.
    """
    cache_folder = recipe.work / "cache" / part.cache
    cache = open_cache(open_stores(part.stores, spec), cache_folder)
    share = validation_share(cache.names("group_id"), recipe.seed)
    codes = assign_splits(cache.table(recipe.seed), SplitConfig(share, 0.0, seed=recipe.seed))
    training = cache.select(codes == TRAINING)

    def batches_of(epoch: int) -> int:
        sizes: dict[str, Any] = {"context_length": context_length, "batch_tokens": recipe.batch_tokens}
        return len(plan_epoch(training.lengths, key=(recipe.seed, epoch), **sizes))

    epochs, batches = epochs_of(recipe.steps, (batches_of(epoch) for epoch in range(recipe.steps)))
    shared: list[object] = [
        "--target", recipe.target, "--traces", ",".join(map(str, part.stores)), "--cache", cache_folder,
        "--validation-fraction", share, "--calibration-fraction", 0.0, "--seed", recipe.seed,
        "--threads", recipe.threads,
    ]  # fmt: skip
    out = recipe.work / "runs" / part.name
    backbone = () if recipe.backbone is None else ("--backbone", json.dumps(recipe.backbone))
    command = [
        "train-predictor", *shared, "--out", out, *backbone, "--dtype", "bfloat16",
        "--context-length", context_length, "--batch-tokens", recipe.batch_tokens, "--max-epochs", epochs,
        "--baseline-tokens", 100_000, "--trainer", json.dumps({"limit_train_batches": batches}),
    ]  # fmt: skip
    once(recipe.work, f"train-{part.name}", command, out, resumable=True)
    bundle, tables = (recipe.work / folder / part.name for folder in ("bundles", "tables"))
    export = ["export-predictor", "--checkpoint", out, "--target", recipe.target, "--out", bundle]
    once(recipe.work, f"export-{part.name}", export, bundle)
    once(recipe.work, f"tables-{part.name}", ["fit-baselines", *shared, "--mlp", "false", "--out", tables], tables)
    done = json.loads((recipe.work / "done" / f"train-{part.name}.json").read_text(encoding="utf-8"))
    return {
        "tokens": training.num_tokens,
        "groups": len(set(training.names("group_id"))),
        "sequences": len(training.lengths),
        "epochs": epochs,
        "steps": epochs * batches,
        "passes": epochs * batches / batches_of(0),
        "validation_fraction": share,
        "cpu_seconds": done["cpu_seconds"],
    }


def store_of_kind(work: Path, stores: Sequence[TraceStore], kind: str) -> Path:
    """The sequences of one dataset as a store of their own, written once.

    ``--hold-out-dataset`` will not do: it leaves out whole groups, and a docstring is in the group of its file.

    Args:
        work: Folder of all that is made.
        stores: Where they are.
        kind: Name of the dataset.
    """
    out = work / "traces" / kind / "train"
    compression = "zstd-1"
    source = {"stores": [str(store.path) for store in stores], "compression": compression}
    if out.exists():
        with contextlib.suppress(ValueError, FileNotFoundError):  # a store half written
            if (found := TraceStore(out)).manifest.collection == source and found.num_tokens:
                return out
        shutil.rmtree(out)
    with TraceStoreWriter(out, stores[0].spec, collection=source, compression=compression) as writer:
        for store in stores:
            rows = (row for row in store.iter_sequences(["experts"]) if row.dataset == kind)
            while batch := list(itertools.islice(rows, 256)):
                writer.append(batch)
    return out


def require_new_groups(training: Sequence[Path], test: Sequence[Path], spec: RoutingSpec) -> None:
    """Refuse tests on what was trained on.

    Raises:
        ValueError: A group is in stores of both.
    """
    groups = [
        {entry.group_id for store in open_stores(paths, spec) for entry in store.index()}
        for paths in (training, test)
    ]
    require_disjoint(groups[0], groups[1], training="the training stores", report="the test stores")


def store_paths(text: str) -> tuple[Path, ...]:
    """Folders of a comma-separated list."""
    return tuple(Path(name) for name in dataset_names(text))
