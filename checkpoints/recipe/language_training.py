"""Training of language models on the corpus: Lightning module, progress lines, and the run with exact resume."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor

from checkpoints.recipe.experts import chunked_cross_entropy
from checkpoints.recipe.target_data import TargetData
from checkpoints.recipe.trainer import run_steps


@dataclass(frozen=True)
class TrainingConfig:
    """Numbers of the run; the defaults are those of the committed target.

    Attributes:
        total_steps: Optimiser steps.
        tokens_per_batch: Tokens per step.
        learning_rate: Peak of warm-up and cosine; the cosine ends at zero.
        warmup_steps: Steps of linear warm-up.
        weight_decay: AdamW, on matrices only.
        router_aux_loss: Weight of the load-balancing loss; without a meaning for dense models.
        checkpoint_every: Steps between resumable checkpoints.
        validate_every: Steps between measurements of the held-out loss.
        precision: Lightning's name of the arithmetic.
    """

    total_steps: int
    tokens_per_batch: int = 4096
    learning_rate: float = 3e-3
    warmup_steps: int = 120
    weight_decay: float = 0.1
    router_aux_loss: float = 4e-3
    checkpoint_every: int = 150
    validate_every: int = 150
    precision: Literal["32-true", "bf16-mixed"] = "32-true"


class LanguageModule(L.LightningModule):
    """Next-token training of a causal LM with tied embeddings.

    Args:
        model: A causal LM of transformers whose ``model`` gives hidden states and whose ``lm_head`` has no bias.
        config: Numbers of the run.
    """

    def __init__(self, model: Any, config: TrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def text_loss(self, windows: Tensor) -> Tensor:
        """Take windows [B, T + 1]; return the mean cross-entropy in nats per token."""
        hidden = self.model.model(windows[:, :-1], use_cache=False).last_hidden_state
        labels = windows[:, 1:].reshape(-1)
        with torch.autocast(hidden.device.type, enabled=False):
            return chunked_cross_entropy(hidden.flatten(0, 1).float(), self.model.lm_head.weight, labels)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002
        """Return the loss of windows [B, T + 1]."""
        loss = self.text_loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # noqa: ARG002
        """Log the held-out loss in nats per token."""
        self.log("held_out_loss", self.text_loss(batch), batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        """Return AdamW (decay on matrices) with warm-up and cosine to zero."""
        config = self.config
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = config.precision == "32-true"  # under autocast Lightning does not clip for a fused optimiser
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of a step relative to the peak: linear warm-up, then a cosine to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class ProgressLines(Callback):
    """One line per 20 steps: tokens, what the module logs, speed, time left. Keeps the time spent training.

    Args:
        config: Numbers of the run.
        every: Steps between lines.
    """

    #: Metrics shown beside the loss, where the module logs them.
    _others = ("balance", "smallest_load")

    def __init__(self, config: TrainingConfig, every: int = 20) -> None:
        self.config = config
        self.every = every
        self.seconds = 0.0
        self.curve: list[tuple[int, float]] = []
        self._console = Console(soft_wrap=True)
        self._mark = 0.0
        self._pause = 0.0
        self._tokens = 0
        self._losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return seconds trained, the open stretch included, and the held-out curve; both survive a resume."""
        open_stretch = time.perf_counter() - self._mark if self._tokens else 0.0
        return {"seconds": self.seconds + open_stretch, "curve": self.curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore seconds trained and the held-out curve."""
        self.seconds = float(state_dict["seconds"])
        self.curve = [(int(step), float(loss)) for step, loss in state_dict["curve"]]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Start the clock."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Tensor,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Print a line when one is due."""
        self._tokens += batch.shape[0] * (batch.shape[1] - 1)
        metrics = trainer.callback_metrics
        self._losses.append(float(metrics["loss"]))
        step = trainer.global_step
        if step % self.every and step != self.config.total_steps:
            return
        now = time.perf_counter()
        speed = self._tokens / (now - self._mark)
        self.seconds += now - self._mark
        left = (self.config.total_steps - step) * self.config.tokens_per_batch / speed
        others = (
            f"{name.replace('_', ' ')} {float(metrics[name]):.2f}  " for name in self._others if name in metrics
        )
        self._console.print(
            f"step {step}/{self.config.total_steps}  {step * self.config.tokens_per_batch / 1e6:.2f} M tokens  "
            f"loss {sum(self._losses) / len(self._losses):.3f}  {''.join(others)}{speed:,.0f} tokens/s  "
            f"{left / 60:.1f} min left"
        )
        self._mark, self._tokens, self._losses = now, 0, []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Stop the clock: validation does not count as training time."""
        self._pause = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Print and keep the held-out loss, and let the clock go on."""
        loss = float(trainer.callback_metrics["held_out_loss"])
        self.curve.append((trainer.global_step, loss))
        self._console.print(f"step {trainer.global_step}  held-out loss {loss:.3f} nats per token")
        self._mark += time.perf_counter() - self._pause


def train(
    module: LanguageModule, data: TargetData, folder: Path, *, stop_after: int | None = None
) -> ProgressLines:
    """Train to the end, or to `stop_after` steps, continuing from ``last.ckpt`` in `folder` if there is one.

    Args:
        module: Model and configuration.
        data: The planned batches.
        folder: Where checkpoints are kept.
        stop_after: Stop early after this many steps in total (as a killed run would).

    Returns:
        The progress callback with training time and held-out curve.
    """
    config = module.config
    progress = ProgressLines(config)
    run_steps(
        module,
        data,
        folder,
        progress,
        steps=min(config.total_steps, stop_after or config.total_steps),
        checkpoint_every=config.checkpoint_every,
        validate_every=config.validate_every,
        precision=config.precision,
    )
    return progress
