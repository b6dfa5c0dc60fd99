"""The Trainer of target and head: a fixed number of steps, a checkpoint to resume from, progress as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


def run_steps(
    module: L.LightningModule,
    data: L.LightningDataModule,
    folder: Path,
    progress: L.Callback,
    *,
    steps: int,
    checkpoint_every: int,
    validate_every: int,
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
) -> None:
    """Train up to ``steps``, continuing from ``last.ckpt`` in ``folder`` if there is one, and write that again.

    Args:
        module: What is trained.
        data: Its batches.
        folder: Where ``last.ckpt`` is kept.
        progress: Callback that prints and keeps the held-out curve; its state is part of the checkpoint.
        steps: Optimizer steps in total, those of earlier runs included.
        checkpoint_every: Steps between checkpoints.
        validate_every: Steps between validations.
        precision: Lightning's name of the arithmetic.
    """
    last = folder / "last.ckpt"
    checkpoints = ModelCheckpoint(
        dirpath=folder,
        filename=last.stem,
        every_n_train_steps=checkpoint_every,
        save_top_k=1,
        enable_version_counter=False,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[checkpoints, progress],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=validate_every,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
    )
    trainer.fit(module, data, ckpt_path=str(last) if last.is_file() else None, weights_only=False)
    trainer.save_checkpoint(last)
