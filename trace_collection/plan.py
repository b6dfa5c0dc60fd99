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
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.trace_collection.compression import AUTO, resolve_compression
from ecospec.trace_collection.planned import PlannedSequence, SequenceTable
from ecospec.trace_collection.prompts import Prompt, leading_ids, prompt_ids

MODES = ("generate", "teacher_forced", "replay")
#: Options that say something in mode replay.
REPLAY_FIELDS = ("mode", "batch_size", "weights", "limit", "compression")
#: A larger count is a slip of the keyboard, found out after hours of planning.
MAX_COUNT = 10_000_000
#: Lowest and highest temperature to sample at.
TEMPERATURES = (0.001, 1000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """How traces are collected.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    mode: str = "generate"
    """generate: the target continues prompts; teacher_forced: it reads fixed text; replay: it reads the
    sequences of a trace store again."""
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
    compression: str = AUTO
    """Codec and level of the store's files: zstd-1 to zstd-22, brotli-0 to brotli-11, or none; auto is brotli-10
    (smaller by an eighth, slower by far) up to 64 expert ids a token (MoE layers x top-k), zstd-9 above."""

    def __post_init__(self) -> None:
        """Validate every field; ``teacher-forced`` is understood as ``teacher_forced``."""
        object.__setattr__(self, "mode", self.mode.replace("-", "_"))
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        self._refuse_ignored()
        for name in (
            "max_new_tokens",
            "max_prompt_tokens",
            "windows_per_document",
            "samples_per_prompt",
            "batch_size",
        ):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                bound = "at least 1" if getattr(self, name) < 1 else f"at most {MAX_COUNT:,}"
                raise ValueError(f"{name} must be {bound}, got {getattr(self, name)}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        resolve_compression(self.compression, ids_per_token=1)
        low, high = TEMPERATURES
        # Beyond the bounds logits overflow, or all tokens are as likely.
        if self.temperature != 0 and not low <= self.temperature <= high:
            raise ValueError(
                f"temperature must be a finite number, 0 (greedy) or {low} to {high:g}, got {self.temperature}"
            )
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} at temperature 0 repeats one text; set a temperature"
            )

    def _refuse_ignored(self) -> None:
        """Refuse options that say nothing in mode replay, which takes its sequences from a store."""
        if self.mode != "replay":
            return
        for field in dataclasses.fields(CollectConfig):
            if field.name not in REPLAY_FIELDS and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} has no meaning in mode replay, which reads the sequences of a store as they "
                    "are; leave it out"
                )

    def collection(self) -> dict[str, Any]:
        """Return the options that shape the rows and their files, for the store's manifest."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(CollectConfig)}


#: File beside a store's manifest that lists the prompts that were left out.
SKIPPED_NAME = "skipped.jsonl"
#: Skipped prompts that are listed one by one; what goes beyond is only counted.
MAX_LISTED = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedPrompt:
    """A prompt, or a window, sample or chunk of one, that is not collected.

    Attributes:
        prompt: Number of the prompt among all that were given, from 0.
        dataset: See `Prompt`.
        group_id: See `Prompt`.
        reason: ``"empty"``, ``"longer than the context"``, ``"longer than max_length"``, ``"duplicate"`` or
            ``"later turns of a conversation"`` (`Prompt.unused_turns`; once for each; the first is collected).
        tokens: Its length; 0 for later turns, which are not tokenized.
    """

    prompt: int
    dataset: str
    group_id: str
    reason: str
    tokens: int


class SkippedPrompts:
    """What a plan leaves out: counted by reason, the first `MAX_LISTED` also listed.

    Attributes:
        counts: Number by reason.
        listed: The first of them, in the order they were found.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.listed: list[SkippedPrompt] = []

    def add(self, skipped: SkippedPrompt) -> None:
        """Count a prompt, and list it while there is room."""
        self.counts[skipped.reason] += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(skipped)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CollectionPlan:
    """Batches in the order they are run.

    Attributes:
        config: The options the plan was made with.
        table: Sequences, those that are not collected included.
        chosen: int64 ``[n]``, sequences to collect as places in the table, shortest first.
        batch_order: int64 ``[batches]``: batch b is ``chosen[b * batch_size : (b + 1) * batch_size]``.
        left_out: Prompts that are not collected.
    """

    config: CollectConfig
    table: SequenceTable
    chosen: npt.NDArray[np.int64]
    batch_order: npt.NDArray[np.int64]
    left_out: SkippedPrompts

    @property
    def num_sequences(self) -> int:
        """Sequences in all batches."""
        return self.chosen.size

    @property
    def skipped(self) -> dict[str, int]:
        """Number of prompts left out, by reason."""
        return dict(self.left_out.counts)

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return self.batch_order.size

    def batch(self, number: int) -> tuple[PlannedSequence, ...]:
        """Sequences of a batch, of similar length."""
        start = int(self.batch_order[number]) * self.config.batch_size
        return tuple(self.table[int(place)] for place in self.chosen[start : start + self.config.batch_size])

    def batches(self, start: int = 0) -> Iterator[tuple[PlannedSequence, ...]]:
        """Yield the batches from a number on, one in memory at a time."""
        return map(self.batch, range(start, self.num_batches))

    def digest(self) -> str:
        """SHA-256 over every batch: ids, lengths, tokens and seeds."""
        digest = hashlib.sha256()
        for batch in self.batches():
            for sequence in batch:
                digest.update(f"{sequence.sequence_id} {sequence.max_new} {sequence.seed} ".encode())
                digest.update(sequence.ids.astype("<i4").tobytes())
            digest.update(b"\n")
        return digest.hexdigest()


def make_plan(
    tokenizer: Any, prompts: Iterable[Prompt], config: CollectConfig, *, context: int | None = None
) -> CollectionPlan:
    """Tokenize the prompts, one at a time, and fix every batch and seed.

    Args:
        tokenizer: The target's transformers tokenizer.
        prompts: What to collect; read once, so a generator will do.
        config: Options.
        context: Positions the target has (``max_position_embeddings``); None: unlimited.

    Raises:
        ValueError: Nothing is left to collect, or the mode takes its sequences from a store.
    """
    if config.mode == "replay":
        raise ValueError("mode replay takes its sequences from a trace store, not from prompts; use replay()")
    planner = _Planner(tokenizer, config, context)
    table, left_out = planner.table, planner.left_out
    for number, prompt in enumerate(prompts):
        planner.add(number, prompt)
    if not len(table):
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.counts.items()) or "no prompts"
        raise ValueError(f"nothing to collect ({reasons}); raise max_length or give other prompts")
    _, first = np.unique(table.identities, return_index=True)  # sorted by sequence_id
    _list_duplicates(table, first, left_out)
    chosen = first[: config.limit]
    chosen = chosen[np.argsort(table.lengths[chosen], kind="stable")]  # ids break ties
    num_batches = math.ceil(chosen.size / config.batch_size)
    # A permutation, so that a killed run has texts of every length.
    order = np.random.default_rng(config.seed).permutation(num_batches)
    return CollectionPlan(config, table, chosen, order, left_out)


def _list_duplicates(table: SequenceTable, first: npt.NDArray[np.int64], left_out: SkippedPrompts) -> None:
    """List every sequence whose id an earlier one has."""
    if first.size == len(table):
        return
    again = np.ones(len(table), dtype=bool)
    again[first] = False
    for place in np.flatnonzero(again):
        sequence = table[int(place)]
        number = int(table.prompts[place])
        left_out.add(
            SkippedPrompt(number, sequence.dataset, sequence.group_id, "duplicate", int(sequence.ids.size))
        )


class _Planner:
    """Turns prompts into sequences, and lists what is left out."""

    def __init__(self, tokenizer: Any, config: CollectConfig, context: int | None) -> None:
        limits = [length for length in (config.max_length, context) if length is not None]
        self._max_length = min(limits) if limits else None
        if self._max_length is not None and self._max_length < 2:
            raise ValueError(f"the target's context is {context} tokens; a sequence needs at least 2")
        self._too_long = f"longer than {'the context' if self._max_length == context else 'max_length'}"
        self._tokenizer = tokenizer
        self._lead = leading_ids(tokenizer)
        self._config = config
        self.table = SequenceTable()
        self.left_out = SkippedPrompts()

    def add(self, number: int, prompt: Prompt) -> None:
        """Add the sequences of one prompt to the table."""
        config = self._config
        for _ in range(prompt.unused_turns):
            later = "later turns of a conversation"
            self.left_out.add(SkippedPrompt(number, prompt.dataset, prompt.group_id, later, 0))
        ids = prompt_ids(prompt, self._tokenizer, generate=config.mode == "generate")
        if not ids:
            self.left_out.add(SkippedPrompt(number, prompt.dataset, prompt.group_id, "empty", 0))
        elif config.mode == "teacher_forced":
            self._add_chunks(number, prompt, ids)
        else:
            for piece in self._windows(prompt, ids) if prompt.document else [ids]:
                self._add_samples(number, prompt, piece)

    def _add_samples(self, number: int, prompt: Prompt, ids: Sequence[int]) -> None:
        """Continuations of one prompt, if there is room for a token behind it."""
        room = self._config.max_new_tokens
        if self._max_length is not None:
            room = min(room, self._max_length - len(ids))
        if room < 1:
            skipped = SkippedPrompt(number, prompt.dataset, prompt.group_id, self._too_long, len(ids))
            self.left_out.add(skipped)
            return
        for sample in range(self._config.samples_per_prompt):
            self.table.append(self._planned(prompt, ids, room, number=sample), prompt=number)

    def _add_chunks(self, number: int, prompt: Prompt, ids: Sequence[int]) -> None:
        """Consecutive chunks of a text that is longer than the context."""
        lead = self._lead if prompt.document else []  # one token at most, and a chunk has at least two
        step = len(ids) if self._max_length is None else self._max_length - len(lead)
        for start in range(0, len(ids), step):
            chunk = [*lead, *ids[start : start + step]]
            self.table.append(self._planned(prompt, chunk, 0, number=start), prompt=number)

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
        return PlannedSequence(identity, prompt.group_id, prompt.dataset, prompt.category, array, max_new, seed)


def _seed(*parts: object) -> int:
    """A seed below 2**63 from a hash of the parts."""
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
