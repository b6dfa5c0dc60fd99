"""``ecospec fit-baselines``: fit the predictors that a trained one has to beat, and write their bundles."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ecospec.cli.checks import require_at_least
from ecospec.cli.device import require_device
from ecospec.cli.output import check_output, prepare_output
from ecospec.train.mlp_config import MlpTraining

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.predictor.bundle_files import PredictorBundle
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.train.arrays import TraceArrays

__all__ = ["FitBaselinesConfig", "run"]


@dataclass(frozen=True, kw_only=True)
class FitBaselinesConfig(MlpTraining):
    """Options of ``fit-baselines``."""

    target: Path
    """Folder of the target; its embedding table is the perceptron's input."""
    traces: str
    """Trace store of this target; several, separated by commas, are fitted on together."""
    out: Path
    """Folder of the bundles: random, frequency, token_table, bigram_table, last_token, mlp."""
    full_tables: bool = False
    """Keep the tables' probabilities, 2 L E bytes a row, instead of the K best experts of each row."""
    mlp: bool = True
    """Train the perceptron too."""
    validation_fraction: float = 0.2
    """Share of groups held out for validation, as of train-predictor: same seed, same groups."""
    calibration_fraction: float | None = None
    """Share of groups kept for the perceptron's temperatures; None: 0.05, if that is any group at all."""
    hold_out_dataset: str = ""
    """Datasets kept out of all splits; several, separated by commas."""
    hold_out_length: int | None = None
    """Keep sequences of more tokens out of all splits."""
    max_tokens: int = 2_000_000
    """Most tokens of a split that are used, of sequences spread evenly over it; they are held in memory."""
    cache: Path | None = None
    """Folder of the traces as plain files, e.g. arrays of a training run; None: made and removed again."""
    device: str = "cpu"
    """Device of the perceptron's training: cpu, cuda, cuda:0, ..."""
    seed: int = 0
    """Seed of the split, of the random predictor and of the perceptron."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names it.
        """
        super().__post_init__()
        require_at_least(self, 1, "threads", "max_tokens")
        if not self.paths():
            raise ValueError(f"--traces {self.traces!r} names no trace store; name at least one")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"--validation-fraction must lie between 0 and 1, got {self.validation_fraction}")
        if not 0 <= (self.calibration_fraction or 0.0) < 1 - self.validation_fraction:
            raise ValueError(
                "--calibration-fraction must be at least 0 and leave groups for training beside "
                f"--validation-fraction {self.validation_fraction}, got {self.calibration_fraction}"
            )

    def paths(self) -> list[Path]:
        """Folders of the trace stores."""
        return [Path(part.strip()) for part in self.traces.split(",") if part.strip()]


def run(config: FitBaselinesConfig) -> None:
    """Fit on the training split, measure on the validation split, write, and say how good each is."""
    require_device(config.device)
    check_output(config.out, resume=None)
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.train.baselines import fit_baselines, save_baselines  # noqa: PLC0415

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    console = Console()
    training, validation, calibration = _read(config, routing_spec_of(config.target))
    console.print(
        f"{len(training.tokens):,} tokens of {len(set(training.group_ids))} groups, validation "
        f"{len(validation.tokens):,} tokens of {len(set(validation.group_ids))} groups",
        soft_wrap=True,
    )
    fitted: dict[str, PredictorBundle] = fit_baselines(training, seed=config.seed)
    if config.mlp:
        fitted["mlp"] = _fit_mlp(config, training, calibration, console)
    prepare_output(config.out, resume=None)
    overlaps = save_baselines(
        fitted,
        config.out,
        names=list(fitted),
        compact=not config.full_tables,
        validation=validation,
        provenance=provenance(),
    )
    for name, overlap in overlaps.items():
        size = sum(file.stat().st_size for file in (config.out / name).iterdir())
        console.print(f"{config.out / name}: validation overlap {overlap:.4f}, {size / 1e6:.2f} MB", soft_wrap=True)


def _read(config: FitBaselinesConfig, spec: RoutingSpec) -> tuple[TraceArrays, TraceArrays, TraceArrays | None]:
    """Training, validation and, where there is one, calibration split."""
    from ecospec.train.arrays import open_stores  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.train.cache import open_cache  # noqa: PLC0415
    from ecospec.train.splits import (  # noqa: PLC0415
        CALIBRATION,
        TRAINING,
        VALIDATION,
        SplitConfig,
        assign_splits,
    )

    stores = open_stores(config.paths(), spec, f"target {config.target}")
    with contextlib.ExitStack() as stack:
        folder = (
            config.cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecospec-"))) / "arrays"
        )
        cache = open_cache(stores, folder)
        codes = assign_splits(cache.table(config.seed), SplitConfig.from_options(dataclasses.asdict(config)))
        parts = [cache.select(codes == code) for code in (TRAINING, VALIDATION, CALIBRATION)]
        training, validation = (part.load(config.max_tokens) for part in parts[:2])
        return training, validation, parts[2].load(config.max_tokens) if parts[2].num_tokens else None


def _fit_mlp(
    config: FitBaselinesConfig, training: TraceArrays, calibration: TraceArrays | None, console: Console
) -> PredictorBundle:
    import torch  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.predictor.checkpoint_files import load_target_embedding  # noqa: PLC0415
    from ecospec.train.baselines import training_facts  # noqa: PLC0415
    from ecospec.train.mlp import fit_mlp  # noqa: PLC0415

    return fit_mlp(
        training,
        load_target_embedding(config.target, dtype=torch.float32),
        config,
        calibration=calibration,
        training_data=training_facts(training),
        device=config.device,
        on_epoch=lambda epoch, loss: console.print(
            f"mlp: epoch {epoch}/{config.epochs}, loss {loss:.4f}", soft_wrap=True
        ),
    )
