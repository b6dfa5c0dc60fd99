"""Planned sequences, held in flat arrays: a plan takes little more than four bytes a token."""

from __future__ import annotations

import dataclasses
import json
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlannedSequence:
    """One sequence to collect.

    Attributes:
        sequence_id: Hash of dataset, prompt tokens and seed, 32 hex digits.
        group_id: Source document or prompt; splits and bootstraps go by it.
        dataset: Name of the prompt source.
        category: Finer label inside the dataset, or ``""``.
        ids: int32 ``[p]``: the prompt, or the whole text when it is read.
        max_new: Tokens to generate at most; 0 when the text is read.
        seed: Seed of its sampling noise.
    """

    sequence_id: str
    group_id: str
    dataset: str
    category: str
    ids: npt.NDArray[np.int32]
    max_new: int = 0
    seed: int = 0


class SequenceTable:
    """Planned sequences in the order they were appended; reading one builds it anew.

    Nothing may be appended once a sequence has been read: its ``ids`` are a view of the table.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._token_ends = array("q", [0])
        self._labels = bytearray()  # JSON [group_id, dataset, category] of each sequence, end to end
        self._label_ends = array("q", [0])
        self._identities = bytearray()
        self._max_new = array("i")
        self._seeds = array("q")
        self._prompts = array("q")

    def __len__(self) -> int:
        """Sequences in the table."""
        return len(self._seeds)

    def append(self, sequence: PlannedSequence, *, prompt: int) -> None:
        """Add a sequence.

        Args:
            sequence: Its ``sequence_id`` must be 32 hex digits, its ``seed`` below 2**63.
            prompt: Number of the prompt it was made from.
        """
        self._tokens.frombytes(np.ascontiguousarray(sequence.ids, dtype=np.int32).tobytes())
        self._token_ends.append(len(self._tokens))
        self._labels += json.dumps([sequence.group_id, sequence.dataset, sequence.category]).encode()
        self._label_ends.append(len(self._labels))
        self._identities += bytes.fromhex(sequence.sequence_id)
        self._max_new.append(sequence.max_new)
        self._seeds.append(sequence.seed)
        self._prompts.append(prompt)

    def __getitem__(self, number: int) -> PlannedSequence:
        """Build the sequence of a number from 0 to ``len(self) - 1``."""
        tokens = np.frombuffer(self._tokens, dtype=np.int32)[slice(*self._token_ends[number : number + 2])]
        group_id, dataset, category = json.loads(self._labels[slice(*self._label_ends[number : number + 2])])
        identity = self._identities[16 * number : 16 * number + 16].hex()
        return PlannedSequence(
            identity, group_id, dataset, category, tokens, self._max_new[number], self._seeds[number]
        )

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence, int64 ``[n]``."""
        ends = np.frombuffer(self._token_ends, dtype=np.int64)
        return ends[1:] - ends[:-1]

    @property
    def identities(self) -> npt.NDArray[Any]:
        """The sequence ids as 16 bytes each, ``S16 [n]``; they sort as their hex digits do."""
        return np.frombuffer(self._identities, dtype="S16")

    @property
    def prompts(self) -> npt.NDArray[np.int64]:
        """Number of the prompt of each sequence, int64 ``[n]``."""
        return np.frombuffer(self._prompts, dtype=np.int64)
