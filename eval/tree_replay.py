"""Replaying selection policies on recorded draft trees: accepted tokens and unique experts without any forward.

A tree depends on the prefix alone, so the trees recorded below every token of a text that the target wrote hold
every step that any policy would take over it: select on the tree of a position, follow the target's own tokens
through the selected nodes, go on at the position behind them. Only predictors have to run.

Shapes: N nodes, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ecospec.decoding.expert_sets import sets_from_ids, sets_from_scores, unique_experts
from ecospec.decoding.policies import SelectionContext, SelectionPolicy
from ecospec.decoding.tree import DraftTree, depths_of, select_nodes
from ecospec.decoding.verify import accepted_path
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.session import AttachedPredictor, Predictor, PredictorSession
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.tree_records import TreeTrace


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step; fields as in `ecospec.decoding.records.StepRecord`.

    Attributes:
        emitted: Tokens added to the text, bonus token included, cut where the text ends.
        nodes: Verified nodes, root included.
        unique_experts: Distinct routed experts the verified nodes touched together, per MoE layer.
    """

    emitted: int
    nodes: int
    unique_experts: tuple[int, ...]

    @property
    def mean_unique_experts(self) -> float:
        """Distinct experts per MoE layer, mean over layers."""
        return sum(self.unique_experts) / len(self.unique_experts)


@torch.no_grad()
def replay_text(
    text: RoutingTrace,
    trees: Mapping[int, TreeTrace],
    policy: SelectionPolicy,
    predictor: Predictor | None,
    spec: RoutingSpec,
    *,
    budget: int,
) -> list[ReplayedStep]:
    """The steps that a policy takes over a text.

    Args:
        text: Greedy text of the target, with its experts.
        trees: Trees of the text by position, one at each position where a step can start.
        policy: Chooses the nodes.
        predictor: For policies that predict.
        spec: Routing of the target.
        budget: γ, root included.

    Returns:
        The steps. They end early where a tree's own tokens leave the text (near ties in another arithmetic).

    Raises:
        ValueError: The target did not write the text, a tree that is needed was not recorded, or the predictor is
            missing, of another target, or reads a drafter's states, which recorded trees do not hold.
    """
    if text.origin != "generated" or not trees:
        raise ValueError(
            f"sequence {text.sequence_id!r} cannot be replayed: it needs text that the target wrote and a tree at "
            "every position; collect traces in mode generate, and their trees at positions"
        )
    session = _session(policy, predictor, spec)
    ids, used = (torch.from_numpy(np.asarray(part).astype(np.int64)) for part in (text.token_ids, text.experts))
    position, last, steps = min(trees), text.num_tokens - 1, list[ReplayedStep]()
    if session is not None:
        session.prefill(ids[:position], used[:position])
    while position < last:
        if position not in trees:
            raise ValueError(
                f"sequence {text.sequence_id!r} has no tree at position {position}; collect its trees at positions"
            )
        step, path = _step(trees[position], policy, session, spec, budget)
        following = ids[position + 1 :][: path.size].tolist()
        if trees[position].emitted[path][: len(following)].tolist() != following:
            break
        steps.append(ReplayedStep(len(following), *step))
        position += path.size
    if session is not None:
        session.close()
    return steps


def _session(policy: SelectionPolicy, predictor: Predictor | None, spec: RoutingSpec) -> PredictorSession | None:
    if not policy.needs_predictor:
        return None
    if predictor is None:
        raise ValueError(f"policy {policy.name} needs a predictor; give one or use probability")
    if isinstance(predictor, AttachedPredictor):
        raise ValueError(
            "a predictor that reads a drafter's hidden states cannot be replayed: recorded trees do not hold them; "
            "measure it with benchmark-decoding"
        )
    spec.require_same(predictor.spec, mine="the trees", theirs="the predictor")
    return predictor.session()


def _step(
    recorded: TreeTrace, policy: SelectionPolicy, session: PredictorSession | None, spec: RoutingSpec, budget: int
) -> tuple[tuple[int, tuple[int, ...]], npt.NDArray[np.int64]]:
    """Select, walk, and tell the session what was accepted.

    Returns:
        Verified nodes and their distinct experts per layer; and the accepted nodes, int64, from the root down.
    """
    tree = _draft_tree(recorded)
    experts = torch.from_numpy(recorded.experts.astype(np.int64))
    scores: Tensor | None = None
    sets: Tensor | None = None
    if session is not None:
        scores = session.score(tree.tokens, tree.parents)
        sets = sets_from_scores(scores, spec.top_k)
    elif policy.needs_oracle:
        sets = sets_from_ids(experts, spec.num_experts)
    kept = policy.select(tree, sets, SelectionContext(budget, recorded.position, scores))
    chosen = select_nodes(tree, kept)
    emitted = recorded.emitted[kept.numpy()].tolist()
    path = kept[accepted_path(chosen.tokens.tolist(), chosen.parents.tolist(), emitted)]
    if session is not None:
        session.commit(path, experts[path])
    touched = unique_experts(experts[kept], spec.num_experts).tolist()
    return (len(chosen), tuple(touched)), path.numpy()


def _draft_tree(recorded: TreeTrace) -> DraftTree:
    tokens, parents = (torch.from_numpy(part.astype(np.int64)) for part in (recorded.token, recorded.parent))
    return DraftTree(tokens, parents, torch.from_numpy(recorded.draft_logprob.copy()), depths_of(parents))


def replay_texts(
    texts: Sequence[RoutingTrace],
    trees: Mapping[str, Mapping[int, TreeTrace]],
    policy: SelectionPolicy,
    predictor: Predictor | None,
    spec: RoutingSpec,
    *,
    budget: int,
) -> dict[str, list[ReplayedStep]]:
    """Replay many texts; arguments as `replay_text`, trees by sequence and position.

    Returns:
        Steps by group, so that intervals can be taken over groups.
    """
    found: dict[str, list[ReplayedStep]] = {}
    for text in texts:
        steps = replay_text(text, trees[text.sequence_id], policy, predictor, spec, budget=budget)
        found.setdefault(text.group_id, []).extend(steps)
    return found
