"""Checkpoint files of a training run: written whole or not at all, read with errors that name the file."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.manifest import publish
from ecospec.train.data import TraceDataModule

#: Options that may differ when a run is resumed. Target and traces are compared by content instead. The learning
#: rate follows the share of the run that is done, so a longer run is another run from its first step on, unless it
#: is made of more cycles of the same length.
FREE_OPTIONS = frozenset(
    {
        *("target", "traces", "tree_traces", "out", "cache", "device", "threads", "workers", "resume"),
        *("checkpoint_every_minutes", "checkpoint_every_steps", "devices", "patience", "wandb"),
    }
)
_LENGTH_OPTIONS = frozenset({"max_epochs", "cycles"})


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a crash leaves the old file or the new one, never a torn one.

    Lightning's own writer moves its temporary file from another folder, perhaps another file system.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object | None = None
    ) -> None:
        """Write to a temporary file in the same folder, make it durable, rename it."""
        del storage_options
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(final.name + ".tmp")
        try:
            with temporary.open("wb") as handle:
                torch.save(checkpoint, handle)
                handle.flush()
                os.fsync(handle.fileno())
            publish(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: object = None,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Read a checkpoint; tensors land on the CPU and Lightning moves them."""
        del map_location, weights_only
        return read_checkpoint(Path(path))


class ResumePoint(Callback):
    """Keeps the data module's position, writes it down inside an epoch, and logs the padding of every epoch.

    Checkpoints are written between optimiser steps only: accumulated gradients are not part of them.

    Args:
        data: The data module.
        path: The checkpoint to resume from; also written at the end of every epoch (not by this).
        every_minutes: Minutes between checkpoints, or None.
        every_steps: Optimiser steps between checkpoints, or None.
    """

    #: Batches after which the processes of one run ask rank 0 for the time.
    _BATCHES_BETWEEN_LOOKS = 16

    def __init__(
        self, data: TraceDataModule, path: Path, every_minutes: float | None, every_steps: int | None
    ) -> None:
        self._data = data
        self._path = path
        self._seconds = None if every_minutes is None else 60 * every_minutes
        self._steps = every_steps
        self._mark = 0.0
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Start the clock."""
        self._mark, self._last_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - Lightning's
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        """Remember the position; write a checkpoint if one is due."""
        self._data.mark(trainer.current_epoch, batch_idx + 1)
        # The last batch's checkpoint follows the validation.
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and not trainer.is_last_batch
        if between_steps and self._due(trainer, batch_idx):
            trainer.save_checkpoint(self._path)
            self._mark, self._last_step = time.monotonic(), trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """After the last batch, a resumed run begins with the next epoch."""
        if trainer.is_last_batch:
            self._data.mark(trainer.current_epoch + 1, 0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Log the share of padded positions."""
        pl_module.log("padding_share", self._data.padding_share)

    def _due(self, trainer: Trainer, batch_idx: int) -> bool:
        if self._steps is not None and trainer.global_step - self._last_step >= self._steps:
            return True
        if self._seconds is None:
            return False
        due = time.monotonic() - self._mark >= self._seconds
        if trainer.world_size == 1:
            return due
        if (batch_idx + 1) % self._BATCHES_BETWEEN_LOOKS:
            return False
        return bool(trainer.strategy.broadcast(due))  # clocks differ, and all must save together


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Content of a ``.ckpt`` file of ours, tensors on the CPU.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: It does not exist.
        ValueError: It is truncated, damaged, or no checkpoint of ``train-predictor``.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(_not_ours(path)) from error
    saved = content.get("ecospec") if isinstance(content, dict) else None
    if not isinstance(saved, dict) or not isinstance(saved.get("run"), dict) or "state_dict" not in content:
        raise ValueError(_not_ours(path))
    return content


def _not_ours(path: Path) -> str:
    return (
        f"{path} is not a checkpoint of train-predictor, or is truncated; restore it, give another one, or train "
        "again in a new folder"
    )


def _same_cycles(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new run is the old one, or has more cycles of as many epochs each."""
    if old.get("max_minutes") is not None or new.get("max_minutes") is not None:
        return False
    same_length = old["max_epochs"] * new["cycles"] == new["max_epochs"] * old.get("cycles", 1)
    return bool(same_length and new["max_epochs"] >= old["max_epochs"])


def _shown(value: object) -> object:
    """A value for a message, in which an empty one would not be seen."""
    return "none" if value in ("", None) else value


def refuse_changed_run(last: Path, facts: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other options, another target or other traces.

    Args:
        last: Checkpoint to resume from.
        facts: Facts of this run, as they are stored in checkpoints.

    Raises:
        ValueError: Something differs, or the checkpoint cannot be read; the message names it.
    """
    run = read_checkpoint(last)["ecospec"]["run"]
    prolonged = _same_cycles(run["options"], facts["options"])
    for name, new in facts["options"].items():
        old = run["options"].get(name, new)
        if name not in FREE_OPTIONS and old != new and not (prolonged and name in _LENGTH_OPTIONS):
            raise ValueError(
                f"{last} was trained with --{name} {_shown(old)}, this run has {_shown(new)}; resume with the same "
                "options or choose another --out"
            )
    spec = RoutingSpec.from_dict(facts["spec"], "this run")
    spec.require_same(
        RoutingSpec.from_dict(run["spec"], str(last)),
        mine=f"--target {facts['options']['target']}",
        theirs=f"checkpoint {last}",
    )
    if run["training_data"] != facts["training_data"]:
        raise ValueError(
            f"{last} was trained on other --traces ({run['options']['traces']}) or --tree_traces; resume with the "
            "same traces or choose another --out"
        )
