"""``ecospec train-attached``: train a predictor that reads a drafter's hidden states, and write its bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.checks import require_at_least, require_drafter, require_known
from ecospec.cli.device import require_device
from ecospec.cli.output import check_output

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.decoding.drafters.eagle3_drafter import Eagle3Drafter
    from ecospec.decoding.target import TargetModel
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.predictor.session import Predictor
    from ecospec.train.attached import AttachedTraining, DrafterView

__all__ = ["TrainAttachedConfig", "run"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TrainAttachedConfig:
    """Options of ``train-attached``."""

    target: Path
    """Folder (or hub id) of the target."""
    drafter: Path
    """Folder of the EAGLE-3 head whose hidden states are read."""
    traces: str
    """Trace store of this target; several, separated by commas, are trained on together."""
    out: Path
    """Folder of the predictor bundle."""
    cache: Path | None = None
    """Folder for traces and states as plain files, 2 * (depth + 1) * H bytes a token; None: removed afterwards."""
    rank: int = 256
    """Rank of the heads."""
    activation: str = "silu"
    """Between the two matrices: silu, or none (one matrix of that rank)."""
    depth: int = 3
    """Deepest level of the draft trees it will score."""
    epochs: int = 10
    """Passes over the training tokens."""
    batch_tokens: int = 2048
    """Tokens of a batch; each counts at every level."""
    learning_rate: float = 4e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.05
    """Decoupled weight decay of the two matrices."""
    max_length: int = 2048
    """Tokens of a sequence that are used, from its start."""
    validation_fraction: float = 0.2
    """Share of groups held out for validation."""
    calibration_fraction: float | None = None
    """Share of groups kept for calibration; None: 0.05, if that is any group at all."""
    baseline_tokens: int = 2_000_000
    """Most tokens of a split that the table baselines are fitted on, or compared on."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    dtype: str = "auto"
    """Arithmetic of target and drafter: auto (float32 on a CPU, else as stored), float32, bfloat16 or float16."""
    seed: int = 0
    """Seed of the split, the initial weights and the order of training."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names it.
        """
        require_known("dtype", [self.dtype], DTYPES)
        require_at_least(self, 1, "threads")
        self.training()

    def training(self) -> AttachedTraining:
        """The options of the training itself."""
        from ecospec.train.attached import AttachedTraining  # noqa: PLC0415 - keeps `--help` fast

        names = [field.name for field in dataclasses.fields(AttachedTraining)]
        return AttachedTraining(**{name: getattr(self, name) for name in names})


def run(config: TrainAttachedConfig) -> None:
    """Train, printing the validation overlap of every epoch, and save the bundle."""
    require_device(config.device)
    check_output(config.out, resume=None)
    require_drafter(config.drafter)
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.train.arrays import open_stores  # noqa: PLC0415
    from ecospec.train.attached import train_attached  # noqa: PLC0415
    from ecospec.train.baselines import best_table  # noqa: PLC0415

    spec = routing_spec_of(config.target)
    paths = [Path(part.strip()) for part in config.traces.split(",") if part.strip()]
    stores = open_stores(paths, spec, f"target {config.target}")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    console = Console()
    view = drafter_view(config, spec)
    tokens = sum(min(entry.num_processed, config.max_length) for store in stores for entry in store.index())
    with contextlib.ExitStack() as stack:
        folder = config.cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecospec-states-")))
        show = stack.enter_context(_progress(Console(stderr=True), tokens))
        predictor = train_attached(
            stores,
            folder,
            view,
            config.training(),
            device=config.device,
            provenance=provenance(),
            progress=show,
            on_epoch=lambda epoch, loss, levels: console.print(_line(epoch, loss, levels), soft_wrap=True),
        )
    predictor.save_pretrained(config.out)
    metrics = predictor.config.metrics
    prefix = "val_overlap_"
    tables = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    name, table = best_table(tables)
    console.print(
        f"written to {config.out}: validation overlap {metrics['val_overlap']:.4f} over all levels, "
        f"{name} {table:.4f}",
        soft_wrap=True,
    )


def drafter_view(config: Any, spec: RoutingSpec, predictors: Iterable[Predictor] = ()) -> DrafterView:
    """Load target and drafter.

    Args:
        config: Has ``target``, ``drafter``, ``device``, ``dtype`` and ``depth``.
        spec: Routing of the target.
        predictors: What will read the drafter's states.

    Raises:
        ValueError: The two do not belong together, or a predictor was trained with another drafter.
    """
    from ecospec.decoding.drafter_states import require_states, text_states  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.train.attached import DrafterView  # noqa: PLC0415

    target, drafter = open_drafter(config, spec)
    for predictor in predictors:
        require_states(drafter, predictor)
    return DrafterView(
        fingerprint=drafter.state_fingerprint,
        state_sizes=drafter.state_sizes,
        token_states=lambda ids: drafter.token_states(ids.to(drafter.head.device)),
        text_states=lambda ids: text_states(target, drafter, ids, depth=config.depth),
    )


def open_drafter(config: Any, spec: RoutingSpec) -> tuple[TargetModel, Eagle3Drafter]:
    """Load target and drafter in one arithmetic.

    Args:
        config: Has ``target``, ``drafter``, ``device`` and ``dtype``.
        spec: Routing of the target.

    Raises:
        ValueError: The two do not belong together.
    """
    from ecospec.cli.loading import load_target  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.decoding.drafters.eagle3_drafter import Eagle3Drafter  # noqa: PLC0415
    from ecospec.decoding.target import TargetModel  # noqa: PLC0415

    dtype = "float32" if config.dtype == "auto" and config.device == "cpu" else config.dtype
    model = load_target(config.target, dtype, config.device)
    identity = {name: getattr(spec, name) for name in ("tokenizer_fingerprint", "target_fingerprint")}
    drafter = Eagle3Drafter.from_pretrained(config.drafter, model, identity=identity, dtype=model.dtype)
    return TargetModel(model, spec), drafter


def _line(epoch: int, loss: float, levels: list[float]) -> str:
    """One epoch in a line."""
    root, *below = levels
    shown = "  ".join(f"depth {level} {value:.4f}" for level, value in enumerate(below, start=1))
    return f"epoch {epoch}: loss {loss:.4f}, validation overlap  root {root:.4f}  {shown}"


@contextlib.contextmanager
def _progress(console: Console, tokens: int) -> Iterator[Callable[[int], None]]:
    """Yield what takes the tokens of every sequence that target and drafter have read."""
    from rich.progress import Progress  # noqa: PLC0415 - keeps `--help` fast

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("target and drafter", total=tokens)
        yield lambda done: bar.update(task, advance=done)
