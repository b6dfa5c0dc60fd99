"""Lightning's Trainer of a run: devices and strategy, loggers, stopping, checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from ecospec.train.checkpoints import AtomicCheckpointIO
from ecospec.train.config import TrainPredictorConfig

BEST, LAST = "best.ckpt", "last.ckpt"

_LOG_EVERY = 10


def require_wandb(config: TrainPredictorConfig) -> None:
    """Refuse ``wandb`` where its package is missing.

    Raises:
        ValueError: It is not installed.
    """
    if config.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(f"--wandb {config.wandb} needs the wandb package; pip install wandb, or leave --wandb out")


def checkpoint_callbacks(folder: Path) -> tuple[ModelCheckpoint, ModelCheckpoint]:
    """Writers of the best checkpoint by validation overlap, and of the last.

    Args:
        folder: For the files.
    """
    files: dict[str, Any] = {
        "dirpath": folder,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    }
    best = ModelCheckpoint(filename=Path(BEST).stem, monitor="val_overlap", mode="max", **files)
    return best, ModelCheckpoint(filename=Path(LAST).stem, **files)


def build_trainer(
    config: TrainPredictorConfig, callbacks: Sequence[Callback], *, checkpoints: bool = True
) -> Trainer:
    """The Trainer of a run.

    Args:
        config: Options of the run.
        callbacks: In order; early stopping is added where it is asked for. A progress bar among them is shown.
        checkpoints: Whether checkpoints are written.

    Raises:
        ValueError: A value of ``config.trainer`` that Lightning does not take.
    """
    device = torch.device(config.device)
    stopping = []
    if config.patience is not None:
        stopping.append(EarlyStopping("val_overlap", mode="max", patience=config.patience, check_finite=False))
    options: dict[str, Any] = {"log_every_n_steps": _LOG_EVERY, "enable_model_summary": False} | (
        config.trainer or {}
    )
    try:
        return Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=config.devices if device.index is None else [device.index],
            strategy=_strategy(config),
            precision="32-true" if config.chosen_dtype() == "float32" else "bf16-mixed",
            max_epochs=config.max_epochs,
            accumulate_grad_batches=config.accumulate,
            gradient_clip_val=config.gradient_clip,
            plugins=[AtomicCheckpointIO()],
            callbacks=[*callbacks, *stopping],
            logger=_loggers(config),
            enable_checkpointing=checkpoints,
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            num_sanity_val_steps=0,
            inference_mode=False,  # metrics that a validation resets are updated by a look outside of it
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,  # the data module gives every rank its share
            **options,
        )
    except (TypeError, ValueError, MisconfigurationException) as error:
        if not config.trainer:
            raise
        raise ValueError(f"--trainer {config.trainer}: {error}") from error


def _strategy(config: TrainPredictorConfig) -> Any:
    processes = config.processes()
    if processes == 1:
        return "auto"
    if config.chosen_strategy() == "fsdp2":
        # One whole file for a checkpoint: export and other numbers of devices read it.
        return ModelParallelStrategy(
            data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    return DDPStrategy()


def _loggers(config: TrainPredictorConfig) -> list[Logger]:
    session = len(list((config.out / "logs").glob("csv_*")))
    loggers: list[Logger] = [
        CSVLogger(config.out, name="logs", version=f"csv_{session}"),
        TensorBoardLogger(config.out, name="logs", version=f"tensorboard_{session}"),
    ]
    if config.wandb is not None:
        from lightning.pytorch.loggers import WandbLogger  # noqa: PLC0415 - imports wandb, which is optional

        loggers.append(WandbLogger(project=config.wandb, name=config.out.name, save_dir=config.out))
    return loggers
