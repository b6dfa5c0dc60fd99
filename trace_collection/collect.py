"""Collecting routing traces: prompts in, a trace store out.

>>> # model and tokenizer from transformers, spec from ecospec.predictor.fingerprint.routing_spec_of
>>> store = collect(model, tokenizer, prompts, CollectConfig(), "runs/traces", spec=spec)    # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.engine import TargetEngine
from ecospec.trace_collection.hooks import RoutingRecorder, Source
from ecospec.trace_collection.plan import CollectConfig, CollectionPlan, make_plan
from ecospec.trace_collection.prompts import Prompt
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
    source: Source = "router",
    tokens_per_shard: int = 131_072,
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
        tokens_per_shard: Size of the shards; a killed run loses at most one.
        progress: Called before the first batch and after each.

    Returns:
        The finished store.

    Raises:
        FileExistsError: ``out`` is not empty and ``resume`` is off.
        ValueError: Nothing to collect, the store to resume differs, or the model cannot be recorded.
    """
    plan = make_plan(tokenizer, prompts, config, context=context_of(model))
    collection = {**config.collection(), "skipped": plan.skipped, **(options or {})}
    # The model is checked before the folder is made.
    with (
        RoutingRecorder(model, spec, source=source, weights=config.weights) as recorder,
        TraceStoreWriter(
            out,
            spec,
            weights=config.weights,
            collection=collection,
            plan_hash=plan.digest(),
            provenance=provenance,
            resume=resume,
            tokens_per_shard=tokens_per_shard,
        ) as writer,
    ):
        engine = TargetEngine(model, recorder, eos_ids=eos_ids_of(model, tokenizer), temperature=config.temperature)
        _run(engine, plan, writer, progress)
    return TraceStore(out)


def _run(
    engine: TargetEngine, plan: CollectionPlan, writer: TraceStoreWriter, progress: ProgressCallback | None
) -> None:
    process = engine.generate if plan.config.mode == "generate" else engine.read
    start = writer.finished_units
    sequences, tokens = sum(len(batch) for batch in plan.batches[:start]), 0

    def report() -> None:
        if progress is not None:
            progress(CollectProgress(sequences, plan.num_sequences, tokens, plan.skipped))

    report()
    for batch in plan.batches[start:]:
        traces = process(batch)
        writer.append(traces)
        sequences += len(traces)
        tokens += sum(trace.num_processed for trace in traces)
        report()


def context_of(model: nn.Module) -> int | None:
    """Positions the target was made for, or None where its config names none."""
    config: Any = model.config
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def eos_ids_of(model: nn.Module, tokenizer: Any) -> set[int]:
    """Tokens that end a generation, according to generation config, config and tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(token) for token in value)
    return found
