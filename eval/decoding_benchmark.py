"""Decoding policies side by side: every policy on every prompt at every cost level, interleaved.

What drifts (clock rate, other work) must hit all policies alike. So for every prompt the policies run in a random
order; cost levels alternate by blocks of prompts, because switching one costs time; and two references are timed in
the same shuffle: our own autoregressive loop and transformers' ``generate``.

Times are wall-clock seconds from the first emitted token to the last one (decoding) and from the call to the first
token (prefill). What finds the oracle's sets is left out: it cannot be had in practice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from ecospec.decoding.drafters.base import Drafter
from ecospec.decoding.loop import DecodingLoop
from ecospec.decoding.lossless import Comparison, LosslessCheck
from ecospec.decoding.measurement import load_average
from ecospec.decoding.policies import SelectionPolicy
from ecospec.decoding.records import StepRecord
from ecospec.decoding.target import TargetModel
from ecospec.predictor.session import Predictor

#: Name of the second reference in tables; it is no policy.
GENERATE: Final = "transformers_generate"
AUTOREGRESSIVE: Final = "autoregressive"


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkPrompt:
    """A tokenised prompt.

    Attributes:
        ids: Prompt token ids.
        group_id: Group the bootstrap resamples; prompts of one document share it.
        dataset: Where it comes from.
    """

    ids: tuple[int, ...]
    group_id: str
    dataset: str


@dataclasses.dataclass(frozen=True, slots=True)
class LevelPlan:
    """What runs at a cost level, and how the target gets there.

    Attributes:
        policies: Policies by name; their options may depend on the level (``evict`` knows its cost curve).
        active: Puts the target into the level's state while it is entered.
        predictors: Predictors by name of the policy, where it is not the benchmark's one: one rule with several
            predictors stands under several names.
    """

    policies: Mapping[str, SelectionPolicy]
    active: Callable[[], AbstractContextManager[object]]
    predictors: Mapping[str, Predictor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """Options of a benchmark.

    Attributes:
        max_new_tokens: Tokens generated per run, at least 2.
        budget: γ, root included.
        depth: Draft forwards per step.
        top_k: Candidates per expanded node.
        beam: Nodes expanded per level.
        eos: Token ids that end a text.
        seed: Seed of the order of runs.
        block: Prompts between two switches of the cost level.
        max_seconds: No further block begins after this time; None: all prompts are run.

    Raises:
        ValueError: A number is out of range.
    """

    max_new_tokens: int = 64
    budget: int = 4
    depth: int = 3
    top_k: int = 2
    beam: int = 2
    eos: tuple[int, ...] = ()
    seed: int = 0
    block: int = 4
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        """Validate every field."""
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be at least 2, got {self.max_new_tokens}: the first is the prompt's"
            )
        if self.block < 1:
            raise ValueError(f"block must be at least 1 prompt, got {self.block}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds must be above 0, got {self.max_seconds}")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One policy on one prompt at one cost level.

    Attributes:
        prompt: Index of the prompt.
        level: Cost level.
        policy: Policy, or ``transformers_generate``.
        prefill: Seconds to the first token.
        seconds: Seconds from the first to the last token, the oracle's own work left out.
        tokens: Emitted ids.
        steps: Records of the steps; empty for ``transformers_generate``.
    """

    prompt: int
    level: str
    policy: str
    prefill: float
    seconds: float
    tokens: tuple[int, ...]
    steps: tuple[StepRecord, ...]


@dataclasses.dataclass
class BenchmarkResult:
    """What `run_benchmark` measured.

    Attributes:
        runs: One entry per prompt, level and policy (or reference), in the order of running.
        lossless: ``runs``, ``tokens``, ``mismatches``, ``ties``.
        failures: Mismatches as (level, policy, prompt, comparison).
        loads: Load averages seen between prompts.
        prompts: Number of prompts run, the first ones of those given.
    """

    runs: list[Run] = dataclasses.field(default_factory=list)
    lossless: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[tuple[str, str, int, Comparison]] = dataclasses.field(default_factory=list)
    loads: list[float] = dataclasses.field(default_factory=list)
    prompts: int = 0


class _FirstToken:
    """A streamer that notes when the first generated token arrives (the first call brings the prompt)."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0

    def put(self, value: Tensor) -> None:  # noqa: ARG002 - the streamer interface
        """Note the time of the second call."""
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def generate_reference(
    model: Any, ids: Sequence[int], max_new_tokens: int, eos: Collection[int]
) -> tuple[list[int], float, float]:
    """Greedy decoding by transformers itself.

    Args:
        model: The target.
        ids: Prompt.
        max_new_tokens: Most tokens.
        eos: Ids that end a text.

    Returns:
        Generated ids, seconds to the first token, seconds from there to the end.
    """
    prompt = torch.tensor([list(ids)], dtype=torch.int64, device=model.device)
    streamer = _FirstToken()
    start = time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=sorted(eos) or None,
        pad_token_id=next(iter(sorted(eos)), 0),
        streamer=streamer,
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    end = time.perf_counter()
    return tokens, streamer.first - start, end - streamer.first


class _Runner:
    """Runs single policies; the target and its loops are built once."""

    def __init__(
        self,
        model: Any,
        target: TargetModel,
        drafter: Drafter | None,
        predictor: Predictor | None,
        settings: BenchmarkSettings,
    ) -> None:
        self._model = model
        self._target, self._drafter, self._predictor = target, drafter, predictor
        self._settings = settings
        self.order = random.Random(settings.seed + 1)

    def loops(self, level: LevelPlan) -> dict[str, DecodingLoop]:
        return {
            name: self._loop(policy, level.predictors.get(name, self._predictor))
            for name, policy in level.policies.items()
        }

    def _loop(self, policy: SelectionPolicy, predictor: Predictor | None) -> DecodingLoop:
        return DecodingLoop(
            self._target,
            self._drafter,
            predictor,
            policy,
            budget=self._settings.budget,
            depth=self._settings.depth,
            top_k=self._settings.top_k,
            beam=self._settings.beam,
        )

    def run(
        self, loop: DecodingLoop | None, ids: Sequence[int], limit: int | None = None
    ) -> tuple[list[int], float, float, tuple[StepRecord, ...]]:
        """Decode once; no loop means transformers' generate, no limit that of the settings."""
        limit = self._settings.max_new_tokens if limit is None else limit
        if loop is None:
            return *generate_reference(self._model, ids, limit, self._settings.eos), ()
        prompt = torch.tensor(list(ids), dtype=torch.int64)
        start = time.perf_counter()
        result = loop.generate(prompt, limit, self._settings.eos)
        seconds = time.perf_counter() - start
        steps = tuple(result.steps)
        return result.tokens, result.prefill, seconds - result.prefill - sum(s.oracle for s in steps), steps


def plan_blocks(
    prompts: int, levels: Sequence[str], settings: BenchmarkSettings
) -> Iterator[tuple[range, list[str]]]:
    """Yield (prompt indices, order of levels) block by block: every level sees every prompt."""
    source = random.Random(settings.seed)
    for first in range(0, prompts, settings.block):
        indices = range(first, min(first + settings.block, prompts))
        yield indices, source.sample(list(levels), len(levels))


def run_benchmark(
    model: Any,
    prompts: Sequence[BenchmarkPrompt],
    levels: Mapping[str, LevelPlan],
    *,
    target: TargetModel,
    drafter: Drafter | None,
    predictor: Predictor | None,
    settings: BenchmarkSettings,
    progress: Callable[[str, str], None] | None = None,
) -> BenchmarkResult:
    """Measure all policies and references on all prompts at all levels.

    Args:
        model: The transformers model behind ``target``.
        prompts: Tokenised prompts, at least one.
        levels: Cost levels by name; each must hold the policy ``autoregressive``.
        target: The target as the loop sees it.
        drafter: For policies that draft.
        predictor: For policies that predict.
        settings: Options.
        progress: Called with level and policy after every run.

    Returns:
        Runs, and the comparison of every output: the policies' with the autoregressive loop's, and that one's with
        ``generate``'s.

    Raises:
        ValueError: No prompt, no level, a level without ``autoregressive``, or a part a policy needs is missing.
    """
    if not prompts or not levels:
        raise ValueError(f"a benchmark needs prompts and cost levels, got {len(prompts)} and {len(levels)}")
    for name, level in levels.items():
        if AUTOREGRESSIVE not in level.policies:
            raise ValueError(
                f"cost level {name} lacks the policy {AUTOREGRESSIVE}, which everything is compared with"
            )
    runner = _Runner(model, target, drafter, predictor, settings)
    loops: dict[str, dict[str, DecodingLoop | None]] = {
        name: {**runner.loops(level), GENERATE: None} for name, level in levels.items()
    }
    check, result = LosslessCheck(model), BenchmarkResult()
    begin = time.monotonic()
    for indices, names in plan_blocks(len(prompts), list(levels), settings):
        if settings.max_seconds is not None and result.prompts and time.monotonic() - begin > settings.max_seconds:
            break
        for name in names:
            with levels[name].active():
                if not result.prompts:  # warm up before the first block
                    for loop in loops[name].values():
                        runner.run(loop, prompts[0].ids, min(8, settings.max_new_tokens))
                for index in indices:
                    result.loads.append(load_average())
                    found = _run_prompt(runner, loops[name], (index, name), prompts[index], progress)
                    result.runs.extend(found.values())
                    _compare(check, prompts[index], found, result)
        result.prompts = indices.stop
    result.lossless.update(check.summary())
    return result


def _run_prompt(
    runner: _Runner,
    loops: Mapping[str, DecodingLoop | None],
    place: tuple[int, str],
    prompt: BenchmarkPrompt,
    progress: Callable[[str, str], None] | None,
) -> dict[str, Run]:
    """Run all policies on one prompt in random order; ``place`` is (prompt index, level)."""
    index, level = place
    found = {}
    for policy in runner.order.sample(list(loops), len(loops)):
        tokens, prefill, seconds, steps = runner.run(loops[policy], prompt.ids)
        found[policy] = Run(index, level, policy, prefill, seconds, tuple(tokens), steps)
        if progress is not None:
            progress(level, policy)
    return found


def _compare(
    check: LosslessCheck, prompt: BenchmarkPrompt, found: Mapping[str, Run], result: BenchmarkResult
) -> None:
    """Compare the outputs of one prompt at one level; ``generate`` is the independent witness of our own loop."""
    for policy, run in found.items():
        if policy == GENERATE:
            continue
        reference = found[GENERATE if policy == AUTOREGRESSIVE else AUTOREGRESSIVE]
        comparison = check.compare(prompt.ids, reference.tokens, run.tokens)
        if comparison.verdict == "mismatch":
            result.failures.append((run.level, policy, run.prompt, comparison))


@contextlib.contextmanager
def single_thread(threads: int = 1) -> Iterator[None]:
    """Compute with this many threads, and with as many as before afterwards.

    Raises:
        ValueError: ``threads`` is below 1.
    """
    if threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
