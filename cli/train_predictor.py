"""``ecospec train-predictor``: train a predictor on routing traces."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from ecospec.cli.output import prepare_output
from ecospec.train.config import TrainPredictorConfig

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["TrainPredictorConfig", "run"]


def run(config: TrainPredictorConfig) -> None:
    """Train, printing the validation overlap of every epoch beside the best table baseline."""
    prepare_output(config.out, resume=config.resume)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its banner of devices and tips
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.train.baselines import best_table  # noqa: PLC0415
    from ecospec.train.fit import train_predictor  # noqa: PLC0415

    console = Console()
    result = train_predictor(config, callbacks=_callbacks(console), provenance=provenance())
    name, table = best_table(result.baseline_overlaps)
    console.print(
        f"best validation overlap {result.overlap:.4f}, {name} {table:.4f}, gain {result.overlap - table:+.4f}\n"
        f"next: ecospec export-predictor --checkpoint {config.out} --target {config.target} --out <folder>",
        soft_wrap=True,
    )


def _callbacks(console: Any) -> list[Callback]:
    from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: PLC0415 - keeps `--help` fast
    from lightning.pytorch.callbacks import RichProgressBar  # noqa: PLC0415

    from ecospec.train.baselines import best_table  # noqa: PLC0415

    class EpochLines(Callback):
        """One line per validation: overlap, gain over the best table, speed."""

        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
            data = pl_module.facts["training_data"]
            tables = "  ".join(
                f"{name} {value:.4f}" for name, value in pl_module.facts["baseline_overlaps"].items()
            )
            console.print(
                f"{pl_module.facts['parameters']:,} parameters; {data['tokens']:,} tokens of {data['groups']} "
                f"groups, validation {data['validation_tokens']:,} tokens of {data['validation_groups']} groups\n"
                f"on the validation split, fitted on the training split: {tables}",
                soft_wrap=True,
            )

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            name, table = best_table(pl_module.facts["baseline_overlaps"])
            metrics = trainer.callback_metrics
            overlap = float(metrics["val_overlap"])
            console.print(
                f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {pl_module.elapsed_minutes():.1f} min  "
                f"loss {float(metrics['train_loss_epoch']):.3f}  validation loss {float(metrics['val_loss']):.3f}  "
                f"overlap {overlap:.4f}  best table ({name}) {table:.4f}  gain {overlap - table:+.4f}",
                soft_wrap=True,
            )

    return [EpochLines(), *([RichProgressBar()] if sys.stdout.isatty() else [])]
