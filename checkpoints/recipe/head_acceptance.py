"""How many tokens a step emits with the demo head: decoding replayed on the target's own greedy continuation.

Greedy decoding is lossless, so the target's continuation is known before any drafting, and one forward over prompt
and continuation gives all states the drafter would be refreshed with. A step of the decoding loop then needs no
target: draft below the last emitted token, keep the best nodes, and walk down while they agree with the
continuation. The slow tests compare this with the decoding loop itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoints.recipe.head_data import continue_prompts, observed_layers
from ecospec.decoding.drafters import Drafter
from ecospec.decoding.policies import Probability, SelectionContext


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts over decoding steps.

    Attributes:
        steps: Speculation steps.
        emitted: Tokens emitted by them, bonus included, cut at the end of the continuation.
        accepted: Steps by number of accepted candidates, before cutting; index 0 to budget - 1.
        in_tree: Steps in which the whole tree, before selection, held a matching path of at least d candidates, by
            d - 1.
    """

    steps: int = 0
    emitted: int = 0
    accepted: tuple[int, ...] = ()
    in_tree: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Tokens per step, bonus included; NaN without steps."""
        return self.emitted / self.steps if self.steps else float("nan")

    def at_least(self, depth: int) -> float:
        """Share of steps that accept at least `depth` candidates."""
        return sum(self.accepted[depth:]) / self.steps if self.steps else float("nan")

    def plus(self, other: Acceptance) -> Acceptance:
        """Return the counts of both."""

        def added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(a), len(b))
            return tuple(sum(x[i] if i < len(x) else 0 for x in (a, b)) for i in range(size))

        return Acceptance(
            self.steps + other.steps,
            self.emitted + other.emitted,
            added(self.accepted, other.accepted),
            added(self.in_tree, other.in_tree),
        )


def opening_prompts(texts: Sequence[NDArray[np.int32]], length: int, count: int) -> NDArray[np.int32]:
    """Return the first `length` tokens of `count` documents spread evenly over those that are long enough.

    Args:
        texts: Token ids per document.
        length: Tokens per prompt.
        count: Prompts wanted; fewer if there are not as many documents.
    """
    long = [text for text in texts if len(text) >= length]
    chosen = np.unique(np.linspace(0, len(long) - 1, min(count, len(long))).round().astype(int))
    return np.stack([long[index][:length] for index in chosen])


def replay(
    drafter: Drafter, ids: Tensor, aux_hidden: Tensor, prompt_length: int, *, budget: int = 4, **shape: int
) -> Acceptance:
    """Count what the decoding loop would accept along a greedy continuation, under policy ``probability``.

    Args:
        drafter: The drafter; it is reset.
        ids: int64 ``[T]``, prompt and the target's own greedy continuation; its first token comes from the prompt's
            forward and belongs to no step.
        aux_hidden: ``[T, A * H]``, the target's states.
        prompt_length: Tokens of the prompt, below T.
        budget: Nodes verified per step, root included.
        shape: ``depth``, ``top_k``, ``beam`` of the tree.
    """
    tokens: list[int] = ids.tolist()
    drafter.reset()
    drafter.prefill(ids[:prompt_length], aux_hidden[:prompt_length])
    context = SelectionContext(budget=budget, position=0)
    policy = Probability()
    root, steps, emitted = prompt_length, 0, 0
    accepted = [0] * budget
    in_tree: list[int] = []
    while root < len(tokens) - 1:
        tree = drafter.draft(ids[root], **shape)
        kept = set(policy.select(tree, None, context).tolist())
        nodes, parents = tree.tokens.tolist(), tree.parents.tolist()
        full = _matching_path(nodes, parents, set(range(len(nodes))), tokens[root + 1 :])
        found = _matching_path(nodes, parents, kept, tokens[root + 1 :])
        in_tree += [0] * (full - len(in_tree))
        for depth in range(full):
            in_tree[depth] += 1
        accepted[found] += 1
        new = min(found + 1, len(tokens) - 1 - root)
        drafter.extend(ids[root : root + new], aux_hidden[root : root + new])
        root, steps, emitted = root + new, steps + 1, emitted + new
    return Acceptance(steps, emitted, tuple(accepted), tuple(in_tree))


def _matching_path(nodes: list[int], parents: list[int], kept: set[int], continuation: list[int]) -> int:
    """Return how many candidates match the continuation, walking down from the root over kept nodes."""
    at, depth = 0, 0
    for token in continuation:
        child = next((i for i in kept if parents[i] == at and nodes[i] == token and i != at), None)
        if child is None:
            break
        at, depth = child, depth + 1
    return depth


@torch.inference_mode()
def measure_acceptance(
    model: Any,
    drafter: Drafter,
    prompts: NDArray[np.int32],
    *,
    new_tokens: int = 48,
    eos: int | None = None,
    **options: int,
) -> Acceptance:
    """Measure tokens per step on greedy continuations.

    Args:
        model: The target, in evaluation mode.
        drafter: The drafter.
        prompts: int32 ``[B, P]``.
        new_tokens: Tokens emitted per prompt.
        eos: Token that ends a continuation (itself included).
        options: Of `replay`.
    """
    ids = continue_prompts(model, torch.from_numpy(prompts.astype(np.int64)), new_tokens)
    with observed_layers(model, drafter.required_aux_layers) as outputs:
        model.model(ids, use_cache=False)
        aux = torch.cat([outputs[layer] for layer in drafter.required_aux_layers], dim=-1)
    total = Acceptance()
    length = prompts.shape[1]
    for row, states in zip(ids, aux, strict=True):
        ends = (row[length:] == eos).nonzero().flatten().tolist() if eos is not None else []
        stop = length + ends[0] + 1 if ends else len(row)
        total = total.plus(replay(drafter, row[:stop], states[:stop], length, **options))
    return total
