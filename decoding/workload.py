"""What calibration measures with: contexts and trees, drafted or cut from text.

Shapes: T context tokens, N tree nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from ecospec.decoding.drafters.base import Drafter
from ecospec.decoding.measurement import measure_seconds
from ecospec.decoding.policies.base import probability_order
from ecospec.decoding.target import TargetModel
from ecospec.decoding.tree import DraftTree, chain, select_nodes


@dataclasses.dataclass(frozen=True)
class Workload:
    """Contexts and trees to measure with.

    Attributes:
        contexts: int64 ``[T]`` each, all of one length.
        trees: One tree for each context.
        origin: ``"drafted"`` by a drafter, or ``"text"``: the text's own next tokens as a chain.
        draft_seconds: Median seconds that drafting a tree took.
    """

    contexts: tuple[Tensor, ...]
    trees: tuple[DraftTree, ...]
    origin: str
    draft_seconds: float = 0.0


def text_workload(prompts: Sequence[Tensor], *, context_length: int, nodes: int) -> Workload:
    """Take contexts from prompts and, as trees, chains of the tokens that follow.

    Args:
        prompts: int64 ``[T]`` each; those shorter than ``context_length + nodes`` are left out.
        context_length: Tokens of a context.
        nodes: Nodes of a chain, root included.

    Raises:
        ValueError: No prompt is long enough.
    """
    long_enough = _long_enough(prompts, context_length + nodes)
    contexts, trees = [], []
    for ids in long_enough:
        contexts.append(ids[:context_length])
        trees.append(chain(ids[context_length : context_length + nodes]))
    return Workload(tuple(contexts), tuple(trees), "text")


@torch.inference_mode()
def drafted_workload(
    target: TargetModel, drafter: Drafter, prompts: Sequence[Tensor], *, context_length: int
) -> Workload:
    """Take contexts from prompts and let a drafter grow the trees.

    Args:
        target: The target, for the hidden states that the drafter reads.
        drafter: Made for this target.
        prompts: int64 ``[T]`` each; those shorter than ``context_length + 1`` are left out.
        context_length: Tokens of a context.

    Raises:
        ValueError: No prompt is long enough.
    """
    contexts, trees, seconds = [], [], []
    for ids in _long_enough(prompts, context_length + 1):
        context = ids[:context_length]
        with target.session(aux_layers=drafter.required_aux_layers, record_experts=False) as session:
            aux = session.extend(context).aux
        assert aux is not None
        drafter.reset()
        drafter.prefill(context, aux)
        contexts.append(context)
        root = ids[context_length : context_length + 1]
        trees.append(drafter.draft(root))
        seconds.append(measure_seconds(functools.partial(drafter.draft, root), root.device))
    return Workload(tuple(contexts), tuple(trees), "drafted", statistics.median(seconds))


def _long_enough(prompts: Sequence[Tensor], length: int) -> list[Tensor]:
    kept = [ids for ids in prompts if ids.shape[0] >= length]
    if not kept:
        longest = max((ids.shape[0] for ids in prompts), default=0)
        raise ValueError(f"no prompt has {length} tokens (the longest has {longest}); shorten the context")
    return kept


def nested_trees(workload: Workload, max_tokens: int) -> list[list[DraftTree]]:
    """For each tree, take its first 1, 2, ... nodes in order of probability.

    Args:
        workload: Trees.
        max_tokens: Nodes of the largest part.

    Returns:
        For each tree, ``max_tokens`` trees of rising size.

    Raises:
        ValueError: A tree is too small.
    """
    nested = []
    for tree in workload.trees:
        if len(tree) < max_tokens:
            raise ValueError(f"a tree of {len(tree)} nodes cannot measure {max_tokens} tokens; lower --max-tokens")
        order = probability_order(tree)
        nested.append([select_nodes(tree, order[:size].sort().values) for size in range(1, max_tokens + 1)])
    return nested
