"""Which sequences are trained on, and which are kept apart: pure functions of ids, lengths and the seed.

A group (source document or prompt) falls into a split by the hash of (seed, group_id) alone. Adding a store moves
no group from one split to another, and a group that occurs in several stores is in one split in all of them.

Shapes: S sequences, D datasets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ecospec.train.arrays import TraceArrays

TRAINING: Final = 0
VALIDATION: Final = 1
CALIBRATION: Final = 2
HELD_OUT: Final = 3
LEFT_OUT: Final = 4
#: Names by code; ``left_out`` are the other sequences of groups of which one is held out.
SPLITS = ("training", "validation", "calibration", "held_out", "left_out")
#: Share of groups for calibration where nothing else is asked for.
CALIBRATION_FRACTION: Final = 0.05


@dataclass(frozen=True)
class SplitConfig:
    """How sequences are divided.

    Attributes:
        validation_fraction: Share of groups for validation.
        calibration_fraction: Share of groups for calibration, taken from what validation leaves; 0 makes no such
            split. None asks for `CALIBRATION_FRACTION`, and accepts that few groups may leave the split empty.
        hold_out_datasets: Datasets that no other split may hold.
        hold_out_length: Sequences of more tokens are held out; None holds none out for its length.
        seed: Seed of the division.
    """

    validation_fraction: float = 0.2
    calibration_fraction: float | None = 0.0
    hold_out_datasets: tuple[str, ...] = ()
    hold_out_length: int | None = None
    seed: int = 0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SplitConfig:
        """The division that a run recorded in its options (``TrainPredictorConfig`` as a mapping).

        Args:
            options: Options of the run; those that older runs did not have take the value they had in effect.
        """
        calibration = options.get("calibration_fraction", 0.0)
        return cls(
            validation_fraction=float(options["validation_fraction"]),
            calibration_fraction=None if calibration is None else float(calibration),
            hold_out_datasets=dataset_names(options.get("hold_out_dataset", "")),
            hold_out_length=options.get("hold_out_length"),
            seed=int(options["seed"]),
        )


def dataset_names(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list.

    >>> dataset_names("gsm8k, math500")
    ('gsm8k', 'math500')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class SequenceTable:
    """What the division looks at, as compact arrays: 26 bytes a sequence.

    Attributes:
        lengths: int64 ``[S]``, tokens.
        positions: float64 ``[S]``, place of the group between 0 and 1 (`group_position`).
        groups: uint64 ``[S]``, hash of the group (`short_hash`); a million groups collide with chance 3e-8.
        datasets: uint16 ``[S]``, index into ``dataset_names``.
        dataset_names: Length D.
    """

    lengths: npt.NDArray[np.int64]
    positions: npt.NDArray[np.float64]
    groups: npt.NDArray[np.uint64]
    datasets: npt.NDArray[np.uint16]
    dataset_names: tuple[str, ...]

    @classmethod
    def build(
        cls, lengths: npt.NDArray[np.int64], group_ids: Iterable[str], datasets: Iterable[str], seed: int
    ) -> SequenceTable:
        """Build the table from names.

        Args:
            lengths: int64 ``[S]``.
            group_ids: Group of each sequence.
            datasets: Dataset of each sequence.
            seed: Seed of the division.
        """
        count = len(lengths)
        positions, groups = np.empty(count, np.float64), np.empty(count, np.uint64)
        codes = np.empty(count, np.uint16)
        names: dict[str, int] = {}
        for row, (group, dataset) in enumerate(zip(group_ids, datasets, strict=True)):
            positions[row] = group_position(group, seed)
            groups[row] = short_hash(group)
            codes[row] = names.setdefault(dataset, len(names))
        return cls(lengths, positions, groups, codes, tuple(names))


def group_position(group_id: str, seed: int) -> float:
    """Place of a group between 0 (inclusive) and 1: a pure function of its id and the seed.

    Args:
        group_id: Group of a sequence.
        seed: Seed of the division.
    """
    digest = hashlib.sha256(f"split:{seed}:{group_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def short_hash(text: str) -> int:
    """First 64 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def assign_splits(table: SequenceTable, config: SplitConfig) -> npt.NDArray[np.int8]:
    """Divide sequences.

    Args:
        table: The sequences.
        config: How.

    Returns:
        int8 ``[S]``, index into `SPLITS`. Sequences of one group share their split, but for those that are left out
        because another sequence of the group is held out.

    Raises:
        ValueError: A split is empty, or what is to be held out does not occur.
    """
    low, share = config.validation_fraction, config.calibration_fraction
    share = CALIBRATION_FRACTION if share is None else share
    codes = np.full(len(table.lengths), TRAINING, np.int8)
    codes[table.positions < low + share] = CALIBRATION
    codes[table.positions < low] = VALIDATION
    held = _held_out(table, config)
    codes[np.isin(table.groups, np.unique(table.groups[held]))] = LEFT_OUT
    codes[held] = HELD_OUT
    _refuse_empty(table, config, codes)
    return codes


def _held_out(table: SequenceTable, config: SplitConfig) -> npt.NDArray[np.bool_]:
    for name in config.hold_out_datasets:
        if name not in table.dataset_names:
            near = get_close_matches(name, table.dataset_names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"--hold_out_dataset names {name!r}, which does not occur; {hint}"
                f"datasets of the traces: {', '.join(sorted(table.dataset_names))}"
            )
    wanted = [table.dataset_names.index(name) for name in config.hold_out_datasets]
    held = np.isin(table.datasets, np.asarray(wanted, np.uint16))
    if config.hold_out_length is not None:
        long = table.lengths > config.hold_out_length
        if not long.any():
            raise ValueError(
                f"--hold_out_length {config.hold_out_length} holds nothing out: the longest sequence has "
                f"{int(table.lengths.max(initial=0))} tokens; name a shorter length"
            )
        held |= long
    return held


def _refuse_empty(table: SequenceTable, config: SplitConfig, codes: npt.NDArray[np.int8]) -> None:
    wanted = [VALIDATION, TRAINING] + [CALIBRATION] * bool(config.calibration_fraction)
    for code in wanted:
        if table.lengths[codes == code].sum() > 0:
            continue
        groups = len(np.unique(table.groups[(codes != HELD_OUT) & (codes != LEFT_OUT)]))
        fractions = f"--validation_fraction {config.validation_fraction}"
        if config.calibration_fraction:
            fractions += f", --calibration_fraction {config.calibration_fraction} (0 does without)"
        raise ValueError(
            f"the {SPLITS[code]} split is empty: {groups} groups at {fractions} and seed {config.seed}; "
            "collect traces of more groups, hold out less, or change the fraction or the seed"
        )


def split_arrays(arrays: TraceArrays, config: SplitConfig) -> npt.NDArray[np.int8]:
    """`assign_splits` for sequences in memory."""
    table = SequenceTable.build(arrays.lengths, arrays.group_ids, arrays.datasets, config.seed)
    return assign_splits(table, config)
