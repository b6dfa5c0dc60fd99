"""The target's training text as a fixed list of batches: batch `i` depends on the seed and `i` only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from ecospec.trace_collection.stdlib_corpus import Document


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one sequence length.

    Attributes:
        steps: Optimiser steps.
        length: Tokens per sequence.
    """

    steps: int
    length: int


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[NDArray[np.int32]]:
    """Return the token ids of every document, each led by the end-of-text token as separator."""
    encoded = tokenizer([document.text for document in documents], verbose=False).input_ids
    separator = tokenizer.eos_token_id
    return [np.asarray([separator, *ids], dtype=np.int32) for ids in encoded]


def windows_of_epoch(
    texts: Sequence[NDArray[np.int32]], length: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Return one epoch as shuffled windows [W, length + 1]: documents shuffled, joined, cut at a random offset."""
    stream = np.concatenate([texts[index] for index in rng.permutation(len(texts))])
    start = int(rng.integers(min(length, len(stream) - length)))
    count = (len(stream) - start - 1) // length
    index = start + np.arange(count)[:, None] * length + np.arange(length + 1)
    windows: NDArray[np.int32] = stream[index][rng.permutation(count)]
    return windows


def plan_batches(
    texts: Sequence[NDArray[np.int32]], phases: Sequence[Phase], tokens_per_batch: int, seed: int
) -> list[NDArray[np.int32]]:
    """Return every batch of the run, each [tokens_per_batch // length, length + 1]."""
    batches: list[NDArray[np.int32]] = []
    for number, phase in enumerate(phases):
        rows = tokens_per_batch // phase.length
        windows = np.empty((0, phase.length + 1), dtype=np.int32)
        epoch = 0
        while len(windows) < phase.steps * rows:
            rng = np.random.default_rng([seed, number, epoch])
            windows = np.concatenate([windows, windows_of_epoch(texts, phase.length, rng)])
            epoch += 1
        batches += list(windows[: phase.steps * rows].reshape(phase.steps, rows, phase.length + 1))
    return batches


def held_out_windows(texts: Sequence[NDArray[np.int32]], length: int, limit: int, seed: int) -> Tensor:
    """Return up to `limit` fixed windows [W, length + 1], int64, for measuring the loss."""
    windows = windows_of_epoch(texts, length, np.random.default_rng([seed, 1_000]))
    return torch.from_numpy(windows[:limit].astype(np.int64))


class _BatchesFrom(IterableDataset[Tensor]):
    def __init__(self, batches: Sequence[NDArray[np.int32]], start: int) -> None:
        self.batches = batches
        self.start = start

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches[self.start :]:
            yield torch.from_numpy(batch.astype(np.int64))


class TargetData(L.LightningDataModule):
    """Feeds the planned batches, after a resume from the step the checkpoint was written at.

    Args:
        batches: From `plan_batches`.
        held_out: Windows [W, length + 1] for validation, int64.
        held_out_batch: Windows per validation batch.
    """

    def __init__(self, batches: Sequence[NDArray[np.int32]], held_out: Tensor, held_out_batch: int = 16) -> None:
        super().__init__()
        self.batches = batches
        self.held_out = held_out
        self.held_out_batch = held_out_batch
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches consumed."""
        return {"step": self.trainer.global_step if self.trainer is not None else self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches consumed before the checkpoint."""
        self.start = int(state_dict["step"])

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the remaining batches, each [rows, length + 1]."""
        return DataLoader(_BatchesFrom(self.batches, self.start), batch_size=None)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the held-out windows."""
        return DataLoader(self.held_out, batch_size=self.held_out_batch)  # type: ignore[arg-type]
