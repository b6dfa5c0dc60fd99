"""Progress of a predictor's training as lines of text, for terminals and log files alike."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ecospec.train.baselines import best_table

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor


def quiet_lightning() -> None:
    """Silence what Lightning prints about itself: devices it looked for, tips, deprecations inside of it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log.*sync_dist=True")
    warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")


class TrainingLines(Callback):
    """One line per validation: overlap beside the best table; optionally lines in between.

    Args:
        console: Where to print.
        every_seconds: Seconds between lines while an epoch runs; None prints none (a progress bar shows them).
    """

    def __init__(self, console: Console, every_seconds: float | None = None) -> None:
        self._console = console
        self._every = every_seconds
        self._mark = 0.0
        self._tokens = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Say what is trained on what."""
        facts = pl_module.facts
        data = facts["training_data"]
        baselines = "  ".join(f"{name} {value:.4f}" for name, value in facts["baseline_overlaps"].items())
        self._print(
            f"{facts['parameters']:,} parameters; {data['tokens']:,} tokens of {data['groups']} groups, "
            f"validation {data['validation_tokens']:,} tokens of {data['validation_groups']} groups"
        )
        self._print(f"overlap on the validation split, fitted on the training split: {baselines}")
        self._mark = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ARG002 - Lightning's
        batch: Mapping[str, Tensor],
        batch_idx: int,
    ) -> None:
        """Print a line when one is due."""
        if self._every is None:
            return
        self._tokens += batch["input_ids"].numel()
        seconds = time.monotonic() - self._mark
        if seconds < self._every:
            return
        loss = float(trainer.callback_metrics["train_loss"])
        self._print(
            f"epoch {trainer.current_epoch + 1} batch {batch_idx + 1}/{trainer.num_training_batches}  "
            f"{pl_module.elapsed_minutes():.1f} min  loss {loss:.3f}  {self._tokens / seconds:,.0f} tokens/s"
        )
        self._mark, self._tokens = time.monotonic(), 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print overlap and gain."""
        name, table = best_table(pl_module.facts["baseline_overlaps"])
        metrics = trainer.callback_metrics
        overlap = float(metrics["val_overlap"])
        self._print(
            f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {pl_module.elapsed_minutes():.1f} min  "
            f"loss {float(metrics['train_loss_epoch']):.3f}  validation loss {float(metrics['val_loss']):.3f}  "
            f"overlap {overlap:.4f}  best table ({name}) {table:.4f}  gain {overlap - table:+.4f}"
        )

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)
