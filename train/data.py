"""The data module: batches of windows of text, of draft trees, or of both.

A batch is a dictionary of tensors:

==================  =========================  ================================================================
``input_ids``       int64 ``[B, T]``           tokens, padded on the right with 0
``experts``         uint8 ``[B, T, L, K]``     executed experts (int32 above 256 experts), 0 elsewhere
``mask``            bool ``[B, T]``            positions that count in loss and metrics
``weights``         float16 ``[B, T, L, K]``   router weights, aligned with ``experts``; only where asked for
``position_ids``    int64 ``[B, T]``           only for draft trees
``attention``       bool ``[B, T, T]``         only for draft trees: row i is true where position i sees
==================  =========================  ================================================================

Without ``attention`` the ordinary causal mask is meant, under which padding on the right needs no mask.

Which rows a batch holds is a pure function of (seed, epoch, batch index): it depends neither on the number of
worker processes nor on that of ranks. Of every batch a rank gets a disjoint share, perhaps an empty one (one
position that does not count); the gradient of a step is the *sum* over ranks when each weighs its loss by its
counted positions.

Shapes: B rows, T positions, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ecospec.train.arrays import TraceSource
from ecospec.train.batching import EpochPlan, Windows, plan_epoch, rank_share
from ecospec.train.cache import TraceCache
from ecospec.train.tree_batches import tree_batch
from ecospec.train.tree_cache import TreeRows

Batch = Mapping[str, Tensor]


#: Takes (sequence, start, size) and returns float16 ``[size, L, K]``.
ReadWeights = Callable[[int, int, int], npt.NDArray[np.float16]]


def window_batch(source: TraceSource, windows: Windows, weights: ReadWeights | None = None) -> dict[str, Tensor]:
    """Windows of text as one padded batch; keys as at the top of this file.

    Args:
        source: The sequences.
        windows: int64 ``[B, 3]`` of `ecospec.train.batching.cut_windows`; an empty batch becomes one position that
            does not count.
        weights: Reads router weights (`ecospec.train.cache.TraceCache.weights`); None leaves them out.
    """
    spec = source.spec
    count, width = max(len(windows), 1), int(windows[:, 2].max(initial=1))
    ids = np.zeros((count, width), np.int64)
    # torch has few operations on uint16, so more than 256 experts travel as int32.
    dtype = np.uint8 if spec.expert_dtype == "uint8" else np.int32
    experts = np.zeros((count, width, spec.num_layers, spec.top_k), dtype)
    mask = np.zeros((count, width), bool)
    combined = None if weights is None else np.zeros(experts.shape, np.float16)
    for row, (sequence, start, size) in enumerate(windows.tolist()):
        ids[row, :size], experts[row, :size] = source.window(sequence, start, size)
        mask[row, :size] = True
        if weights is not None and combined is not None:
            combined[row, :size] = weights(sequence, start, size)
    arrays = {"input_ids": ids, "experts": experts, "mask": mask}
    if combined is not None:
        arrays["weights"] = combined
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class BatchDataset(Dataset[Batch]):
    """One rank's share of the batches of a plan; item ``i`` is batch ``i``.

    Args:
        plan: The global batches.
        source: The sequences.
        trees: The draft trees that the plan's tree batches number, or None.
        rank: This process.
        world_size: Number of processes.
        weights: Reads router weights, where batches of text shall hold them.
    """

    def __init__(
        self,
        plan: EpochPlan,
        source: TraceSource,
        trees: TreeRows | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        weights: ReadWeights | None = None,
    ) -> None:
        self.plan = plan
        self.source = source
        self.weights = weights
        self.trees = trees
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        """Return a batch as described at the top of this file."""
        of_trees, rows = self.plan.batch(index)
        share = rank_share(rows, self.rank, self.world_size)
        if not of_trees:
            return window_batch(self.source, self.plan.windows[share], self.weights)
        assert self.trees is not None
        return tree_batch(self.trees, share)


class _From(Sampler[int]):
    """Items from ``start`` on; as long as the whole, which is what the trainer counts batches by."""

    def __init__(self, data: Sized, start: int) -> None:
        self._data, self._start = data, start

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._start, len(self._data)))


class TraceDataModule(LightningDataModule):
    """Training, validation and calibration batches.

    The trainer rebuilds the training loader every epoch (``reload_dataloaders_every_n_epochs=1``). The position
    inside an epoch is this module's state: a run that resumes from a checkpoint written after n batches goes on
    with the next one.

    Args:
        training: Sequences to train on.
        validation: Sequences of other groups.
        calibration: Sequences of again other groups, or None.
        training_trees: Draft trees of training groups to train on too.
        validation_trees: Draft trees of validation groups.
        trees_only: Train on the trees alone.
        context_length: Longest window, in tokens.
        batch_tokens: Positions of a batch, padding included.
        seed: Seed of the order.
        workers: Processes that assemble batches; 0 does it in the training process.
        with_weights: Batches of text hold router weights; the sequences are then `TraceCache` opened with them.
    """

    def __init__(
        self,
        training: TraceSource,
        validation: TraceSource,
        *,
        calibration: TraceSource | None = None,
        training_trees: TreeRows | None = None,
        validation_trees: TreeRows | None = None,
        trees_only: bool = False,
        context_length: int = 512,
        batch_tokens: int = 4096,
        seed: int = 0,
        workers: int = 0,
        with_weights: bool = False,
    ) -> None:
        super().__init__()
        self.training = training
        self.validation = validation
        self.calibration = calibration
        self.training_trees = training_trees
        self.validation_trees = validation_trees
        self.trees_only = trees_only
        self.context_length = context_length
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.workers = workers
        self.with_weights = with_weights
        self.padding_share = 0.0
        """Padded positions of the current epoch divided by all positions."""
        self._position = (0, 0)

    def training_plan(self, epoch: int) -> EpochPlan:
        """The batches of one epoch: a pure function of seed and epoch."""
        return plan_epoch(
            None if self.trees_only else self.training.lengths,
            None if self.training_trees is None else self.training_trees.sizes,
            context_length=self.context_length,
            batch_tokens=self.batch_tokens,
            key=(self.seed, epoch),
        )

    def held_plan(self, source: TraceSource, trees: TreeRows | None = None) -> EpochPlan:
        """The batches of a split that is not trained on, the same every time."""
        sizes = None if trees is None else trees.sizes
        return plan_epoch(source.lengths, sizes, context_length=self.context_length, batch_tokens=self.batch_tokens)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Loader of the trainer's current epoch, from where a resumed run goes on."""
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        start = self._position[1] if self._position[0] == epoch else 0
        plan = self.training_plan(epoch)
        self.padding_share = plan.padding_share()
        return self._loader(plan, self.training, self.training_trees, start)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Loader of the validation split: text, then trees."""
        plan = self.held_plan(self.validation, self.validation_trees)
        return self._loader(plan, self.validation, self.validation_trees)

    def calibration_dataloader(self) -> DataLoader[Batch]:
        """Loader of the calibration split.

        Raises:
            ValueError: There is none.
        """
        if self.calibration is None:
            raise ValueError(
                "there is no calibration split; collect traces of more groups, or raise --calibration_fraction"
            )
        return self._loader(self.held_plan(self.calibration), self.calibration, None)

    def mark(self, epoch: int, batches: int) -> None:
        """Say how far training is, for the next checkpoint.

        Args:
            epoch: The epoch that a resumed run begins with.
            batches: Batches of it that are done.
        """
        self._position = (epoch, batches)

    def state_dict(self) -> dict[str, Any]:
        """The position: ``epoch`` and ``batches`` done in it."""
        return {"epoch": self._position[0], "batches": self._position[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position."""
        self._position = (int(state_dict["epoch"]), int(state_dict["batches"]))

    def _loader(
        self, plan: EpochPlan, source: TraceSource, trees: TreeRows | None, start: int = 0
    ) -> DataLoader[Batch]:
        trainer = self.trainer
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        weights = cast("TraceCache", source).weights if self.with_weights else None
        dataset = BatchDataset(plan, source, trees, rank, world_size, weights=weights)
        # A generator of its own: iterating would otherwise draw from, and so shift, the global random state.
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=_From(dataset, start),
            num_workers=self.workers,
            generator=torch.Generator(),
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
        )
