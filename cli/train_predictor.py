"""``ecospec train-predictor``: train a predictor on routing traces."""

from __future__ import annotations

from ecospec.cli.device import require_device
from ecospec.cli.output import prepare_output
from ecospec.train.config import CACHE_NAMES, TrainPredictorConfig

__all__ = ["TrainPredictorConfig", "run"]


def run(config: TrainPredictorConfig) -> None:
    """Train, printing the validation overlap of every epoch beside the best table baseline."""
    require_device(config.device, devices=config.devices)
    from lightning.pytorch.callbacks import RichProgressBar  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.cli.training_lines import TrainingLines, quiet_lightning  # noqa: PLC0415
    from ecospec.train.baselines import best_table  # noqa: PLC0415
    from ecospec.train.fit import train_predictor  # noqa: PLC0415
    from ecospec.train.levels import kept_overlaps  # noqa: PLC0415
    from ecospec.train.processes import is_first_process  # noqa: PLC0415

    quiet_lightning()
    if not is_first_process(config.processes()):  # the first one makes the folder and prints
        train_predictor(config, provenance=provenance())
        return
    prepare_output(config.out, resume=config.resume, derived=CACHE_NAMES)
    console = Console()
    shown = (
        [TrainingLines(console), RichProgressBar()]
        if console.is_terminal
        else [TrainingLines(console, every_seconds=30)]
    )
    result = train_predictor(config, callbacks=shown, provenance=provenance())
    kept = kept_overlaps(result.last.parent, levels := config.overlap_levels())
    for path, overlap in kept.items():
        console.print(f"kept {path}, validation overlap {overlap:.4f}", soft_wrap=True)
    if len(kept) < len(levels):
        console.print(f"{len(levels) - len(kept)} of {len(levels)} levels were not reached")
    name, table = best_table(result.baseline_overlaps)
    console.print(
        f"best validation overlap {result.overlap:.4f}, {name} {table:.4f}, gain {result.overlap - table:+.4f}\n"
        f"next: ecospec export-predictor --checkpoint {config.out} --target {config.target} --out <folder>",
        soft_wrap=True,
    )
