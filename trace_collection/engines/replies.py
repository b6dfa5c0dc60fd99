"""What an engine answers for one sequence, and the trace it becomes.

A text that is read costs one sampled token, because engines return rows only for tokens that another one follows;
that token is dropped, and every token of the text has its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from ecospec.trace_collection.engine_protocol import trace_of
from ecospec.trace_collection.engines.rows import RowLayout, Rows, experts_of_rows
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.records import FinishReason, RoutingTrace


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An engine's answer for one sequence.

    Attributes:
        tokens: Generated token ids, end-of-sequence token included.
        rows: Integers ``[p + generated - 1, D, K]``.
        finish: The engine's reason: ``"stop"``, ``"length"``, or another word where it gave up.
        stopped_at: The token that ended it, where the engine names one.
    """

    tokens: Sequence[int]
    rows: Rows
    finish: str
    stopped_at: int | None = None


def tokens_to_ask(sequence: PlannedSequence) -> int:
    """Tokens an engine must generate for a sequence: one where it is only read, to get the last token's row."""
    return max(1, sequence.max_new)


def name_of(sequence: PlannedSequence) -> str:
    """How messages name a sequence."""
    return f"sequence {sequence.sequence_id!r}"


def trace_of_reply(
    sequence: PlannedSequence, reply: Reply, layout: RowLayout, eos_ids: Collection[int]
) -> RoutingTrace:
    """Check an answer and build the trace.

    Args:
        sequence: What was asked.
        reply: The answer.
        layout: What the target's rows look like.
        eos_ids: Tokens that end a generation, according to the target's files.

    Raises:
        ValueError: The engine gave up, stopped where it should not, or its rows are wrong.
    """
    where = name_of(sequence)
    generated = np.asarray(reply.tokens, dtype=np.int32)
    if not 1 <= generated.size <= tokens_to_ask(sequence):
        raise ValueError(
            f"{where}: asked for at most {tokens_to_ask(sequence)} tokens, the engine generated {generated.size}"
        )
    processed = sequence.ids.size + generated.size - 1
    if sequence.max_new == 0:
        experts = experts_of_rows(reply.rows, layout, processed, where)
        return trace_of(sequence, sequence.ids, experts, None, "text")
    reason = _reason(reply, int(generated[-1]), eos_ids, where)
    experts = experts_of_rows(reply.rows, layout, processed, where)
    return trace_of(sequence, np.concatenate([sequence.ids, generated]), experts, None, reason)


def _reason(reply: Reply, last: int, eos_ids: Collection[int], where: str) -> FinishReason:
    if reply.finish == "length":
        return "length"
    # A server may know ends of its own (a model's call tokens); it then names the token, which must be the last.
    if reply.finish == "stop" and (last in eos_ids or reply.stopped_at == last):
        return "eos"
    if reply.finish == "stop":
        raise ValueError(
            f"{where}: the engine stopped after token {last}, which ends nothing according to --target-path (ends: "
            f"{sorted(eos_ids)}); start the server without stop strings of its own"
        )
    raise ValueError(
        f"{where}: the engine gave up ({reply.finish!r}); its log says why. Lower --batch-size and --resume"
    )
