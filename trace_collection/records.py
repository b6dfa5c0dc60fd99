"""RoutingTrace: the routing of one sequence, one row of a trace store.

Shapes: n tokens of the sequence, t of them processed by the target, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec

Origin = Literal["generated", "teacher_forced"]
FinishReason = Literal["eos", "length", "text"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

Experts = npt.NDArray[np.unsignedinteger[Any]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """One sequence with the experts of every token the target processed.

    Attributes:
        sequence_id: Hash of source, prompt and sampling seed.
        group_id: Hash of the source document or prompt, without seed; splits and bootstraps go by it.
        dataset: Name of the prompt source.
        category: Finer label inside the dataset, or ``""``.
        token_ids: int32 ``[n]``, prompt and continuation.
        prompt_length: Leading tokens that were given; all of them for teacher-forced text.
        origin: ``"generated"`` by the target, or ``"teacher_forced"``: text the model did not write.
        experts: uint8 (uint16 above 256 experts) ``[t, L, K]``, ids ascending within a layer. t = n - 1 for
            generated sequences, whose last token was sampled but not processed, else n.
        weights: float16 ``[t, L, K]`` aligned with ``experts``: what the experts' outputs were multiplied with;
            None where not recorded.
        finish_reason: ``"eos"``, ``"length"``, or ``"text"`` (the end of a given text).

    Raises:
        ValueError: A field is wrong; the message names the sequence and the field.
    """

    sequence_id: str
    group_id: str
    dataset: str
    category: str
    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    origin: Origin
    experts: Experts
    weights: npt.NDArray[np.float16] | None
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        """Validate everything that needs no RoutingSpec."""
        for name in ("sequence_id", "group_id", "dataset"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                self._refuse(f"{name} must be a non-empty string, got {getattr(self, name)!r}")
        if not isinstance(self.category, str):
            self._refuse(f"category must be a string, got {self.category!r}")
        if self.origin not in ORIGINS:
            self._refuse(f"origin must be one of {', '.join(ORIGINS)}, got {self.origin!r}")
        if self.finish_reason not in FINISH_REASONS:
            self._refuse(f"finish_reason must be one of {', '.join(FINISH_REASONS)}, got {self.finish_reason!r}")
        tokens = self.token_ids
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not tokens.size:
            self._refuse(f"token_ids must be int32 [n] with n >= 1, got {tokens.dtype} {tokens.shape}")
        limit = tokens.size - 1 if self.origin == "generated" else tokens.size
        if not isinstance(self.prompt_length, int) or not 0 <= self.prompt_length <= limit:
            self._refuse(f"prompt_length must be an integer from 0 to {limit}, got {self.prompt_length!r}")
        if self.experts.ndim != 3 or self.experts.dtype not in (np.uint8, np.uint16):
            self._refuse(
                f"experts must be uint8 or uint16 [t, L, K], got {self.experts.dtype} {self.experts.shape}"
            )
        if self.experts.shape[0] != limit:
            self._refuse(
                f"experts must have one row per processed token, {limit} for {tokens.size} {self.origin} tokens, "
                f"got {self.experts.shape[0]}"
            )
        if self.weights is not None and (
            self.weights.dtype != np.float16 or self.weights.shape != self.experts.shape
        ):
            self._refuse(
                f"weights must be float16 {self.experts.shape}, got {self.weights.dtype} {self.weights.shape}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, n."""
        return self.token_ids.size

    @property
    def num_processed(self) -> int:
        """Tokens with experts, t."""
        return int(self.experts.shape[0])

    def require(self, spec: RoutingSpec) -> None:
        """Check the values against the target's RoutingSpec.

        Raises:
            ValueError: Experts or tokens are impossible for this target; the message names sequence and place.
        """
        low, high = int(self.token_ids.min()), int(self.token_ids.max())
        if low < 0 or high >= spec.vocab_size:
            self._refuse(f"token_ids must lie in 0 to {spec.vocab_size - 1}, got {low} to {high}")
        if problem := expert_problem(self.experts, spec):
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"sequence {self.sequence_id!r}: {problem}")


def expert_problem(experts: Experts, spec: RoutingSpec) -> str:
    """Say what is wrong with recorded experts, or return ``""``.

    Args:
        experts: ``[rows, L, K]``.
        spec: The target they were recorded from.
    """
    if experts.shape[1:] != (spec.num_layers, spec.top_k):
        return f"experts must be [t, {spec.num_layers}, {spec.top_k}], got {list(experts.shape)}"
    if experts.dtype != np.dtype(spec.expert_dtype):
        return f"experts must be {spec.expert_dtype} for {spec.num_experts} experts, got {experts.dtype}"
    if not experts.shape[0]:
        return ""
    if (high := int(experts.max())) >= spec.num_experts:
        return f"experts must lie in 0 to {spec.num_experts - 1}, got {high}"
    ascending = experts[..., :-1] < experts[..., 1:]
    if not ascending.all():
        row, layer = (int(place) for place in np.argwhere(~ascending)[0][:2])
        return (
            f"experts must be unique and ascending within a layer, got {experts[row, layer].tolist()} "
            f"at row {row}, MoE layer {layer}"
        )
    return ""
