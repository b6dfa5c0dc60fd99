"""``ecospec report-tree-overlap``: how well predictors foresee the experts of tree nodes, by depth and fate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.checks import require_at_least, require_drafter, require_known
from ecospec.cli.device import require_device
from ecospec.cli.output import prepare_output

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.eval.tree_overlap import Redrafter
    from ecospec.predictor.bundle_files import PredictorBundle
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.trace_collection.tree_store import TreeStore

__all__ = ["ReportTreeOverlapConfig", "run"]

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class ReportTreeOverlapConfig:
    """Options of ``report-tree-overlap``."""

    target: Path
    """Folder of the target."""
    trees: Path
    """Draft-tree store of this target."""
    traces: Path
    """Trace store that the trees were collected from."""
    predictor: str
    """Predictor bundle of any kind, PATH or NAME=PATH; several separated by commas."""
    drafter: Path | None = None
    """Folder of the EAGLE-3 head that proposed the trees, for predictors that read its hidden states."""
    out: Path
    """Folder for report.json and report.md."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    dtype: str = "float32"
    """Arithmetic of target, drafter and predictors: float32, bfloat16, float16 or float64."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    resume: bool = False
    """Write into a folder that already holds a report, replacing it."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names the flag.
        """
        require_known("dtype", [self.dtype], DTYPES)
        require_at_least(self, 1, "threads")


def run(config: ReportTreeOverlapConfig) -> None:
    """Score all nodes, write the report, and show its table."""
    require_device(config.device)
    if config.drafter is not None:
        require_drafter(config.drafter)
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.cli.report_overlap import named_paths  # noqa: PLC0415
    from ecospec.cli.tables import show_table  # noqa: PLC0415
    from ecospec.eval.report_files import FORMAT_VERSION, JSON_NAME, MARKDOWN_NAME, write_text  # noqa: PLC0415
    from ecospec.eval.tree_overlap import measure_tree_overlap, tree_overlap_report, tree_overlap_table  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.train.arrays import open_stores  # noqa: PLC0415
    from ecospec.train.tree_cache import open_tree_stores  # noqa: PLC0415

    paths = named_paths(config.predictor, baselines=True)
    spec = routing_spec_of(config.target)
    (traces,) = open_stores([config.traces], spec, f"target {config.target}")
    (trees,) = open_tree_stores([config.trees], spec, f"target {config.target}")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    predictors = _load(config, paths, spec)
    redrafter = _redrafter(config, predictors, trees, spec)
    prepare_output(config.out, resume=config.resume)
    with _progress(Console(stderr=True), trees.num_rows) as show:
        counts = measure_tree_overlap(
            {text.sequence_id: text for text in traces.iter_sequences(["experts"])},
            trees.iter_trees(),
            predictors,
            spec,
            redrafter=redrafter,
            progress=show,
        )
    report = tree_overlap_report(counts, spec)
    table = tree_overlap_table(report)
    write_text(config.out / MARKDOWN_NAME, table.markdown())
    about = {
        "format_version": FORMAT_VERSION,
        "kind": "tree_overlap",
        "spec": spec.to_dict(),
        "inputs": {
            "target": str(config.target),
            "trees": str(config.trees),
            "predictors": {name: str(path) for name, path in paths.items()},
        },
        "provenance": provenance(),
    }
    write_text(config.out / JSON_NAME, json.dumps(about | report, indent=1, allow_nan=False) + "\n")
    show_table(Console(), table)
    Console().print(f"written to {config.out}", soft_wrap=True)


def _load(
    config: ReportTreeOverlapConfig, paths: Mapping[str, Path], spec: RoutingSpec
) -> dict[str, PredictorBundle]:
    import torch  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.predictor.bundle import load_predictor  # noqa: PLC0415
    from ecospec.predictor.checkpoint_files import load_target_embedding  # noqa: PLC0415

    dtype = getattr(torch, config.dtype)
    embedding = load_target_embedding(config.target, device=config.device, dtype=dtype)
    options: dict[str, Any] = {"require_spec": spec, "device": config.device, "dtype": dtype}
    return {name: load_predictor(path, target_embedding=embedding, **options) for name, path in paths.items()}


def _redrafter(
    config: ReportTreeOverlapConfig, predictors: Mapping[str, PredictorBundle], trees: TreeStore, spec: RoutingSpec
) -> Redrafter | None:
    """Target and drafter, where a predictor reads the drafter's states; trees of another drafter are refused."""
    from ecospec.predictor.session import AttachedPredictor  # noqa: PLC0415 - keeps `--help` fast

    attached = [name for name, one in predictors.items() if isinstance(one, AttachedPredictor)]
    if not attached:
        return None
    if config.drafter is None:
        raise ValueError(f"predictor {attached[0]} reads the hidden states of a drafter; name it with --drafter")
    from ecospec.cli.train_attached import open_drafter  # noqa: PLC0415
    from ecospec.eval.tree_overlap import Redrafter  # noqa: PLC0415
    from ecospec.trace_collection.manifest import sha256_of  # noqa: PLC0415

    recorded = trees.manifest.collection
    if recorded.get("drafter") != sha256_of(config.drafter / "model.safetensors"):
        raise ValueError(
            f"the trees of {config.trees} were proposed by another drafter than {config.drafter}; name theirs"
        )
    target, drafter = open_drafter(config, spec)
    return Redrafter(target, drafter, {name: int(recorded[name]) for name in ("depth", "top_k", "beam")})


@contextlib.contextmanager
def _progress(console: Console, trees: int) -> Iterator[Callable[[int], None]]:
    """Yield what takes the trees of every sequence done."""
    from rich.progress import Progress  # noqa: PLC0415 - keeps `--help` fast

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("score trees", total=trees)
        yield lambda done: bar.update(task, advance=done)
