"""Which draft trees are collected from a routing trace store: its sequences, and the roots in each of them.

The plan is fixed before anything runs, so a collection that is killed and resumed gives the same rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, get_args

from ecospec.trace_collection.records import Origin, RoutingTrace
from ecospec.trace_collection.store import TraceStore

At = Literal["positions", "steps"]
PLACES: tuple[At, ...] = get_args(At)


@dataclasses.dataclass(frozen=True, slots=True)
class TreePlan:
    """Sequences to collect trees from; each is one unit of the store.

    Attributes:
        at: ``"positions"``: a tree below every token; ``"steps"``: the trees of a run of the decoding loop.
        sequences: In the order they are worked through, without experts.
        origin: ``"generated"`` if the target itself wrote every text, else ``"teacher_forced"``: replay refuses
            such trees.
        skipped: Number of sequences left out, by reason.
    """

    at: At
    sequences: tuple[RoutingTrace, ...]
    origin: Origin
    skipped: dict[str, int]

    def digest(self) -> str:
        """SHA-256 over every sequence: place, id, tokens and roots."""
        digest = hashlib.sha256(self.at.encode())
        for trace in self.sequences:
            digest.update(f"{trace.sequence_id} {trace.prompt_length} {trace.finish_reason} ".encode())
            digest.update(trace.token_ids.astype("<i4").tobytes())
        return digest.hexdigest()


def roots_of(trace: RoutingTrace) -> range:
    """Positions of a text at which a step could start, hence a tree has its root.

    In generated text these are the generated tokens, except an end-of-sequence token; in other text every token
    but the first, because a drafter needs a processed token before the root.
    """
    first = trace.prompt_length if trace.origin == "generated" else 1
    return range(max(1, first), trace.num_tokens - (trace.finish_reason == "eos"))


def make_tree_plan(
    store: TraceStore, *, at: At, limit: int | None = None, allow_teacher_forced: bool = False
) -> TreePlan:
    """Choose the sequences.

    Args:
        store: Routing traces of the target.
        at: Where the roots are.
        limit: Sequences at most, chosen by their id, which is a hash; None: all.
        allow_teacher_forced: Accept text that the target did not write.

    Raises:
        ValueError: The store is empty or holds sampled or (unless allowed) teacher-forced text, or no sequence has
            room for a tree.
    """
    if not store.num_rows:
        raise ValueError(f"{store.path} holds no sequences; collect traces first")
    traces = sorted(store.iter_sequences(columns=()), key=lambda trace: trace.sequence_id)
    origins = Counter(trace.origin for trace in traces)
    if (given := origins["teacher_forced"]) and at == "steps":
        raise ValueError(
            f"{store.path} holds {given} teacher-forced texts, which have no prompt to run from; "
            "collect traces in mode generate, or trees at positions"
        )
    if given and not allow_teacher_forced:
        raise ValueError(
            f"{store.path} holds {given} teacher-forced texts: trees of text that the target did not write cannot "
            "be replayed; collect traces in mode generate, or allow them for training with --allow-teacher-forced"
        )
    if origins["generated"]:
        _require_greedy(store)
    kept, skipped = [], Counter[str]()
    for trace in traces:
        if reason := _no_room(trace, at):
            skipped[reason] += 1
        else:
            kept.append(trace)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise ValueError(f"{store.path}: nothing to collect ({reasons}); collect longer texts")
    kept = kept[:limit]
    wrote_all = all(trace.origin == "generated" for trace in kept)
    return TreePlan(at, tuple(kept), "generated" if wrote_all else "teacher_forced", dict(skipped))


def _no_room(trace: RoutingTrace, at: At) -> str:
    """Why a sequence has no tree, or ``""``."""
    if at == "positions":
        return "" if roots_of(trace) else "without a position for a tree"
    if not trace.prompt_length:
        return "without a prompt"
    # The prompt's own forward emits the first token.
    return "" if trace.num_tokens - trace.prompt_length > 1 else "without a step"


def _require_greedy(store: TraceStore) -> None:
    found = list(_temperatures(store.manifest.collection))
    if not found:
        raise ValueError(
            f"{store.path} does not say at which temperature its texts were generated; draft trees need greedy "
            "text: collect traces with --temperature 0"
        )
    if sampled := [value for value in found if value != 0]:
        raise ValueError(
            f"{store.path} was sampled at temperature {sampled[0]}; draft trees need greedy text, because a stored "
            "sequence does not carry the noise that its tokens were drawn with: collect traces with --temperature 0"
        )


def _temperatures(value: Any) -> Iterator[Any]:
    """Every temperature in a collection config, those of merged stores included."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "temperature":
                yield inner
            else:
                yield from _temperatures(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _temperatures(inner)
