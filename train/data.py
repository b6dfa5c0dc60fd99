"""The data module: batches of windows over flat trace arrays.

Shapes: B batch, T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ecospec.train.arrays import TraceArrays
from ecospec.train.batching import Windows, cut_windows, epoch_batches, make_batches

Batch = Mapping[str, Tensor]


class BatchDataset(Dataset[Batch]):
    """Batches of windows as padded tensors; item ``i`` is batch ``i``.

    Args:
        arrays: The sequences.
        batches: Of `ecospec.train.batching`.
    """

    def __init__(self, arrays: TraceArrays, batches: list[Windows]) -> None:
        self.arrays = arrays
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        """Return ``input_ids`` int64 ``[B, T]``, ``experts`` ``[B, T, L, K]`` and ``mask`` bool ``[B, T]``.

        Experts are uint8, or int32 above 256 experts. Rows are padded on the right with token 0 and expert 0,
        where the mask is false.
        """
        windows = self.batches[index]
        arrays = self.arrays
        width = int(windows[:, 2].max())
        ids = np.zeros((len(windows), width), np.int64)
        # torch has few operations on uint16, so more than 256 experts travel as int32.
        dtype = np.uint8 if arrays.experts.dtype == np.uint8 else np.int32
        experts = np.zeros((len(windows), width, *arrays.experts.shape[1:]), dtype)
        for row, (sequence, start, size) in enumerate(windows.tolist()):
            first = int(arrays.offsets[sequence]) + start
            ids[row, :size] = arrays.tokens[first : first + size]
            experts[row, :size] = arrays.experts[first : first + size]
        mask = np.arange(width) < windows[:, 2:3]
        return {
            "input_ids": torch.from_numpy(ids),
            "experts": torch.from_numpy(experts),
            "mask": torch.from_numpy(mask),
        }


class TraceDataModule(LightningDataModule):
    """Training and validation batches of trace arrays.

    The order of training is a pure function of (seed, epoch): the trainer rebuilds the loader every epoch
    (``reload_dataloaders_every_n_epochs=1``), and a resumed run gets the same batches as an uninterrupted one.

    Args:
        training: Sequences to train on.
        validation: Sequences of other groups.
        context_length: Longest window, in tokens.
        batch_tokens: Positions of a batch, padding included.
        seed: Seed of the order.
    """

    def __init__(
        self,
        training: TraceArrays,
        validation: TraceArrays,
        *,
        context_length: int = 512,
        batch_tokens: int = 4096,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.training = training
        self.validation = validation
        self.context_length = context_length
        self.batch_tokens = batch_tokens
        self.seed = seed

    def training_batches(self, epoch: int) -> list[Windows]:
        """The batches of one epoch, in order."""
        return epoch_batches(
            self.training.lengths,
            context_length=self.context_length,
            batch_tokens=self.batch_tokens,
            seed=self.seed,
            epoch=epoch,
        )

    def validation_batches(self) -> list[Windows]:
        """The batches of every validation, in order."""
        return make_batches(cut_windows(self.validation.lengths, self.context_length), self.batch_tokens)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Loader of the trainer's current epoch."""
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        return _loader(self.training, self.training_batches(epoch))

    def val_dataloader(self) -> DataLoader[Batch]:
        """Loader of the validation split."""
        return _loader(self.validation, self.validation_batches())


def _loader(arrays: TraceArrays, batches: list[Windows]) -> DataLoader[Batch]:
    # No worker processes: a batch is a few memory copies, well below a millisecond.
    # A generator of its own: iterating would otherwise draw from, and so shift, the global random state.
    dataset = BatchDataset(arrays, batches)
    return DataLoader(dataset, batch_size=None, shuffle=False, num_workers=0, generator=torch.Generator())
