"""What runs a target for a collection: the protocol of engines, and how they turn their output into traces.

`ecospec.trace_collection.engine.TargetEngine` runs a transformers model in this process; other engines may ask a
server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.records import Experts, FinishReason, RoutingTrace

#: Waits for a started batch and returns its traces.
PendingTraces = Callable[[], list[RoutingTrace]]


class Engine(Protocol):
    """Runs batches of a plan through a target.

    Attributes:
        uses_host: Whether the target computes on the processors of this process. Its shards are then written
            between batches: beside them, they would only take memory.
    """

    uses_host: bool

    def process(self, batch: Sequence[PlannedSequence]) -> list[RoutingTrace]:
        """Run one batch and return one trace per sequence, in the order of the batch.

        Args:
            batch: Sequences that are either all read (``max_new`` is 0: a fixed text, every token processed) or all
                continued by up to ``max_new`` tokens each, with noise from their ``seed``.

        Returns:
            Traces with the ids of their sequences; `trace_of` builds them.

        Raises:
            ValueError: The target's output is not what was asked for; the message says what to do.
        """
        ...


@runtime_checkable
class OverlappingEngine(Engine, Protocol):
    """An engine that can work on a batch while the one before is being stored."""

    def start(self, batch: Sequence[PlannedSequence]) -> PendingTraces:
        """Start a batch; arguments and errors as `Engine.process`.

        Returns:
            A function that waits for the batch and returns its traces.
        """
        ...


def trace_of(
    sequence: PlannedSequence,
    tokens: npt.NDArray[np.int32],
    experts: Experts,
    weights: npt.NDArray[np.float16] | None,
    reason: FinishReason,
) -> RoutingTrace:
    """Build the trace of a sequence.

    Args:
        sequence: What was planned.
        tokens: int32 ``[n]``, prompt and continuation.
        experts: uint8 or uint16 ``[t, L, K]``, ids ascending within a layer; t = n - 1 after generation, else n.
        weights: float16 ``[t, L, K]`` aligned with ``experts``, or None.
        reason: ``"text"`` for a text that was read, ``"eos"`` or ``"length"`` after generation.
    """
    return RoutingTrace(
        sequence_id=sequence.sequence_id,
        group_id=sequence.group_id,
        dataset=sequence.dataset,
        category=sequence.category,
        token_ids=tokens,
        prompt_length=sequence.ids.size,
        origin="teacher_forced" if reason == "text" else "generated",
        experts=experts,
        weights=weights,
        finish_reason=reason,
    )


def ending(tokens: npt.NDArray[Any], eos_ids: Collection[int]) -> tuple[int, FinishReason]:
    """Return how many generated tokens belong to a sequence, its end included, and why it ended.

    Args:
        tokens: Generated tokens; whatever follows an end is ignored.
        eos_ids: Tokens that end a generation.

    >>> ending(np.array([5, 2, 7]), [2])
    (2, 'eos')
    >>> ending(np.array([5, 7]), [2])
    (2, 'length')
    """
    ends = np.flatnonzero(np.isin(tokens, list(eos_ids)))
    return (int(ends[0]) + 1, "eos") if ends.size else (tokens.size, "length")
