"""One training run: traces in, Lightning checkpoints and logs out.

On disk::

    OUT/
      run.json                     # options and facts of the run
      checkpoints/last.ckpt        # resume from here, also in the middle of an epoch
      checkpoints/best.ckpt        # best validation overlap; export this one
      checkpoints/overlap-*.ckpt   # where the levels of --keep_overlap were reached; see levels.py
      logs/csv_<n>/metrics.csv     # one per session of the run
      logs/tensorboard_<n>/
      arrays/                      # the traces as plain files, unless --cache names another place
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.train.checkpoints import ResumePoint, refuse_changed_run
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.data import TraceDataModule
from ecospec.train.levels import OverlapLevels, level_path
from ecospec.train.module import RoutingPredictorModule, trained_parameters
from ecospec.train.network import new_model
from ecospec.train.processes import is_first_process, lost_process
from ecospec.train.run_data import RunData, prepare_data
from ecospec.train.trainer import LAST, build_trainer, checkpoint_callbacks, require_wandb


@dataclass(frozen=True)
class TrainingResult:
    """What a run ended with.

    Attributes:
        best: Checkpoint with the best validation overlap.
        last: Checkpoint to resume from.
        overlap: Top-K overlap of the best checkpoint on the validation split.
        baseline_overlaps: Top-K overlap of every trivial predictor there, fitted on the training split; empty in
            all processes but the first.
    """

    best: Path
    last: Path
    overlap: float
    baseline_overlaps: dict[str, float]


def train_predictor(
    config: TrainPredictorConfig,
    *,
    callbacks: Sequence[Callback] = (),
    provenance: Mapping[str, Any] | None = None,
) -> TrainingResult:
    """Train a predictor, or go on with an interrupted run.

    With several devices Lightning starts the program that called this once more for each of the others, unless
    torchrun or SLURM did; the first process makes the files.

    Args:
        config: Options of the run.
        callbacks: Further callbacks, e.g. a progress bar; the module's ``facts["baseline_overlaps"]`` are at their
            disposal.
        provenance: Plain values stored in checkpoints and bundle: git SHA, argv, ...

    Raises:
        FileNotFoundError: The target or a trace store does not exist, or there is nothing to resume.
        ValueError: Traces of another target, damaged or incomplete ones, an empty split, an option out of range, a
            run to resume that differs, or a loss that is not finite.
        ConnectionError: Another process of the run is gone.
        KeyboardInterrupt: The run was interrupted (Ctrl-C or SIGTERM).
    """
    require_wandb(config)
    last = config.out / "checkpoints" / LAST
    levels = config.overlap_levels()
    # A run killed before its first last.ckpt may have reached a level all the same.
    earlier = [path for path in (last, *(level_path(last.parent, level) for level in levels)) if path.exists()]
    if earlier and not config.resume:
        raise ValueError(
            f"{config.out} holds a training run; name a new folder, or resume this one (--resume true)"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    spec = routing_spec_of(config.target)
    data = prepare_data(config, spec)
    torch.manual_seed(config.seed)
    model = new_model(spec, config)
    facts = _facts(config, model, data) | {"provenance": dict(provenance or {})}
    for checkpoint in earlier:
        refuse_changed_run(checkpoint, facts)
    module = RoutingPredictorModule(model, config, facts)
    best, latest = checkpoint_callbacks(last.parent)
    resume = ResumePoint(data.module, last, config.checkpoint_every_minutes, config.checkpoint_every_steps)
    kept = OverlapLevels(last.parent, levels, config.overlap_looks)  # before a last.ckpt is written: see levels.py
    trainer = build_trainer(config, [kept, resume, *callbacks, best, latest])
    if is_first_process(config.processes()):
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    _fit(trainer, module, data.module, last)
    score = float(best.best_model_score or 0.0)
    return TrainingResult(Path(best.best_model_path), last, score, data.baseline_overlaps)


def _fit(trainer: Trainer, module: RoutingPredictorModule, data: TraceDataModule, last: Path) -> None:
    """Fit from ``last``, if it is there; an interruption surfaces as KeyboardInterrupt.

    Lightning turns Ctrl-C into ``sys.exit(1)`` and leaves SIGINT ignored. Whatever ends this process's part ends
    the processes that it started: they would wait for it.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    except SystemExit as stop:
        if trainer.interrupted or trainer.received_sigterm:
            raise KeyboardInterrupt from stop
        raise
    except RuntimeError as error:
        if trainer.world_size > 1 and lost_process(error):
            raise ConnectionError(
                "another process of this run is gone (its own message, if any, is above); run the same command "
                "with --resume to go on from the last checkpoint"
            ) from error
        raise
    finally:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)  # those that have ended are left alone
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _facts(config: TrainPredictorConfig, model: RoutingPredictorModel, data: RunData) -> dict[str, Any]:
    """Plain values that describe the run; JSON and ``torch.load(weights_only=True)`` hold them."""
    options = dataclasses.asdict(config)
    options |= {name: str(value) for name, value in options.items() if isinstance(value, Path)}
    return {
        "spec": model.spec.to_dict(),
        "backbone": model.backbone_config,
        "input_mode": model.input_mode.value,
        "embedding_size": model.embedding_size,
        "head_rank": model.head_rank,
        "options": options
        | {
            "optimizer": config.chosen_optimizer(),
            "dtype": config.chosen_dtype(),
            "strategy": config.chosen_strategy(),
        },
        "parameters": trained_parameters(model),
        "training_data": data.facts,
        "padding_share": data.padding_share,
        "baseline_overlaps": data.baseline_overlaps,
    }
