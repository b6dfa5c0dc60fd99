"""The LightningModule: loss, a learning rate that follows the run's progress, overlap and calibration per epoch.

Shapes: B batch, T tokens, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ecospec.predictor.model import RoutingPredictorModel
from ecospec.train.calibration import CalibrationError, TemperatureFit
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.losses import objective_loss
from ecospec.train.metrics import TopKOverlap
from ecospec.train.optimizer import MuonAdamW, parameter_groups
from ecospec.train.processes import largest, mean_over_tokens, of_first, share_weights
from ecospec.train.schedule import learning_rate_factor
from ecospec.train.tree_batches import additive_mask

#: Reading the device's flag waits for the device; a few steps more with a broken network cost nothing.
_STEPS_BETWEEN_CHECKS = 10


class RoutingPredictorModule(LightningModule):
    """Trains a `RoutingPredictorModel`.

    A Lightning checkpoint of it holds the trained weights, the optimiser, and under ``"ecospec"`` what `export`
    needs: ``{"run": facts of the run, "metrics": and "temperature": of the last validation or look}``. The target's
    embedding is not in it: the model holds it by reference.

    Args:
        model: The model, on its target embedding.
        config: Options of the run.
        facts: Plain values stored in every checkpoint (routing spec, backbone config, data fingerprint, ...).
    """

    _first_bad: Tensor
    temperature: Tensor

    def __init__(
        self, model: RoutingPredictorModel, config: TrainPredictorConfig, facts: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.facts = dict(facts)
        self.metrics: dict[str, float] = {}
        spec = model.spec
        self.val_overlap = TopKOverlap(spec.num_layers, spec.top_k)
        self.val_tree_overlap = TopKOverlap(spec.num_layers, spec.top_k)
        self._trees_validated = False
        self.temperature_fit = TemperatureFit(spec.num_layers)
        self.raw_error = CalibrationError(spec.top_k)
        self.calibrated_error = CalibrationError(spec.top_k)
        # Scores of layer l are divided by temperature[l]; ones until the first validation.
        self.register_buffer("temperature", torch.ones(spec.num_layers), persistent=False)
        # Losses that are no numbers are ignored: we stop ourselves, with a clearer message. The training loss is
        # that of all processes already, so that a checkpoint of the first process holds all of it.
        self.train_loss = MeanMetric(nan_strategy="ignore", sync_on_compute=False)
        self.val_loss = MeanMetric(nan_strategy="ignore")
        # First optimiser step whose loss was not finite, -1 for none; on the device, so that no step waits for it.
        self.register_buffer("_first_bad", torch.tensor(-1), persistent=False)
        self._elapsed = 0.0
        self._started: float | None = None

    # ---- progress -----------------------------------------------------------------------------------------------

    def elapsed_minutes(self) -> float:
        """Wall-clock minutes of fitting so far, earlier sessions of a resumed run included."""
        running = 0.0 if self._started is None else time.monotonic() - self._started
        return (self._elapsed + running) / 60

    def progress(self, batch_index: int) -> float:
        """Share of the run that is done: of epochs or of the time budget, whichever is further."""
        batches = max(int(self.trainer.num_training_batches), 1)
        share: float = (self.current_epoch + batch_index / batches) / self.config.max_epochs
        if self.config.max_minutes is not None:
            # One clock for all processes: they must take the same step at the same learning rate.
            share = max(share, of_first(self.elapsed_minutes()) / self.config.max_minutes)
        return share

    # ---- Lightning hooks ----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Divide the weights over the processes, where the strategy is FSDP2."""
        if self.config.chosen_strategy() == "fsdp2":
            layers = next((m for m in self.model.backbone.modules() if isinstance(m, nn.ModuleList)), None)
            share_weights(self.model, layers, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        """Bring the target's embedding to this process's device, and start the clock of the time budget."""
        if isinstance(table := self.model.target_embedding, Tensor):
            self.model.set_target_embedding(table.to(self.device))
        self._started = time.monotonic()

    def on_train_batch_start(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Set learning rate and random state; stop when the time budget is spent."""
        del batch
        # Dropout as a function of (seed, epoch, batch, process) and nothing else, so that a resumed run repeats it.
        place = (self.config.seed * 1_000_003 + self.current_epoch) * 1_000_003 + batch_idx
        torch.manual_seed((place + self.global_rank * 15_485_863) % 2**63)
        progress = self.progress(batch_idx)
        factor = learning_rate_factor(progress, self.config.warmup, self.config.cycles)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["peak"] * factor
        self.log("learning_rate", self.config.learning_rate * factor)
        if progress >= 1:
            self.trainer.should_stop = True
        if batch_idx % _STEPS_BETWEEN_CHECKS == 0:
            self._require_finite()

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch.

        Args:
            batch: Of windows of text or of draft trees; see `ecospec.train.data`.
            batch_idx: Number of the batch in the epoch.
        """
        del batch_idx
        own, tokens = objective_loss(self.config.objective, self._scores(batch), batch), batch["mask"].sum()
        loss, all_tokens = mean_over_tokens(own.detach(), tokens)
        self._watch(loss)
        self.train_loss.update(loss, all_tokens)
        self.log("train_loss", loss, prog_bar=True)
        # Every token of an epoch weighs the same: the few tokens left of a bucket must not make a full step. DDP
        # and FSDP average gradients over processes, which each hold some of the batch's tokens: times their number
        # it is the sum, as in one process.
        weight: Tensor = tokens * self.trainer.world_size / self.config.batch_tokens
        return own * weight

    def on_validation_epoch_start(self) -> None:
        """Fit the temperatures on the calibration split, which neither trains nor validates."""
        data = self.trainer.datamodule
        if data.calibration is None:
            return
        for batch in data.calibration_dataloader():
            moved = self.trainer.strategy.batch_to_device(batch, self.device)
            with self.trainer.precision_plugin.forward_context():
                scores = self._scores(moved)
            self.temperature_fit.update(scores, moved["experts"], moved["mask"])
        self.temperature = self.temperature_fit.compute()
        self.temperature_fit.reset()

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the overlap and the loss of one held-out batch."""
        del batch_idx
        scores, mask = self._scores(batch), batch["mask"]
        if "attention" in batch:
            self.val_tree_overlap.update(scores, batch["experts"], mask)
            self._trees_validated = True
            return
        self.val_overlap.update(scores, batch["experts"], mask)
        self.raw_error.update(scores, batch["experts"], mask)
        self.calibrated_error.update(scores / self.temperature.unsqueeze(-1), batch["experts"], mask)
        loss = objective_loss(self.config.objective, scores, batch)
        self._watch(loss)
        # Weighted by tokens, so that the epoch's value does not depend on how windows were batched.
        self.val_loss.update(loss, mask.sum())

    def on_validation_epoch_end(self) -> None:
        """Log overlap, also per layer, calibration error, and the mean training loss since the last validation.

        Checkpoints are written after it, so none holds weights of a loss that was not finite.
        """
        for name, value in self._close_validation().items():
            self.log(name, value, prog_bar=name == "val_overlap")
        self.log("train_loss_epoch", self.train_loss.compute())
        self.train_loss.reset()

    @torch.no_grad()
    def look(self) -> dict[str, float]:
        """Validate between two optimiser steps, in all processes at once, as the end of an epoch does.

        Nothing of the training changes, nor what is logged: random state, gradients, averages and modes stay.

        Returns:
            ``metrics``, which checkpoints written from now on hold, with the temperatures that belong to them.
        """
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        self.on_validation_epoch_start()
        (most,) = self.trainer.num_val_batches
        batches = itertools.islice(self.trainer.datamodule.val_dataloader(), int(most))
        for index, batch in enumerate(batches):
            moved = self.trainer.strategy.batch_to_device(batch, self.device)
            with self.trainer.precision_plugin.forward_context():
                self.validation_step(moved, index)
        self._close_validation()
        for module, mode in modes:
            module.training = mode
        return self.metrics

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Muon and AdamW, or AdamW alone; weight decay on matrices only."""
        return MuonAdamW(parameter_groups(self.model, self.config), betas=(0.9, self.config.beta2))

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what export and resume need; weights of a loss that was not finite are not written."""
        self._require_finite()
        checkpoint["ecospec"] = {
            "run": self.facts,
            "metrics": self.metrics,
            "temperature": self.temperature.tolist(),
            "seconds": self.elapsed_minutes() * 60,
            "train_loss": {name: value.clone() for name, value in self.train_loss.metric_state.items()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the clock of the time budget, the epoch's mean loss, the last metrics and temperatures."""
        self._elapsed = float(checkpoint["ecospec"]["seconds"])
        self.metrics = dict(checkpoint["ecospec"]["metrics"])
        if temperature := checkpoint["ecospec"].get("temperature"):
            self.temperature = torch.tensor(temperature, device=self.device)
        for name, value in checkpoint["ecospec"].get("train_loss", {}).items():
            setattr(self.train_loss, name, value.to(self.device))

    # ---- private ------------------------------------------------------------------------------------------------

    def _close_validation(self) -> dict[str, Tensor]:
        """Values of everything counted since the validation or look began, over all processes; then from zero."""
        self._require_finite()
        per_layer = self.val_overlap.compute()
        values = {"val_overlap": per_layer.mean()}
        values |= {f"val_overlap_layer_{layer}": value for layer, value in enumerate(per_layer)}
        values["val_calibration_error_raw"] = self.raw_error.compute().float()
        values["val_calibration_error_calibrated"] = self.calibrated_error.compute().float()
        if self._trees_validated:
            values["val_tree_overlap"] = self.val_tree_overlap.compute().mean()
        values["val_loss"] = self.val_loss.compute()
        for metric in (
            *(self.val_overlap, self.val_tree_overlap, self.val_loss),
            *(self.raw_error, self.calibrated_error),
        ):
            metric.reset()
        self.metrics = {name: float(value) for name, value in values.items()}
        return values

    def _watch(self, loss: Tensor) -> None:
        """Remember the step if the loss is the first that is not finite."""
        fine = torch.isfinite(loss.detach()) | (self._first_bad >= 0)
        self._first_bad = torch.where(fine, self._first_bad, self.global_step)

    def _require_finite(self) -> None:
        step = int(largest(self._first_bad))  # all processes stop, whichever saw it
        if step >= 0:
            raise ValueError(
                f"the loss is not finite at step {step}; start again in a new folder with a lower --learning_rate, "
                "--muon_learning_rate or --gradient_clip"
            )

    def _scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores ``[B, T, L, E]``. Text is padded on the right, so the causal mask alone hides the padding."""
        inputs: dict[str, Tensor] = {"ids": batch["input_ids"]}
        if self.training and self.config.token_dropout > 0:
            embeddings = self.model.embed(inputs.pop("ids"))
            keep = torch.rand(embeddings.shape[:2], device=embeddings.device) >= self.config.token_dropout
            inputs["embeddings"] = embeddings * keep.unsqueeze(-1)
        if "attention" in batch:
            inputs["attention_mask"] = additive_mask(batch["attention"], self.model.head.weight.dtype)
            inputs["position_ids"] = batch["position_ids"]
        return self.model(**inputs)


def trained_parameters(model: nn.Module) -> int:
    """Number of parameters that training changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
