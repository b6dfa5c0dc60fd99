"""The batch plan: every sequence, its seed and its batch, fixed before anything runs.

A collection that is killed and resumed, or run on another machine, works through the same batches in the same
order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ecospec.trace_collection.prompts import Prompt, leading_ids, prompt_ids

Mode = Literal["generate", "teacher_forced"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """How traces are collected.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    mode: Mode = "generate"
    """generate: the target continues prompts; teacher_forced: it reads fixed text."""
    max_new_tokens: int = 256
    """Tokens generated per sequence at most."""
    max_length: int | None = None
    """Tokens per sequence at most, prompt included; longer texts are read in chunks. None: the target's context."""
    max_prompt_tokens: int = 64
    """Length of the windows of documents that serve as prompts; other prompts are used whole."""
    windows_per_document: int = 1
    """Windows taken from each document: the first one, then random ones that do not overlap."""
    samples_per_prompt: int = 1
    """Continuations per prompt; more than one needs a temperature."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    batch_size: int = 64
    """Sequences per batch."""
    seed: int = 0
    """Seed of windows, sampling and batch order."""
    weights: bool = False
    """Also store the weights the experts were combined with."""
    limit: int | None = None
    """Sequences at most, chosen by hash; None: all."""

    def __post_init__(self) -> None:
        """Validate every field."""
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        for name in (
            "max_new_tokens",
            "max_prompt_tokens",
            "windows_per_document",
            "samples_per_prompt",
            "batch_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} at temperature 0 repeats one text; set a temperature"
            )

    def collection(self) -> dict[str, Any]:
        """Return the options that shape the rows, for the store's manifest."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(CollectConfig)}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlannedSequence:
    """One sequence to collect.

    Attributes:
        sequence_id: Hash of dataset, prompt tokens and seed, 32 hex digits.
        prompt: Where it comes from.
        ids: int32 ``[p]``: the prompt, or the whole text when teacher-forced.
        max_new: Tokens to generate at most; 0 when teacher-forced.
        seed: Seed of its sampling noise.
    """

    sequence_id: str
    prompt: Prompt
    ids: npt.NDArray[np.int32]
    max_new: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class CollectionPlan:
    """Batches in the order they are run.

    Attributes:
        config: The options the plan was made with.
        batches: Sequences of each batch, of similar length.
        skipped: Number of prompts left out, by reason.
    """

    config: CollectConfig
    batches: tuple[tuple[PlannedSequence, ...], ...]
    skipped: dict[str, int]

    @property
    def num_sequences(self) -> int:
        """Sequences in all batches."""
        return sum(len(batch) for batch in self.batches)

    def digest(self) -> str:
        """SHA-256 over every batch: ids, lengths, tokens and seeds."""
        digest = hashlib.sha256()
        for batch in self.batches:
            for sequence in batch:
                digest.update(f"{sequence.sequence_id} {sequence.max_new} {sequence.seed} ".encode())
                digest.update(sequence.ids.astype("<i4").tobytes())
            digest.update(b"\n")
        return digest.hexdigest()


def make_plan(
    tokenizer: Any, prompts: Iterable[Prompt], config: CollectConfig, *, context: int | None = None
) -> CollectionPlan:
    """Tokenize the prompts and fix every batch and seed.

    Args:
        tokenizer: The target's transformers tokenizer.
        prompts: What to collect.
        config: Options.
        context: Positions the target has (``max_position_embeddings``); None: unlimited.

    Raises:
        ValueError: Nothing is left to collect.
    """
    planner = _Planner(tokenizer, config, context)
    sequences: dict[str, PlannedSequence] = {}
    for prompt in prompts:
        for sequence in planner.sequences(prompt):
            if sequence.sequence_id in sequences:
                planner.skipped["duplicate"] += 1
            sequences.setdefault(sequence.sequence_id, sequence)
    if not sequences:
        reasons = ", ".join(f"{count} {reason}" for reason, count in planner.skipped.items()) or "no prompts"
        raise ValueError(f"nothing to collect ({reasons}); raise max_length or give other prompts")
    chosen = [sequences[key] for key in sorted(sequences)[: config.limit]]
    chosen.sort(key=lambda sequence: sequence.ids.size)  # stable: ids break ties
    size = config.batch_size
    batches = [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]
    order = np.random.default_rng(config.seed).permutation(len(batches))  # a killed run has texts of every length
    return CollectionPlan(config, tuple(batches[i] for i in order), dict(planner.skipped))


class _Planner:
    """Turns prompts into sequences and counts what is left out."""

    def __init__(self, tokenizer: Any, config: CollectConfig, context: int | None) -> None:
        limits = [length for length in (config.max_length, context) if length is not None]
        self._max_length = min(limits) if limits else None
        self._tokenizer = tokenizer
        self._lead = leading_ids(tokenizer)
        self._config = config
        self.skipped: Counter[str] = Counter()

    def sequences(self, prompt: Prompt) -> Iterator[PlannedSequence]:
        """Yield the sequences of one prompt."""
        config = self._config
        ids = prompt_ids(prompt, self._tokenizer, generate=config.mode == "generate")
        if not ids:
            self.skipped["empty"] += 1
        elif config.mode == "teacher_forced":
            yield from self._chunks(prompt, ids)
        else:
            for piece in self._windows(prompt, ids) if prompt.document else [ids]:
                room = self._room(len(piece))
                if room < 1:
                    self.skipped["longer than the context"] += 1
                    continue
                for sample in range(config.samples_per_prompt):
                    yield self._planned(prompt, piece, room, number=sample)

    def _room(self, prompt_length: int) -> int:
        """Tokens that may be generated after a prompt."""
        wanted = self._config.max_new_tokens
        return wanted if self._max_length is None else min(wanted, self._max_length - prompt_length)

    def _chunks(self, prompt: Prompt, ids: Sequence[int]) -> Iterator[PlannedSequence]:
        """Consecutive chunks of a text that is longer than the context."""
        lead = self._lead if prompt.document else []
        step = len(ids) if self._max_length is None else self._max_length - len(lead)
        for start in range(0, len(ids), step):
            yield self._planned(prompt, [*lead, *ids[start : start + step]], 0, number=start)

    def _windows(self, prompt: Prompt, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """The first window of a document, then random ones from the grid of non-overlapping windows."""
        width = self._config.max_prompt_tokens
        slots = max(1, len(ids) // width)
        rng = np.random.default_rng(_seed(self._config.seed, prompt.dataset, prompt.group_id))
        others = rng.permutation(np.arange(1, slots))[: self._config.windows_per_document - 1]
        for slot in (0, *sorted(int(slot) for slot in others)):
            yield [*self._lead, *ids[slot * width : (slot + 1) * width]]

    def _planned(self, prompt: Prompt, ids: Sequence[int], max_new: int, *, number: int) -> PlannedSequence:
        """A sequence; ``number`` tells samples of one prompt, or chunks of one text, apart."""
        config = self._config
        array = np.asarray(ids, dtype=np.int32)
        content = hashlib.sha256(array.astype("<i4").tobytes()).hexdigest()
        sampled = max_new > 0 and config.temperature > 0
        seed = _seed(config.seed, content, number) if sampled else 0
        place = [prompt.dataset, prompt.group_id, config.mode, number, content, config.temperature, seed]
        identity = hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]
        return PlannedSequence(identity, prompt, array, max_new, seed)


def _seed(*parts: object) -> int:
    """A seed below 2**63 from a hash of the parts."""
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
