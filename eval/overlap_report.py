"""The overlap report: how well predictors foresee the experts a target uses.

On disk::

    OUT/
      report.json   # every number; keys in the docstring of `overlap_report`
      report.md     # the tables
      report.html   # the page, self-contained
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ecospec.eval import html_page, overlap_rendering
from ecospec.eval.overlap_counts import OverlapCounts, SequenceInfo
from ecospec.eval.overlap_summary import summarise
from ecospec.eval.report_files import (
    FORMAT_VERSION,
    HTML_NAME,
    JSON_NAME,
    MARKDOWN_NAME,
    provenance_section,
    write_text,
)
from ecospec.predictor.routing_spec import RoutingSpec

#: Tokens scored together, padding included; bounds memory at this times L·E floats per predictor.
BATCH_TOKENS = 4096


class TracedSequence(Protocol):
    """One row of a trace store, as far as a report reads it."""

    @property
    def token_ids(self) -> Any:
        """int32 ``[T']``, T' >= T."""
        ...

    @property
    def experts(self) -> Any:
        """uint8 or uint16 ``[T, L, K]`` or ``[T, L*K]``, one entry per processed token."""
        ...

    @property
    def group_id(self) -> str:
        """Group of the bootstrap."""
        ...

    @property
    def dataset(self) -> str:
        """Dataset name."""
        ...

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def origin(self) -> str:
        """``generated`` or ``teacher_forced``."""
        ...


class SequencePredictor(Protocol):
    """A predictor that scores whole sequences; one that also has ``score_batch`` is given padded batches.

    One with a true ``ranks_only`` orders its K best experts and no more: what needs probabilities or lower ranks is
    not reported of it.
    """

    @property
    def spec(self) -> RoutingSpec:
        """The target it was made for."""
        ...

    def score_sequence(self, ids: Tensor, experts: Tensor | None) -> Tensor:
        """Return float ``[T, L, E]`` for int64 ids ``[T]``; experts ``[T, L, K]`` of earlier tokens may be used."""
        ...


def require_disjoint(
    training_groups: AbstractSet[str],
    report_groups: AbstractSet[str],
    *,
    training: str,
    report: str,
    advice: str = "report on other groups, or add --allow_leak true to report all the same",
) -> None:
    """Refuse to report on groups a predictor was trained on.

    Args:
        training_groups: Groups of the training traces.
        report_groups: Groups of the traces to report on.
        training: Name of the first, for the message.
        report: Name of the second.
        advice: What to do, for the message.

    Raises:
        ValueError: They share groups; the message says how many.
    """
    if shared := training_groups & report_groups:
        raise ValueError(
            f"{len(shared)} of the {len(report_groups)} groups of {report} are among the "
            f"{len(training_groups)} groups of {training} (first: {min(shared)}), so the report would be about "
            f"memory; {advice}"
        )


def measure_overlap(
    sequences: Iterable[TracedSequence],
    predictors: Mapping[str, SequencePredictor],
    spec: RoutingSpec,
    *,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> OverlapCounts:
    """Score every processed token of the sequences with every predictor; memory does not grow with their number.

    Args:
        sequences: Rows of a trace store.
        predictors: By name. ``random`` is computed exactly and must not be among them.
        spec: Routing of the target.
        device: Where the predictors live.
        batch_tokens: Tokens scored together, padding included.
        progress: Called with the number of tokens of each finished batch.

    Returns:
        The sums of which reports are made.

    Raises:
        ValueError: A predictor is named ``random`` or was made for another target.
    """
    if "random" in predictors:
        raise ValueError("the name 'random' is taken by the exact expectation of random sets; rename the predictor")
    for name, predictor in predictors.items():
        spec.require_same(predictor.spec, mine="the traces", theirs=f"predictor {name}")
    ranks_only = {name for name, predictor in predictors.items() if getattr(predictor, "ranks_only", False)}
    counts = OverlapCounts(spec, list(predictors), ranks_only)
    with torch.inference_mode():
        for batch in _batches(sequences, spec, batch_tokens):
            ids = [_ids(sequence, device) for sequence, _ in batch]
            experts = [torch.as_tensor(array.astype(np.int64), device=device) for _, array in batch]
            scores = {name: _score(predictor, ids, experts) for name, predictor in predictors.items()}
            for index, (sequence, _) in enumerate(batch):
                info = SequenceInfo(
                    sequence.group_id, sequence.dataset, int(sequence.prompt_length), str(sequence.origin)
                )
                counts.add(info, experts[index], {name: found[index] for name, found in scores.items()})
            if progress is not None:
                progress(sum(len(one) for one in ids))
    return counts


def _batches(
    sequences: Iterable[TracedSequence], spec: RoutingSpec, batch_tokens: int
) -> Iterator[list[tuple[TracedSequence, Any]]]:
    """Group consecutive sequences so that a batch, padded to its longest, stays within ``batch_tokens``."""
    batch: list[tuple[TracedSequence, Any]] = []
    longest = 0
    for sequence in sequences:
        experts = np.asarray(sequence.experts).reshape(-1, spec.num_layers, spec.top_k)
        if not len(experts):
            continue
        if batch and max(longest, len(experts)) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], 0
        batch.append((sequence, experts))
        longest = max(longest, len(experts))
    if batch:
        yield batch


def _ids(sequence: TracedSequence, device: torch.device | str) -> Tensor:
    processed = len(sequence.experts)
    return torch.as_tensor(np.asarray(sequence.token_ids[:processed], dtype=np.int64), device=device)


def _score(predictor: SequencePredictor, ids: Sequence[Tensor], experts: Sequence[Tensor]) -> list[Tensor]:
    score_batch = getattr(predictor, "score_batch", None)
    if score_batch is None:
        return [predictor.score_sequence(one, used) for one, used in zip(ids, experts, strict=True)]
    # Padding on the right: causal predictors do not see it from the tokens before.
    scores = score_batch(torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True))
    return [scores[index, : len(one)] for index, one in enumerate(ids)]


def overlap_report(
    counts: OverlapCounts,
    *,
    inputs: Mapping[str, Any],
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Make the report's JSON object.

    Args:
        counts: From `measure_overlap`.
        inputs: What was read: stores and predictors, with paths and fingerprints.
        provenance: Versions, command, commit.
        notes: Caveats shown on top.

    Returns:
        ``format_version``, ``kind``, ``spec``, ``ranks``, ``inputs``, ``notes``, ``provenance``, and the keys of
        `summarise`.

    Raises:
        ValueError: No token was counted.
    """
    return {
        "format_version": FORMAT_VERSION,
        "kind": "overlap",
        "spec": counts.spec.to_dict(),
        "ranks": list(counts.ranks),
        "inputs": dict(inputs),
        "notes": list(notes),
        "provenance": dict(provenance),
        **summarise(counts),
    }


def write_overlap_report(report: dict[str, Any], out: Path) -> None:
    """Write ``report.html``, ``report.md`` and, last, ``report.json``.

    Args:
        report: From `overlap_report`.
        out: An existing folder.
    """
    page = html_page.page(
        "EcoSpec: expert prediction",
        "Top-K overlap of expert predictors, beside what trivial predictors reach on the same tokens.",
        [overlap_rendering.section(report), provenance_section(report)],
    )
    write_text(out / HTML_NAME, page)
    write_text(out / MARKDOWN_NAME, overlap_rendering.markdown(report))
    write_text(out / JSON_NAME, json.dumps(report, indent=1, allow_nan=False) + "\n")
