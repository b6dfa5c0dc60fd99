"""Training of the EAGLE-3 head on cached target states, with exact resume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from checkpoints.recipe.head_data import FeatureCache
from checkpoints.recipe.language_training import TrainingConfig, learning_rate_factor
from checkpoints.recipe.trainer import run_steps
from ecospec.decoding.drafters import Eagle3Head


@dataclass(frozen=True)
class HeadTraining:
    """Numbers of the run; the defaults are those of the committed head.

    Attributes:
        epochs: Passes over the cached sequences.
        batch: Sequences per step.
        unroll: Draft forwards in training: the head meets its own states as in drafting.
        decay: Weight of step k is ``decay ** k``.
        learning_rate: Peak of warm-up and cosine; the cosine ends at zero.
        warmup_steps: Steps of linear warm-up.
        weight_decay: AdamW, on matrices only.
        checkpoint_every: Steps between resumable checkpoints.
        validate_every: Steps between measurements of the held-out loss.
    """

    epochs: int = 4
    batch: int = 20
    unroll: int = 3
    decay: float = 0.8
    learning_rate: float = 4e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    checkpoint_every: int = 250
    validate_every: int = 500

    def steps(self, sequences: int) -> int:
        """Return the optimiser steps for that many sequences; incomplete batches are left out."""
        return self.epochs * (sequences // self.batch)


def unrolled_losses(
    head: Eagle3Head, batch: dict[str, Tensor], output_rows: Tensor, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return loss and top-2 accuracy of every unrolled step.

    The loss is the cross-entropy against the target's distribution over the draft vocabulary, renormalised.
    Positions where the target's most probable token is outside the draft vocabulary do not count (as in SpecForge).

    Args:
        head: The head.
        batch: From `FeatureCache.rows`, S sequences of T tokens.
        output_rows: ``[Vd, H]``, rows of the target's output embedding for the draft vocabulary.
        steps: Draft forwards.

    Returns:
        Per step a scalar loss in nats, and the share of counted positions whose token is among the head's best two.
    """
    logits = head.unroll(batch["tokens"], batch["aux"], steps)
    bases = logits[0].shape[1]
    target = (batch["final"][:, 1:] @ output_rows.t()).softmax(-1)
    greedy = batch["greedy"][:, 1:]
    losses, hits = [], []
    for step, found in enumerate(logits):
        tokens = greedy[:, step : step + bases]
        counted = head.t2d[tokens]
        total = counted.sum().clamp(min=1)
        flat = F.cross_entropy(found.flatten(0, 1), target[:, step : step + bases].flatten(0, 1), reduction="none")
        losses.append((flat * counted.flatten()).sum() / total)
        best = head.draft_vocabulary[found.detach().topk(2, dim=-1).indices]
        hits.append(((best == tokens[..., None]).any(-1) & counted).sum() / total)
    return losses, hits


class HeadModule(L.LightningModule):
    """Trains an `Eagle3Head` by training-time test.

    Args:
        head: The head; its embedding is the target's and stays as it is.
        output_rows: ``[Vd, H]``, rows of the target's output embedding for the draft vocabulary.
        config: Numbers of the run.
        total_steps: Optimiser steps.
    """

    def __init__(self, head: Eagle3Head, output_rows: Tensor, config: HeadTraining, total_steps: int) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self.total_steps = total_steps
        self.register_buffer("output_rows", output_rows.detach().clone(), persistent=False)

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        rows = self.output_rows
        assert isinstance(rows, Tensor)
        losses, hits = unrolled_losses(self.head, batch, rows, self.config.unroll)
        total = torch.stack([self.config.decay**step * loss for step, loss in enumerate(losses)]).sum()
        values = {f"loss_{step}": loss.detach() for step, loss in enumerate(losses)}
        return total, values | {f"top2_{step}": hit for step, hit in enumerate(hits)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Return the weighted loss of a batch of sequences."""
        total, values = self._losses(batch)
        self.log_dict(values)
        return total

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # noqa: ARG002
        """Log loss and top-2 accuracy per step on held-out sequences."""
        values = self._losses(batch)[1]
        self.log_dict(
            {f"held_out_{name}": value for name, value in values.items()}, batch_size=len(batch["tokens"])
        )

    def configure_optimizers(self) -> Any:
        """Return AdamW (decay on matrices) with warm-up and cosine to zero."""
        config = self.config
        trained = list(self.head.parameters())
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
        shape = TrainingConfig(total_steps=self.total_steps, warmup_steps=config.warmup_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, shape))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _PlannedBatches(IterableDataset[dict[str, Tensor]]):
    """Batches `start` and later of a plan that depends on the seed only."""

    def __init__(self, cache: FeatureCache, plan: NDArray[np.int64], start: int) -> None:
        self.cache = cache
        self.plan = plan
        self.start = start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in self.plan[self.start :]:
            yield self.cache.rows(np.sort(index))  # ascending reads; the order within a batch does not matter


class HeadData(L.LightningDataModule):
    """Feeds cached sequences, reshuffled every epoch; after a resume from where the checkpoint was written.

    Args:
        cache: Training sequences.
        held_out: Validation sequences.
        config: Numbers of the run.
        seed: Seed of the order.
    """

    def __init__(self, cache: FeatureCache, held_out: FeatureCache, config: HeadTraining, seed: int) -> None:
        super().__init__()
        self.cache = cache
        self.held_out = held_out
        usable = len(cache) // config.batch * config.batch
        orders = [np.random.default_rng([seed, epoch]).permutation(len(cache)) for epoch in range(config.epochs)]
        self.plan = np.concatenate([order[:usable].reshape(-1, config.batch) for order in orders])
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches consumed."""
        return {"step": self.trainer.global_step if self.trainer is not None else self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches consumed before the checkpoint."""
        self.start = int(state_dict["step"])

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the remaining batches."""
        return DataLoader(_PlannedBatches(self.cache, self.plan, self.start), batch_size=None)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the held-out sequences in order."""
        plan = np.array_split(np.arange(len(self.held_out)), max(1, len(self.held_out) // 20))
        return DataLoader([self.held_out.rows(index) for index in plan], batch_size=None)  # type: ignore[arg-type]


class HeadProgress(Callback):
    """One line per `every` steps, one per validation; keeps the time spent training, across resumes.

    Args:
        tokens_per_step: Tokens per optimiser step.
        total_steps: Of the run.
        every: Steps between lines.
    """

    def __init__(self, tokens_per_step: int, total_steps: int, every: int = 50) -> None:
        self.tokens_per_step = tokens_per_step
        self.total_steps = total_steps
        self.every = every
        self.seconds = 0.0
        self.curve: list[tuple[int, float, float]] = []
        self._console = Console(soft_wrap=True)
        self._mark = 0.0
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return seconds trained and the held-out curve."""
        return {"seconds": self.seconds, "curve": self.curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore seconds trained and the held-out curve."""
        self.seconds = float(state_dict["seconds"])
        self.curve = [(int(step), float(loss), float(hit)) for step, loss, hit in state_dict["curve"]]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Start the clock."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: dict[str, Tensor],  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Print a line when one is due."""
        self._steps += 1
        step = trainer.global_step
        if step % self.every and step != self.total_steps:
            return
        now = time.perf_counter()
        elapsed = now - self._mark
        left = (self.total_steps - step) * elapsed / self._steps
        values = trainer.callback_metrics
        losses = " ".join(f"{float(values[name]):.3f}" for name in sorted(values) if name.startswith("loss_"))
        hits = " ".join(f"{float(values[name]):.2f}" for name in sorted(values) if name.startswith("top2_"))
        self._console.print(
            f"step {step}/{self.total_steps}  loss {losses}  top-2 {hits}  "
            f"{self._steps * self.tokens_per_step / elapsed:,.0f} tokens/s  {left / 60:.1f} min left"
        )
        self.seconds += elapsed
        self._mark, self._steps = now, 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Print and keep the held-out loss and top-2 accuracy of the first step; its time does not count."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.curve.append((trainer.global_step, values["held_out_loss_0"], values["held_out_top2_0"]))
        shown = " ".join(
            f"{name.removeprefix('held_out_')} {values[name]:.3f}" for name in sorted(values) if "held" in name
        )
        self._console.print(f"step {trainer.global_step}  held out: {shown}")
        if not self._steps:
            self._mark = time.perf_counter()


def train_head(module: HeadModule, data: HeadData, folder: Path, *, stop_after: int | None = None) -> HeadProgress:
    """Train to the end, or to `stop_after` steps, continuing from ``last.ckpt`` in `folder` if there is one.

    Args:
        module: Head and configuration.
        data: Cached sequences.
        folder: Where checkpoints are kept.
        stop_after: Stop early after this many steps in total (as a killed run would).

    Returns:
        The progress callback with training time and held-out curve.
    """
    config = module.config
    progress = HeadProgress(config.batch * data.cache.tokens.shape[1], module.total_steps)
    run_steps(
        module,
        data,
        folder,
        progress,
        steps=min(module.total_steps, stop_after or module.total_steps),
        checkpoint_every=config.checkpoint_every,
        validate_every=config.validate_every,
    )
    return progress
