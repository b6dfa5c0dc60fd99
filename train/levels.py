"""Checkpoints kept where the validation overlap first reaches given levels: one run, predictors of graded quality.

On disk, beside ``best.ckpt`` and ``last.ckpt``::

    OUT/checkpoints/overlap-0.50.ckpt    # weights, metrics and temperatures at the first look with 0.5 or more

Low levels are passed within the first epoch, so as long as a level is ahead the whole validation split is read
several times an epoch, between optimiser steps at places that follow from the batch's number alone. Training itself
does not notice. A file says that its level was reached: it is written whole, before a ``last.ckpt`` that is as far,
so that a run killed at any instant and resumed neither misses a level nor keeps one a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from ecospec.train.checkpoints import read_checkpoint


def level_path(folder: Path, level: float) -> Path:
    """The file of a level.

    >>> level_path(Path("checkpoints"), 0.5).name, level_path(Path("checkpoints"), 0.625).name
    ('overlap-0.50.ckpt', 'overlap-0.625.ckpt')
    """
    return folder / f"overlap-{np.format_float_positional(level, min_digits=2)}.ckpt"


def kept_overlaps(folder: Path, levels: Iterable[float]) -> dict[Path, float]:
    """Validation overlap of the checkpoints that are there, by file, in the order of the levels.

    Args:
        folder: Of the checkpoints.
        levels: Levels of the run.
    """
    files = [path for level in sorted(levels) if (path := level_path(folder, level)).exists()]
    return {path: float(read_checkpoint(path)["ecospec"]["metrics"]["val_overlap"]) for path in files}


def look_is_due(steps: int, total: int, looks: int) -> bool:
    """Whether a look follows this optimiser step: the looks of an epoch are spread evenly.

    Args:
        steps: Optimiser steps of the epoch that are done.
        total: Optimiser steps of the epoch.
        looks: Looks in it.

    >>> [step for step in range(1, 11) if look_is_due(step, 10, 3)]
    [4, 7, 10]
    """
    return steps * looks // total > (steps - 1) * looks // total


class OverlapLevels(Callback):
    """Keeps a checkpoint when the validation overlap first reaches a level.

    Kept checkpoints hold no optimiser state: they are for export, not for resuming.

    Args:
        folder: For the checkpoints.
        levels: Overlaps, between 0 and 1.
        looks: Looks in each epoch while a level is ahead; the validation at its end is the last.
    """

    def __init__(self, folder: Path, levels: Collection[float], looks: int) -> None:
        self._folder = folder
        self._levels = sorted(levels)
        self._ahead: list[float] = []
        self._looks = looks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Find the levels that an earlier session has not reached; the first process's answer counts for all."""
        ahead = [level for level in self._levels if not level_path(self._folder, level).exists()]
        self._ahead = trainer.strategy.broadcast(ahead)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ARG002 - Lightning's
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        """Look, if it is time; after the last batch comes the validation."""
        step, begun = divmod(batch_idx + 1, trainer.accumulate_grad_batches)
        if not self._ahead or begun or trainer.is_last_batch:
            return
        total = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
        if look_is_due(step, total, self._looks):
            self._keep(trainer, pl_module.look()["val_overlap"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the overlap at the end of an epoch."""
        self._keep(trainer, pl_module.metrics["val_overlap"])

    def _keep(self, trainer: Trainer, overlap: float) -> None:
        while self._ahead and overlap >= self._ahead[0]:
            trainer.save_checkpoint(level_path(self._folder, self._ahead.pop(0)), weights_only=True)
