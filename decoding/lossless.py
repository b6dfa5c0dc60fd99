"""Checking that a policy's output is that of plain decoding, and telling numerical ties from errors.

A forward over one token and one over several round differently, so in float32 an output may part at a near tie of
two logits, or of two experts in a router, whose flip moves later logits. The rule: in float64 every difference is a
mismatch; in float32 the first difference of a sequence is a *tie* if the logits of the two tokens lie within 1e-4,
or a router chose at that or an earlier generated position by less than 1e-5; else it is a mismatch. Positions of
the prompt do not count as earlier ones: every policy processes the prompt by the same forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ecospec.trace_collection.hooks import find_moe_layers

LOGIT_TOLERANCE = 1e-4
ROUTER_TOLERANCE = 1e-5
#: Largest share of emitted tokens at which ties may occur.
MAX_TIE_RATE = 1e-3

Verdict = Literal["same", "tie", "mismatch"]


@dataclasses.dataclass(frozen=True, slots=True)
class Margins:
    """How clear the reference's decisions were, from one teacher-forced forward over it. n generated tokens.

    Attributes:
        logits: float64 ``[n, V]``, row j those that chose token j.
        router: float64 ``[n]``, row j the smallest margin by which any router, at the position token j was chosen
            from, preferred its last chosen expert over its first rejected one.
    """

    logits: Tensor
    router: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How one output compares with the reference.

    Attributes:
        verdict: ``"same"``, ``"tie"`` or ``"mismatch"``.
        position: First generated token that differs; None where none does.
        logit_margin: Distance of the two tokens' logits there; None where not measured.
        router_margin: Smallest router margin up to there; None where not measured.
    """

    verdict: Verdict
    position: int | None = None
    logit_margin: float | None = None
    router_margin: float | None = None


def first_difference(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Return the first index at which the sequences differ, a missing token included; None if they are equal."""
    for position, (expected, got) in enumerate(zip(reference, candidate, strict=False)):
        if expected != got:
            return position
    return None if len(reference) == len(candidate) else min(len(reference), len(candidate))


def classify_mismatch(
    reference: Sequence[int],
    candidate: Sequence[int],
    margins: Margins,
    *,
    logit_tolerance: float = LOGIT_TOLERANCE,
    router_tolerance: float = ROUTER_TOLERANCE,
) -> Comparison:
    """Apply the tie rule to two outputs of one prompt.

    Args:
        reference: Tokens of plain decoding.
        candidate: Tokens of the policy.
        margins: Of the reference.
        logit_tolerance: Logits nearer than this are a tie.
        router_tolerance: Router margins below this make a tie of every later difference.

    Returns:
        The comparison at the first difference; later ones follow from it and are not looked at. An output that
        merely ends early or late is a mismatch.
    """
    position = first_difference(reference, candidate)
    if position is None:
        return Comparison("same")
    if position >= min(len(reference), len(candidate)):
        return Comparison("mismatch", position)
    row = margins.logits[position]
    logit_margin = abs(float(row[reference[position]] - row[candidate[position]]))
    router_margin = float(margins.router[: position + 1].min())
    tie = logit_margin < logit_tolerance or router_margin < router_tolerance
    return Comparison("tie" if tie else "mismatch", position, logit_margin, router_margin)


@torch.no_grad()
def measure_margins(model: nn.Module, prompt: Sequence[int], output: Sequence[int]) -> Margins:
    """Measure margins by one forward over prompt and output, with hooks on the routers.

    Args:
        model: The target (the transformers model).
        prompt: Prompt ids.
        output: Generated ids, at least one.

    Raises:
        ValueError: A router returns no logits of one column per expert.
    """
    count, layers = len(output), find_moe_layers(model)
    rows: list[Tensor] = []

    def note(router: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        values = result if isinstance(result, tuple) else (result,)
        experts = layers[0].num_experts
        logits = next((v for v in values if v.is_floating_point() and v.shape[-1] == experts), None)
        if logits is None:
            raise ValueError(
                f"{type(router).__name__} returns no router logits; ties cannot be told from mismatches"
            )
        rows.append(router_margin(router, logits.reshape(-1, experts)[-count:], _top_k(values)))

    handles = [layer.router.register_forward_hook(note) for layer in layers]
    try:
        device = next(model.parameters()).device
        ids = torch.tensor([[*prompt, *output[:-1]]], dtype=torch.int64, device=device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0].to(torch.float64)
    finally:
        for handle in handles:
            handle.remove()
    return Margins(logits, torch.stack([row.to(logits.device) for row in rows]).amin(dim=0))


def _top_k(values: Sequence[Any]) -> int:
    index = next((v for v in values if isinstance(v, Tensor) and not v.is_floating_point()), None)
    if index is None:
        raise ValueError("the routers return no expert index; ties cannot be told from mismatches")
    return int(index.shape[-1])


def router_margin(router: nn.Module, logits: Tensor, top_k: int) -> Tensor:
    """Return by how much each token's last chosen expert beat the first rejected one.

    In router logits; for routers with a correction bias (DeepSeek-V3) in sigmoid scores plus bias, the smaller of
    the margin between experts and the margin between expert groups.

    Args:
        router: The router module.
        logits: ``[n, E]``.
        top_k: K.

    Returns:
        float64 ``[n]``; infinity where every expert is chosen.
    """
    scores = logits.to(torch.float64)
    margin = torch.full_like(scores[:, 0], torch.inf)
    bias = getattr(router, "e_score_correction_bias", None)
    if isinstance(bias, Tensor):
        scores = scores.sigmoid() + bias.to(torch.float64)
        groups, kept = int(getattr(router, "num_group", 1)), int(getattr(router, "topk_group", 1))
        if kept < groups:
            grouped = scores.reshape(scores.shape[0], groups, -1)
            totals = grouped.topk(2, dim=-1).values.sum(dim=-1)
            ranked = totals.sort(dim=-1, descending=True)
            margin = ranked.values[:, kept - 1] - ranked.values[:, kept]
            eligible = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, ranked.indices[:, :kept], value=True)
            scores = grouped.masked_fill(~eligible[..., None], -torch.inf).flatten(1)
    if top_k >= scores.shape[-1]:
        return margin
    best = scores.topk(top_k + 1, dim=-1).values
    return torch.minimum(margin, best[:, top_k - 1] - best[:, top_k])


class LosslessCheck:
    """Counts runs, tokens, mismatches and ties over many outputs; measures margins only where outputs differ.

    Args:
        model: The target the outputs come from. In float64 no difference is excused.

    Attributes:
        runs: Outputs compared (a run = prompt x policy x level).
        tokens: Tokens of those outputs.
        mismatches: Outputs that differ without a tie.
        ties: Outputs whose first difference is a tie.
        failures: The comparisons behind ``mismatches``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._exact = next(model.parameters()).dtype == torch.float64
        self.runs = self.tokens = self.mismatches = self.ties = 0
        self.failures: list[Comparison] = []

    def compare(self, prompt: Sequence[int], reference: Sequence[int], candidate: Sequence[int]) -> Comparison:
        """Compare one output with plain decoding's and count it."""
        comparison = self._classify(prompt, reference, candidate)
        self.runs += 1
        self.tokens += len(candidate)
        self.ties += comparison.verdict == "tie"
        if comparison.verdict == "mismatch":
            self.mismatches += 1
            self.failures.append(comparison)
        return comparison

    def _classify(self, prompt: Sequence[int], reference: Sequence[int], candidate: Sequence[int]) -> Comparison:
        position = first_difference(reference, candidate)
        if position is None:
            return Comparison("same")
        if not reference:
            return Comparison("mismatch", position)
        tolerances = {"logit_tolerance": 0.0, "router_tolerance": 0.0} if self._exact else {}
        return classify_mismatch(
            reference, candidate, measure_margins(self._model, prompt, reference), **tolerances
        )

    @property
    def passed(self) -> bool:
        """No mismatch, and ties at no more than `MAX_TIE_RATE` of the tokens."""
        return self.mismatches == 0 and self.ties <= MAX_TIE_RATE * self.tokens

    def summary(self) -> dict[str, int]:
        """Return the counts under the keys of ``summary.json``."""
        return {"runs": self.runs, "tokens": self.tokens, "mismatches": self.mismatches, "ties": self.ties}
