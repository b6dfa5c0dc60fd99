"""``ecospec report-overlap``: how well predictors foresee the experts a target uses, beside trivial ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.device import require_device
from ecospec.cli.output import prepare_output

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.eval.overlap_report import SequencePredictor
    from ecospec.predictor.bundle_files import PredictorBundle
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.trace_collection.store import TraceStore
    from ecospec.train.arrays import TraceArrays

__all__ = ["ReportOverlapConfig", "run"]

DTYPES = ("float32", "bfloat16", "float64")
#: Names of the baselines that are fitted here or read back from bundles (random needs none).
FITTED = ("frequency", "token_table", "bigram_table", "last_token")
#: One that is only read, where it is there.
OPTIONAL = "mlp"


@dataclass(frozen=True, kw_only=True)
class ReportOverlapConfig:
    """Options of ``report-overlap``."""

    target: Path
    """Folder of the target; its embedding table is the predictors' input."""
    traces: str
    """Trace store to report on, every processed token counts; several separated by commas."""
    predictor: str
    """Predictor bundle, PATH or NAME=PATH; several separated by commas. The heat map shows the first."""
    baseline_traces: str | None = None
    """Trace store the tables are fitted on, the predictor's own training traces; several separated by commas."""
    baselines: Path | None = None
    """Folder of fitted bundles frequency, token_table, bigram_table, last_token, and perhaps mlp, to read."""
    drafter: Path | None = None
    """Folder of the EAGLE-3 head, for predictors that read its hidden states."""
    depth: int = 3
    """Deepest level of draft trees, for those predictors: they are reported at every level."""
    out: Path
    """Folder for report.json, report.md and report.html."""
    groups: Path | None = None
    """Manifest of groups; only groups of --split are reported on. None: every group of the store."""
    split: str = "report"
    """Split of the manifest to report on."""
    allow_leak: bool = False
    """Report although groups that the tables were fitted on are among the groups reported on."""
    batch_tokens: int = 4096
    """Tokens scored together, padding included."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    dtype: str = "float32"
    """Arithmetic of the predictors: float32, bfloat16 or float64."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    resume: bool = False
    """Write into a folder that already holds a report, replacing it."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names the flag.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if (self.baseline_traces is None) == (self.baselines is None):
            raise ValueError(
                "give either --baseline-traces (the predictor's training traces, to fit tables on) or --baselines "
                "(a folder of fitted ones): an overlap says nothing without trivial predictors beside it"
            )
        if self.depth < 0:
            raise ValueError(f"--depth must be at least 0, got {self.depth}")
        if self.batch_tokens < 1:
            raise ValueError(f"--batch-tokens must be at least 1, got {self.batch_tokens}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")


def named_paths(values: str, *, baselines: bool = False) -> dict[str, Path]:
    """Read ``PATH`` or ``NAME=PATH`` entries; without a name the folder's name is taken.

    Args:
        values: The entries, separated by commas.
        baselines: Whether an entry may have the name of a baseline.

    Raises:
        ValueError: An entry is empty, two have one name, or a name is that of a baseline.

    >>> named_paths("runs/a,mine=runs/b")
    {'a': PosixPath('runs/a'), 'mine': PosixPath('runs/b')}
    """
    found: dict[str, Path] = {}
    for value in (part.strip() for part in values.split(",")):
        name, separator, path = value.partition("=")
        name, place = (name, Path(path)) if separator else (Path(value).name, Path(value))
        if not name or place == Path():
            raise ValueError(f"--predictor {values!r} holds an empty entry; write PATH or NAME=PATH")
        if name in found:
            raise ValueError(f"two predictors are named {name!r}; write --predictor NAME=PATH")
        if not baselines and name in {"random", *FITTED, OPTIONAL}:
            raise ValueError(f"{name!r} is the name of a baseline; write --predictor NAME=PATH with another name")
        found[name] = place
    return found


def run(config: ReportOverlapConfig) -> None:
    """Score all tokens, write the report, and show its main table."""
    require_device(config.device)
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.cli.tables import show_table  # noqa: PLC0415
    from ecospec.eval.overlap_rendering import summary_table  # noqa: PLC0415
    from ecospec.eval.overlap_report import measure_overlap, overlap_report, write_overlap_report  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415

    paths = named_paths(config.predictor)
    spec = routing_spec_of(config.target)
    stores = _open_stores(config, spec)
    groups = _report_groups(config, stores)
    trained = _load(config, paths, spec)
    prepare_output(config.out, resume=config.resume)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    console = Console(stderr=True)
    baselines, inputs, notes = _baselines(config, spec, groups, trained)
    scorers, more = _scorers(config, trained, spec)
    tokens = sum(entry.num_processed for store in stores for entry in store.index() if entry.group_id in groups)
    with _progress(console, tokens) as progress:
        counts = measure_overlap(
            (row for store in stores for row in store.iter_sequences(["experts"], groups.__contains__)),
            {**scorers, **baselines},
            spec,
            device=config.device,
            batch_tokens=config.batch_tokens,
            progress=progress,
        )
    report = overlap_report(
        counts,
        inputs={
            "target": str(config.target),
            "traces": config.traces,
            "predictors": {name: str(path) for name, path in paths.items()},
            **inputs,
        },
        provenance=provenance(),
        notes=notes + more,
    )
    write_overlap_report(report, config.out)
    show_table(Console(), summary_table(report))
    Console().print(f"written to {config.out}", soft_wrap=True)


def _paths(values: str) -> list[Path]:
    parts = [part.strip() for part in values.split(",")]
    if not all(parts):
        raise ValueError(f"traces {values!r} holds an empty entry; write one folder, or several as A,B")
    return [Path(part) for part in parts]


def _open_stores(config: ReportOverlapConfig, spec: RoutingSpec) -> list[TraceStore]:
    from ecospec.train.arrays import open_stores  # noqa: PLC0415 - keeps `--help` fast

    return open_stores(_paths(config.traces), spec, f"target {config.target}")


def _report_groups(config: ReportOverlapConfig, stores: Sequence[TraceStore]) -> set[str]:
    """Groups to report on: those of the stores, of one split where a manifest is given."""
    groups = {entry.group_id for store in stores for entry in store.index()}
    if config.groups is None:
        return groups
    from ecospec.trace_collection.groups_manifest import SPLITS, GroupsManifest  # noqa: PLC0415 - keeps `--help` fast

    if config.split not in SPLITS:
        raise ValueError(f"--split must be one of {', '.join(SPLITS)}, got {config.split!r}")
    splits = GroupsManifest.load(config.groups).splits()
    chosen = {group for group in groups if splits.get(group) == config.split}
    if not chosen:
        raise ValueError(
            f"none of the {len(groups)} groups of {config.traces} is in split {config.split!r} of {config.groups}; "
            "report on traces of that split, or leave out --groups"
        )
    return chosen


def _load(config: ReportOverlapConfig, paths: Mapping[str, Path], spec: RoutingSpec) -> dict[str, PredictorBundle]:
    import torch  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.predictor.attached import DrafterAttachedPredictor  # noqa: PLC0415
    from ecospec.predictor.bundle import load_predictor  # noqa: PLC0415
    from ecospec.predictor.bundle_files import bundle_folder  # noqa: PLC0415
    from ecospec.predictor.checkpoint_files import load_target_embedding  # noqa: PLC0415
    from ecospec.predictor.predictor_config import PredictorConfig  # noqa: PLC0415

    for name, path in paths.items():
        if (
            config.drafter is None
            and PredictorConfig.read(bundle_folder(path)).kind == DrafterAttachedPredictor.kind
        ):
            raise ValueError(f"predictor {name} reads the hidden states of a drafter; name it with --drafter")
    dtype = getattr(torch, config.dtype)
    embedding = load_target_embedding(config.target, device=config.device, dtype=dtype)
    return {
        name: load_predictor(
            path, target_embedding=embedding, require_spec=spec, device=config.device, dtype=dtype
        ).eval()
        for name, path in paths.items()
    }


def _scorers(
    config: ReportOverlapConfig, trained: Mapping[str, PredictorBundle], spec: RoutingSpec
) -> tuple[dict[str, SequencePredictor], list[str]]:
    """What scores the sequences: the predictors, those that read a drafter's states at every level; and caveats."""
    from ecospec.predictor.attached import DrafterAttachedPredictor  # noqa: PLC0415 - keeps `--help` fast

    attached = {name: one for name, one in trained.items() if isinstance(one, DrafterAttachedPredictor)}
    if not attached:
        return dict(trained), []
    from ecospec.cli.train_attached import drafter_view  # noqa: PLC0415
    from ecospec.eval.attached_overlap import LevelScorer, TextDescriptions  # noqa: PLC0415

    describe = TextDescriptions(drafter_view(config, spec, attached.values()), config.batch_tokens)
    scorers: dict[str, SequencePredictor] = {}
    for name, one in trained.items():
        if isinstance(one, DrafterAttachedPredictor):
            scorers |= {f"{name}@{level}": LevelScorer(one, describe, level) for level in range(config.depth + 1)}
        else:
            scorers[name] = one
    note = "NAME@d scores each token as a node d levels below the root of a draft tree (0: the root itself)."
    return scorers, [note]


def _baselines(
    config: ReportOverlapConfig, spec: RoutingSpec, groups: set[str], trained: Mapping[str, PredictorBundle]
) -> tuple[dict[str, PredictorBundle], dict[str, Any], list[str]]:
    """Fitted baselines, what they were fitted on (for the report), and caveats."""
    if config.baselines is not None:
        return _read_baselines(config, config.baselines, spec, groups, trained)
    from ecospec.eval.overlap_report import require_disjoint  # noqa: PLC0415
    from ecospec.train.arrays import open_stores, read_arrays  # noqa: PLC0415
    from ecospec.train.baselines import fit_baselines  # noqa: PLC0415

    assert config.baseline_traces is not None
    stores = config.baseline_traces
    arrays = read_arrays(open_stores(_paths(stores), spec, f"target {config.target}"))
    if not config.allow_leak:
        require_disjoint(
            set(arrays.group_ids), groups, training=f"the training traces {stores}", report=config.traces
        )
    fitted = fit_baselines(arrays)
    inputs = {"baseline_traces": stores, "baseline_tokens": len(arrays.tokens)}
    size = f"{len(arrays.tokens):,} tokens of {stores}"
    notes = [f"Tables are fitted on all {size}, a trained predictor's validation split included."]
    notes += [_other_traces(name, one, stores) for name, one in trained.items() if not _trained_on(one, arrays)]
    return {name: fitted[name].to(config.device) for name in FITTED}, inputs, notes


def _read_baselines(
    config: ReportOverlapConfig,
    folder: Path,
    spec: RoutingSpec,
    groups: set[str],
    trained: Mapping[str, PredictorBundle],
) -> tuple[dict[str, PredictorBundle], dict[str, Any], list[str]]:
    """As `_baselines`, from bundles, which say themselves what they were fitted on."""
    from ecospec.eval.overlap_report import require_disjoint  # noqa: PLC0415 - keeps `--help` fast

    names = [*FITTED, OPTIONAL] if (folder / OPTIONAL).exists() else FITTED
    loaded = _load(config, {name: folder / name for name in names}, spec)
    data = loaded["bigram_table"].config.training_data
    for name, predictor in loaded.items():
        fitted_on = predictor.config.training_data
        if fitted_on.get("fingerprint") != data.get("fingerprint"):
            raise ValueError(
                f"{folder / name} was fitted on other traces than {folder / 'bigram_table'}; fit them together"
            )
        if config.allow_leak:
            continue
        if "group_ids" not in fitted_on:
            raise ValueError(
                f"{folder / name} does not record the groups it was fitted on, so a leak cannot be ruled out; fit "
                "it again (ecospec fit-baselines), or add --allow_leak true to report all the same"
            )
        require_disjoint(
            set(fitted_on["group_ids"]), groups, training=f"the training traces of {folder}", report=config.traces
        )
    same: list[str] = []
    others: list[str] = []
    for name, predictor in trained.items():
        known = predictor.config.training_data.get("fingerprint")
        (others if known is None or known != data.get("fingerprint") else same).append(name)
    tokens = data.get("tokens")
    size = f"{tokens:,} tokens" if isinstance(tokens, int) else "an unknown number of tokens"
    whose = f", the very traces that {' and '.join(same)} was trained on" if same else ""
    notes = [f"Tables were read from {folder}; they are fitted on {size}{whose}."]
    notes += [_other_traces(name, trained[name], str(folder)) for name in others]
    return loaded, {"baselines": str(folder), "baseline_tokens": tokens}, notes


def _other_traces(name: str, predictor: PredictorBundle, stores: str) -> str:
    tokens = predictor.config.training_data.get("tokens")
    amount = f" ({tokens:,} tokens)" if isinstance(tokens, int) else ""
    return f"Predictor {name} was trained on other traces{amount} than the tables ({stores})."


def _trained_on(predictor: PredictorBundle, arrays: TraceArrays) -> bool:
    """Whether the predictor's recorded training data is the training split of these traces."""
    from ecospec.train.splits import TRAINING, SplitConfig, split_arrays  # noqa: PLC0415 - keeps `--help` fast

    options, data = predictor.config.options, predictor.config.training_data
    if "validation_fraction" not in options or "seed" not in options:
        return False
    try:
        splits = split_arrays(arrays, SplitConfig.from_options(options))
    except ValueError:
        return False
    return bool(arrays.subset(splits == TRAINING).fingerprint() == data.get("fingerprint"))


@contextmanager
def _progress(console: Console, tokens: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress  # noqa: PLC0415 - keeps `--help` fast

    bar = Progress(console=console)
    task = bar.add_task("score tokens", total=tokens)
    with ExitStack() as stack:

        def show(done: int) -> None:
            if not bar.live.is_started:  # at the first batch: no empty bar above an error
                stack.enter_context(bar)
            bar.update(task, advance=done)

        yield show
