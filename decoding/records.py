"""What a decoding run reports: one record per step, and the result of a generation."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["eos", "length"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One speculation step. Times in seconds.

    On CUDA the four parts are measured only with ``timing=True``, which synchronises between them; otherwise they
    are 0.0 and only ``total`` counts.

    Attributes:
        emitted: Tokens the step added to the output, bonus token included, after cutting at EOS or the limit.
        accepted: Drafted tokens the target confirmed, bonus token excluded, before cutting.
        candidates: Drafted candidates, root excluded.
        nodes: Verified nodes, root included.
        unique_experts: Distinct routed experts the verified nodes touched together, per MoE layer.
        predict: Predicting expert sets and keeping the predictor's session up to date.
        draft: Drafting and refreshing the drafter.
        select: Choosing the nodes.
        verify: Target forward, acceptance and KV compaction.
        total: The whole step without ``oracle``.
        oracle: Finding true expert sets of all candidates; not part of ``total``.
    """

    emitted: int
    accepted: int
    candidates: int
    nodes: int
    unique_experts: tuple[int, ...]
    predict: float
    draft: float
    select: float
    verify: float
    total: float
    oracle: float

    @property
    def mean_unique_experts(self) -> float:
        """Distinct experts per MoE layer, mean over layers."""
        return sum(self.unique_experts) / len(self.unique_experts)


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One generated sequence.

    Attributes:
        tokens: Generated ids without the prompt, EOS included where it ended the text.
        steps: One record per step; the first token comes from the prompt's forward and belongs to no step.
        prompt_length: Tokens of the prompt.
        prefill: Seconds from the call to the first token.
        finish_reason: ``"eos"`` or ``"length"``.
    """

    tokens: list[int]
    steps: list[StepRecord]
    prompt_length: int
    prefill: float
    finish_reason: FinishReason

    @property
    def seconds(self) -> float:
        """Decoding time: the sum of the steps' totals, without the prompt."""
        return sum(step.total for step in self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Accepted tokens per step, bonus included; NaN without steps."""
        return sum(step.emitted for step in self.steps) / len(self.steps) if self.steps else float("nan")

    @property
    def mean_unique_experts(self) -> float:
        """Distinct experts per MoE layer and step; NaN without steps."""
        if not self.steps:
            return float("nan")
        return sum(step.mean_unique_experts for step in self.steps) / len(self.steps)
