"""Collecting routing traces: prompts in, a trace store out.

>>> # model and tokenizer from transformers, spec from ecospec.predictor.fingerprint.routing_spec_of
>>> store = collect(model, tokenizer, prompts, CollectConfig(), "runs/traces", spec=spec)    # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.engine import TargetEngine
from ecospec.trace_collection.engine_protocol import Engine, OverlappingEngine, PendingTraces
from ecospec.trace_collection.hooks import RoutingRecorder, Source
from ecospec.trace_collection.host_memory import HeapTrimmer
from ecospec.trace_collection.manifest import TOKENS_PER_SHARD, write_durably
from ecospec.trace_collection.plan import SKIPPED_NAME, CollectConfig, CollectionPlan, SkippedPrompts, make_plan
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.prompts import Prompt
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter


@dataclasses.dataclass(frozen=True, slots=True)
class CollectProgress:
    """State of a collection after a batch.

    Attributes:
        sequences: Sequences finished, those of earlier runs included.
        total: Sequences planned.
        tokens: Tokens with experts recorded by this run.
        skipped: Number of prompts left out, by reason.
    """

    sequences: int
    total: int
    tokens: int
    skipped: Mapping[str, int]


ProgressCallback = Callable[[CollectProgress], None]


def collect(
    model: nn.Module,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    config: CollectConfig,
    out: str | Path,
    *,
    spec: RoutingSpec,
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    source: Source = "auto",
    tokens_per_shard: int = TOKENS_PER_SHARD,
    progress: ProgressCallback | None = None,
) -> TraceStore:
    """Run the target over prompts and store its routing.

    Args:
        model: transformers causal language model in eval mode, on any device.
        tokenizer: Its tokenizer.
        prompts: What to continue or to read.
        config: How.
        out: Folder of the store.
        spec: The target's RoutingSpec.
        resume: Go on with a store of the same prompts and options.
        options: Further options that shape the rows (source, dtype); stored, and compared on resume.
        provenance: What else to record about this run.
        source: Module boundary to record, see `RoutingRecorder`.
        tokens_per_shard: Size of the shards; a killed run loses those not yet written, see `Engine.uses_host`.
        progress: Called before the first batch and after each.

    Returns:
        The finished store.

    Raises:
        FileExistsError: ``out`` is not empty and ``resume`` is off.
        ValueError: Nothing to collect, the store to resume differs, or the model cannot be recorded.
    """
    plan = make_plan(tokenizer, prompts, config, context=context_of(model))
    # The model is checked before the folder is made.
    with open_engine(model, tokenizer, config, spec=spec, source=source) as engine:
        return run_plan(
            engine,
            plan,
            out,
            spec=spec,
            resume=resume,
            options=options,
            provenance=provenance,
            tokens_per_shard=tokens_per_shard,
            progress=progress,
        )


@contextlib.contextmanager
def open_engine(
    model: nn.Module, tokenizer: Any, config: CollectConfig, *, spec: RoutingSpec, source: Source = "auto"
) -> Iterator[TargetEngine]:
    """Record a transformers model while the context lasts; arguments and errors as in `collect`."""
    with RoutingRecorder(model, spec, source=source, weights=config.weights) as recorder:
        eos_ids = eos_ids_of(model, tokenizer)
        yield TargetEngine(model, recorder, eos_ids=eos_ids, temperature=config.temperature)


def run_plan(
    engine: Engine,
    plan: CollectionPlan,
    out: str | Path,
    *,
    spec: RoutingSpec,
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    progress: ProgressCallback | None = None,
) -> TraceStore:
    """Run a plan on an engine and store the routing; ``skipped.jsonl`` beside it lists the prompts left out.

    Args:
        engine: What runs the target.
        plan: From `make_plan`.
        out: Folder of the store.
        spec: The target's RoutingSpec.
        resume: See `collect`, as for the arguments below.
        options: See there.
        provenance: See there.
        tokens_per_shard: See there.
        progress: See there.

    Returns:
        The finished store.

    Raises:
        FileExistsError: ``out`` is not empty and ``resume`` is off.
        ValueError: The store to resume differs, or the engine's rows do not fit the spec.
    """
    with TraceStoreWriter(
        out,
        spec,
        weights=plan.config.weights,
        collection={**plan.config.collection(), "skipped": plan.skipped, **(options or {})},
        plan_hash=plan.digest(),
        provenance=provenance,
        resume=resume,
        tokens_per_shard=tokens_per_shard,
        compression=plan.config.compression,
        background=not engine.uses_host,
    ) as writer:
        _list_skipped(plan.left_out, writer.path)
        start = writer.finished_units
        sequences, tokens = sum(len(plan.batch(number)) for number in range(min(start, plan.num_batches))), 0
        writer.require_rows(sequences)

        def report() -> None:
            if progress is not None:
                progress(CollectProgress(sequences, plan.num_sequences, tokens, plan.skipped))

        report()
        for traces in run_batches(engine, plan.batches(start)):
            writer.append(traces)
            sequences += len(traces)
            tokens += sum(trace.num_processed for trace in traces)
            report()
    return TraceStore(out)


def run_batches(engine: Engine, batches: Iterable[Sequence[PlannedSequence]]) -> Iterator[list[RoutingTrace]]:
    """Yield the traces of each batch in order; where the engine can, the next batch has been started before."""
    trimmer = HeapTrimmer()
    for traces in (
        _overlapped(engine, batches) if isinstance(engine, OverlappingEngine) else map(engine.process, batches)
    ):
        yield traces
        trimmer.count(sum(trace.num_processed for trace in traces))


def _overlapped(
    engine: OverlappingEngine, batches: Iterable[Sequence[PlannedSequence]]
) -> Iterator[list[RoutingTrace]]:
    """Start every batch before the one before it is collected."""
    pending: PendingTraces | None = None
    for batch in batches:
        started = engine.start(batch)
        if pending is not None:
            yield pending()
        pending = started
    if pending is not None:
        yield pending()


def _list_skipped(left_out: SkippedPrompts, folder: Path) -> None:
    """Write ``skipped.jsonl``, one prompt a line, where prompts were left out."""
    if left_out.listed:
        lines = [json.dumps(dataclasses.asdict(skipped), ensure_ascii=False) + "\n" for skipped in left_out.listed]
        write_durably(folder / SKIPPED_NAME, "".join(lines).encode())


def context_of(model: nn.Module) -> int | None:
    """Positions the target was made for, or None where its config names none."""
    return context_of_config(model.config)


def context_of_config(config: Any) -> int | None:
    """Positions that a transformers config names, or None."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def eos_ids_of(model: nn.Module, tokenizer: Any) -> set[int]:
    """Tokens that end a generation, as transformers' ``generate`` has it.

    The generation config says it; where that names none, the config does, then the tokenizer.
    """
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return {int(token) for token in ([value] if isinstance(value, int) else value)}
    return set()
