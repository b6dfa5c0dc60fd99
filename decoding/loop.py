"""The decoding loop: draft, predict, select, verify, commit, one sequence at a time.

The prompt's forward emits the first token. From then on a step starts from the root, the last emitted token, which
the target has not processed::

    draft    drafter.draft(root)                  a tree of candidates
    predict  predictor session .score(tree)       expert sets of the candidates
    select   policy.select(tree, sets)            the nodes worth verifying, root included
    verify   target forward over those nodes      the target's own token at each; walk down while they agree
    commit   drafter.extend, session.commit       both learn what the target has now processed

Whatever is drafted or selected, the emitted tokens are the target's own choices along one path, so the output is
that of plain decoding. The host waits for the device once a step, to read the verified nodes' tokens (`evict`:
twice).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ecospec.decoding.capability import require_positions
from ecospec.decoding.choosing import Greedy, TokenChooser
from ecospec.decoding.drafter_states import require_states
from ecospec.decoding.drafters.base import Drafter
from ecospec.decoding.policies import SelectionPolicy
from ecospec.decoding.records import FinishReason, GenerationResult, StepRecord
from ecospec.decoding.sequence import Clock, DraftShape, Parts, Sequence
from ecospec.decoding.target import TargetModel
from ecospec.decoding.tree_recording import RecordedTree
from ecospec.predictor.session import Predictor


class DecodingLoop:
    """Speculative decoding of one sequence at a time (batch size 1).

    Args:
        target: The target.
        drafter: Builds draft trees; may be None for policies that do not draft.
        predictor: Predicts expert sets; used only by policies that ask for it, may be None for the others.
        policy: Chooses the nodes to verify.
        budget: γ, the most nodes verified per step, root included.
        depth: Draft forwards per step.
        top_k: Candidates per expanded node.
        beam: Nodes expanded per level.
        chooser: How the target's next token is chosen; greedy unless told.
        timing: Measure the parts of each step; on CUDA this synchronises four to six times a step.
        on_tree: Called at every step with the whole drafted tree and what the target does at all of its nodes, also
            those that are not verified. Takes one more forward of the target a step, charged to ``oracle``.

    Raises:
        ValueError: A part the policy needs is missing, the predictor was made for another target, or a number is
            out of range.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        predictor: Predictor | None,
        policy: SelectionPolicy,
        *,
        budget: int = 4,
        depth: int = 3,
        top_k: int = 2,
        beam: int = 2,
        chooser: TokenChooser | None = None,
        timing: bool = True,
        on_tree: Callable[[RecordedTree], None] | None = None,
    ) -> None:
        shape = DraftShape(depth=depth, top_k=top_k, beam=beam)
        for name, value in (("budget", budget), *dataclasses.asdict(shape).items()):
            _require_count(name, value)
        if policy.needs_draft and drafter is None:
            raise ValueError(f"policy {policy.name} needs a drafter; give one or use autoregressive")
        if policy.needs_predictor and predictor is None:
            raise ValueError(f"policy {policy.name} needs a predictor; give one or use probability")
        if policy.needs_predictor and predictor is not None:
            _require_same_target(target, predictor)
            require_states(drafter, predictor)
        self._parts = Parts(
            target=target,
            drafter=drafter if policy.needs_draft else None,
            predictor=predictor if policy.needs_predictor else None,
            policy=policy,
            budget=budget,
            shape=shape,
            chooser=chooser if chooser is not None else Greedy(),
            clock=Clock(target.device, parts=timing),
            on_tree=on_tree,
        )
        self._depth = depth if policy.needs_draft else 0

    @torch.no_grad()  # not inference mode: caches and tables that drafter and predictor grow here outlive the call
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        eos: Collection[int] = (),
        *,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> GenerationResult:
        """Generate after a prompt.

        Args:
            ids: int64 ``[T]`` or ``[1, T]``, the prompt, at least one token.
            max_new_tokens: Most tokens to emit, at least 1; cut exactly as plain decoding would.
            eos: Ids that end the text; the one that does is part of the output. Default: none, so only
                ``max_new_tokens`` ends it; pass ``{tokenizer.eos_token_id}``.
            on_tokens: Called with the tokens of the prompt's forward and of every step as they are emitted.

        Raises:
            ValueError: More than one sequence, an empty prompt, ids that are no tokens of the target, or a context
                beyond the target's positions.
        """
        prompt = _one_sequence(ids).to(self._parts.target.device)
        _require_tokens(prompt, self._parts.target.model)
        _require_count("max_new_tokens", max_new_tokens)
        length = int(prompt.shape[0])
        require_positions(self._parts.target.model, length, max_new_tokens, self._depth)
        stop = frozenset(eos)
        with contextlib.ExitStack() as stack:
            start = self._parts.clock.now()
            sequence = Sequence(self._parts, stack)
            emitted = sequence.prefill(prompt)
            prefill = self._parts.clock.now() - start
            tokens: list[int] = []
            steps: list[StepRecord] = []
            reason = _append(tokens, emitted, max_new_tokens, stop, on_tokens)
            while reason is None:
                before = len(tokens)
                emitted, record = sequence.step()
                reason = _append(tokens, emitted, max_new_tokens, stop, on_tokens)
                steps.append(dataclasses.replace(record, emitted=len(tokens) - before))
        return GenerationResult(tokens, steps, length, prefill, reason)


def _one_sequence(ids: Tensor) -> Tensor:
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.shape[0] == 0:
        raise ValueError(
            f"the prompt must be one sequence of at least one token, [T] or [1, T], got {list(ids.shape)}; "
            "decode one sequence at a time"
        )
    return ids


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _require_tokens(ids: Tensor, model: nn.Module) -> None:
    """Refuse ids the embedding has no row for; on CUDA they would poison the device. Once a generation."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"the prompt must hold token ids of an integer type (int64), got {ids.dtype}")
    target: Any = model
    rows = int(target.get_input_embeddings().weight.shape[0])
    low, high = torch.stack([ids.min(), ids.max()]).tolist()
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise ValueError(
            f"the prompt holds token id {wrong}, the target has ids 0 to {rows - 1}; use the target's own tokenizer"
        )


def _append(
    tokens: list[int],
    emitted: list[int],
    limit: int,
    stop: frozenset[int],
    on_tokens: Callable[[list[int]], None] | None,
) -> FinishReason | None:
    """Add emitted tokens up to EOS or the limit; return why generation ends, None if it goes on."""
    new = emitted[: limit - len(tokens)]
    end = next((count for count, token in enumerate(new, start=1) if token in stop), None)
    new = new[:end]
    tokens.extend(new)
    if on_tokens is not None:
        on_tokens(new)
    if end is not None:
        return "eos"
    return "length" if len(tokens) >= limit else None


def _require_same_target(target: TargetModel, predictor: Predictor) -> None:
    spec = predictor.spec
    if target.spec is not None:
        target.spec.require_same(spec, mine=f"target {target.spec.target_id}", theirs="the predictor")
    for name in ("num_layers", "num_experts", "top_k"):
        if getattr(spec, name) != getattr(target, name):
            raise ValueError(
                f"the predictor was made for another target: {name} is {getattr(spec, name)} there, "
                f"{getattr(target, name)} here; use parts made from one target"
            )
