"""One sequence while it is decoded: the prompt's forward, then step after step.

Shapes: N nodes of the draft tree, M verified nodes, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ecospec.decoding.choosing import TokenChooser
from ecospec.decoding.drafters.base import Drafter, StateDrafter
from ecospec.decoding.expert_sets import sets_from_ids, sets_from_scores, unique_experts
from ecospec.decoding.oracle import true_experts
from ecospec.decoding.policies import SelectionContext, SelectionPolicy
from ecospec.decoding.records import StepRecord
from ecospec.decoding.target import TargetModel, TargetOutput
from ecospec.decoding.tree import DraftTree, root_only, select_nodes
from ecospec.decoding.tree_recording import RecordedTree, record_tree
from ecospec.decoding.verify import accepted_path
from ecospec.predictor.session import AttachedSession, Predictor, PredictorSession


class Clock:
    """Seconds, with the device synchronised where the parts of a step are to be told apart.

    Args:
        device: The target's device.
        parts: Whether to measure the parts; without, CUDA is not synchronised and parts read 0.
    """

    def __init__(self, device: torch.device, *, parts: bool) -> None:
        self.parts = parts
        self._synchronise = parts and device.type == "cuda"
        self._device = device

    def now(self) -> float:
        """Return seconds of a monotonic clock."""
        if self._synchronise:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Laps:
    """Times of one step: each `lap` charges the time since the one before to a part."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = self._last = clock.now()
        self.seconds = dict.fromkeys(("draft", "predict", "select", "verify", "oracle"), 0.0)

    def lap(self, part: str) -> None:
        if self._clock.parts:
            now = self._clock.now()
            self.seconds[part] += now - self._last
            self._last = now

    def total(self) -> float:
        return self._clock.now() - self._start - self.seconds["oracle"]


@dataclasses.dataclass(frozen=True, slots=True)
class DraftShape:
    """Shape of draft trees: forwards, candidates per expanded node, nodes expanded per level."""

    depth: int
    top_k: int
    beam: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What a sequence is decoded with; drafter and predictor are None where the policy does not use them."""

    target: TargetModel
    drafter: Drafter | None
    predictor: Predictor | None
    policy: SelectionPolicy
    budget: int
    shape: DraftShape
    chooser: TokenChooser
    clock: Clock
    on_tree: Callable[[RecordedTree], None] | None = None


class Sequence:
    """The state of one sequence.

    Args:
        parts: What to decode with.
        stack: Closes the sessions when the caller is done.
    """

    def __init__(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        self._parts = parts
        drafter, predictor = parts.drafter, parts.predictor
        # Plain decoding touches exactly K experts per layer: nothing to record, and no hook in the baseline's way.
        self._session = stack.enter_context(
            parts.target.session(
                aux_layers=drafter.required_aux_layers if drafter is not None else (),
                record_experts=drafter is not None,
            )
        )
        self._predictions = predictor.session() if predictor is not None else None
        if self._predictions is not None:
            stack.callback(self._predictions.close)
        if drafter is not None:
            drafter.reset()
            stack.callback(drafter.reset)
        self._root = torch.zeros(1, dtype=torch.int64, device=parts.target.device)

    def prefill(self, prompt: Tensor) -> list[int]:
        """Process the prompt (int64 ``[T]``) and return the first token, which becomes the root."""
        output = self._session.extend(prompt)
        if self._parts.drafter is not None:
            self._parts.drafter.prefill(prompt, output.drafter_states)
        if self._predictions is not None:
            self._predictions.prefill(prompt, output.experts)
        return self._plain_token(output)

    def step(self) -> tuple[list[int], StepRecord]:
        """Emit at least one token.

        Returns:
            The tokens, and a record that counts all of them as emitted.
        """
        laps = _Laps(self._parts.clock)
        if self._parts.drafter is None:
            tokens = self._plain_token(self._session.extend(self._root))
            laps.lap("verify")
            target = self._parts.target
            return tokens, _record(tokens, 0, 1, [target.top_k] * target.num_layers, laps)
        return self._speculate(self._parts.drafter, laps)

    def _plain_token(self, output: TargetOutput) -> list[int]:
        position = torch.full((1,), self._session.length, dtype=torch.int64, device=self._root.device)
        self._root = self._parts.chooser.choose(output.logits, position)
        return self._root.tolist()

    def _speculate(self, drafter: Drafter, laps: _Laps) -> tuple[list[int], StepRecord]:
        shape = self._parts.shape
        tree = drafter.draft(self._root, depth=shape.depth, top_k=shape.top_k, beam=shape.beam)
        laps.lap("draft")
        if self._parts.on_tree is not None:
            self._parts.on_tree(record_tree(self._session, tree, self._parts.chooser))
            laps.lap("oracle")
        scores, sets = self._expert_sets(tree, laps)
        context = SelectionContext(self._parts.budget, self._session.length, scores)
        kept = self._parts.policy.select(tree, sets, context)
        selected = select_nodes(tree, kept) if kept.shape[0] > 1 else root_only(self._root)
        laps.lap("select")
        output, path, tokens, unique = self._verify(selected)
        laps.lap("verify")
        rows = torch.tensor(path, dtype=torch.int64, device=self._root.device)
        drafter.extend(selected.tokens[rows], output.drafter_states[rows])
        laps.lap("draft")
        if self._predictions is not None:
            assert output.experts is not None
            self._predictions.commit(kept[rows], output.experts[rows])
            laps.lap("predict")
        return tokens, _record(tokens, len(tree) - 1, len(selected), unique, laps)

    def _expert_sets(self, tree: DraftTree, laps: _Laps) -> tuple[Tensor | None, Tensor | None]:
        """Return scores ``[N, L, E]`` where predicted, and sets bool ``[N, L, E]`` where the policy wants any."""
        target = self._parts.target
        if self._predictions is not None:
            scores = self._scores(self._predictions, tree)
            sets = sets_from_scores(scores, target.top_k)
            laps.lap("predict")
            return scores, sets
        if self._parts.policy.needs_oracle:
            sets = sets_from_ids(true_experts(self._session, tree), target.num_experts)
            laps.lap("oracle")
            return None, sets
        return None, None

    def _scores(self, predictions: PredictorSession, tree: DraftTree) -> Tensor:
        if isinstance(predictions, AttachedSession):
            assert isinstance(self._parts.drafter, StateDrafter), "the loop refuses others"
            return predictions.score_states(tree.tokens, tree.parents, self._parts.drafter.node_states(tree))
        return predictions.score(tree.tokens, tree.parents)

    def _verify(self, selected: DraftTree) -> tuple[TargetOutput, list[int], list[int], list[int]]:
        """Verify and keep the accepted path; the step's one copy to the host happens here.

        Returns:
            The target's output over the M nodes, the path as node indices, the emitted tokens, and the distinct
            experts per layer.
        """
        output = self._session.verify(selected)
        assert output.experts is not None
        size = len(selected)
        chosen = self._parts.chooser.choose(output.logits, self._session.length + selected.depths + 1)
        unique = unique_experts(output.experts, self._parts.target.num_experts)
        numbers = torch.cat([selected.tokens, selected.parents, chosen, unique]).tolist()
        on_host = numbers[2 * size : 3 * size]
        path = accepted_path(numbers[:size], numbers[size : 2 * size], on_host)
        self._session.keep(path)
        self._root = chosen[path[-1] : path[-1] + 1]
        return output, path, [on_host[node] for node in path], numbers[3 * size :]


def _record(tokens: list[int], candidates: int, nodes: int, unique: list[int], laps: _Laps) -> StepRecord:
    total = laps.total()
    return StepRecord(
        emitted=len(tokens),
        accepted=len(tokens) - 1,
        candidates=candidates,
        nodes=nodes,
        unique_experts=tuple(unique),
        total=total,
        **laps.seconds,
    )
