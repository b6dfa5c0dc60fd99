"""Top-K overlap on the nodes of recorded draft trees: root, accepted and rejected candidates, by depth.

A text's own tokens are what most predictors are trained on; most nodes of a draft tree lie off it. Every predictor
scores every tree through its session, as in decoding: the context is the text before the root. What a predictor
attached to a drafter reads comes from drafting the tree again.

Shapes: N nodes, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecospec.decoding.drafter_states import draft_along, require_states
from ecospec.decoding.drafters.base import StateDrafter
from ecospec.decoding.target import TargetModel
from ecospec.decoding.tree import DraftTree, depths_of
from ecospec.eval.bootstrap import Interval, ratio_interval
from ecospec.eval.tables import MISSING, Table, percent_interval
from ecospec.predictor.overlap import topk_overlap_counts
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.session import AttachedSession, Predictor, PredictorSession
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.tree_records import TreeTrace

#: (group, whether accepted, depth)
Cell = tuple[str, bool, int]


@dataclass
class TreeCounts:
    """Sums over nodes.

    Attributes:
        nodes: Nodes by cell.
        hits: By predictor: predicted experts that were used, summed over nodes and layers, by cell.
        trees: Trees counted.
        other_trees: Trees left out because the drafter now proposes another (near ties in another arithmetic).
    """

    nodes: Counter[Cell] = field(default_factory=Counter)
    hits: dict[str, Counter[Cell]] = field(default_factory=dict)
    trees: int = 0
    other_trees: int = 0


@dataclass(frozen=True)
class Redrafter:
    """Drafts recorded trees again, for predictors that read the drafter's states.

    Attributes:
        target: The target.
        drafter: The drafter that proposed the trees.
        shape: ``depth``, ``top_k`` and ``beam`` of the recording.
    """

    target: TargetModel
    drafter: StateDrafter
    shape: Mapping[str, int]

    def trees(self, ids: Tensor, positions: Sequence[int]) -> Iterator[DraftTree]:
        """The trees at some positions of a text."""
        return draft_along(self.target, self.drafter, ids, positions, **self.shape)


def measure_tree_overlap(
    texts: Mapping[str, RoutingTrace],
    trees: Iterable[TreeTrace],
    predictors: Mapping[str, Predictor],
    spec: RoutingSpec,
    *,
    redrafter: Redrafter | None = None,
    progress: Callable[[int], None] | None = None,
) -> TreeCounts:
    """Score every node of every tree with every predictor.

    Args:
        texts: The texts that the trees were recorded on, with their experts, by sequence id.
        trees: The trees; those of one sequence follow each other by position.
        predictors: By name.
        spec: Routing of the target.
        redrafter: Needed where a predictor reads a drafter's states.
        progress: Called with the number of trees of each finished sequence.

    Raises:
        ValueError: A predictor of another target or drafter, or trees of a text that is not there.
    """
    counts = TreeCounts(hits={name: Counter() for name in predictors})
    for name, predictor in predictors.items():
        spec.require_same(predictor.spec, mine="the trees", theirs=f"predictor {name}")
        require_states(None if redrafter is None else redrafter.drafter, predictor)
    for sequence, group in itertools.groupby(trees, key=lambda tree: tree.sequence_id):
        if sequence not in texts:
            raise ValueError(
                f"the trees of sequence {sequence!r} lie on a text that the traces do not hold; name the "
                "traces that they were collected from"
            )
        found = list(group)
        sessions = {name: predictor.session() for name, predictor in predictors.items()}
        with torch.no_grad():
            _count_sequence(counts, texts[sequence], found, sessions, redrafter)
        for session in sessions.values():
            session.close()
        if progress is not None:
            progress(len(found))
    return counts


def _count_sequence(
    counts: TreeCounts,
    text: RoutingTrace,
    trees: Sequence[TreeTrace],
    sessions: Mapping[str, PredictorSession],
    redrafter: Redrafter | None,
) -> None:
    ids = torch.from_numpy(text.token_ids.astype(np.int64))
    used = torch.from_numpy(np.asarray(text.experts).astype(np.int64))
    drafted: Iterable[DraftTree | None] = [None] * len(trees)
    if redrafter is not None:
        drafted = redrafter.trees(ids, [tree.position for tree in trees])
    done = 0
    for tree, again in zip(trees, drafted, strict=True):
        tokens, parents = (torch.from_numpy(part.astype(np.int64)) for part in (tree.token, tree.parent))
        if again is not None and not _same(again, tokens, parents):
            counts.other_trees += 1
            continue
        cells = _cells(tree, parents)
        counts.nodes.update(cells)
        counts.trees += 1
        experts = torch.from_numpy(tree.experts.astype(np.int64))
        for name, session in sessions.items():
            session.prefill(ids[done : tree.position], used[done : tree.position])
            if isinstance(session, AttachedSession):
                assert redrafter is not None
                assert again is not None
                scores = session.score_states(tokens, parents, redrafter.drafter.node_states(again))
            else:
                scores = session.score(tokens, parents)
            hits = topk_overlap_counts(scores.cpu(), experts).sum(dim=-1)
            for cell, number in zip(cells, hits.tolist(), strict=True):
                counts.hits[name][cell] += number
        done = tree.position


def _same(drafted: DraftTree, tokens: Tensor, parents: Tensor) -> bool:
    return torch.equal(drafted.tokens.cpu(), tokens) and torch.equal(drafted.parents.cpu(), parents)


def _cells(tree: TreeTrace, parents: Tensor) -> list[Cell]:
    depths = depths_of(parents).tolist()
    return [(tree.group_id, bool(accepted), depth) for accepted, depth in zip(tree.accepted, depths, strict=True)]


def tree_overlap_report(counts: TreeCounts, spec: RoutingSpec) -> dict[str, Any]:
    """The numbers of a report: every predictor's overlap in every column, with intervals over groups.

    Args:
        counts: Of `measure_tree_overlap`.
        spec: Routing of the target.

    Returns:
        ``nodes`` by column, ``overlap`` by predictor and column, ``random`` (what random sets reach), ``trees`` and
        ``other_trees``. Columns: ``root``, ``candidates`` (all below the root), ``accepted <depth>``,
        ``rejected <depth>``.

    Raises:
        ValueError: No tree was counted.
    """
    if not counts.trees:
        raise ValueError(f"no tree was counted ({counts.other_trees} were drafted otherwise); record trees first")
    columns = _columns(counts)
    sizes = spec.num_layers * spec.top_k
    return {
        "trees": counts.trees,
        "other_trees": counts.other_trees,
        "random": spec.top_k / spec.num_experts,
        "nodes": {name: sum(counts.nodes[cell] for cell in cells) for name, cells in columns.items()},
        "overlap": {
            predictor: {
                name: _interval(hits, counts.nodes, cells, sizes).to_dict() for name, cells in columns.items()
            }
            for predictor, hits in counts.hits.items()
        },
    }


def _columns(counts: TreeCounts) -> dict[str, list[Cell]]:
    """Cells of every column that has nodes."""
    columns: dict[str, list[Cell]] = {"root": [], "candidates": []}
    for accepted, word in ((True, "accepted"), (False, "rejected")):
        depths = sorted({depth for _, found, depth in counts.nodes if found is accepted and depth})
        columns |= {f"{word} {depth}": [] for depth in depths}
    for cell in sorted(counts.nodes):
        _, accepted, depth = cell
        if not depth:
            columns["root"].append(cell)
            continue
        columns["candidates"].append(cell)
        columns[f"{'accepted' if accepted else 'rejected'} {depth}"].append(cell)
    return {name: cells for name, cells in columns.items() if cells}


def _interval(hits: Counter[Cell], nodes: Counter[Cell], cells: Sequence[Cell], sizes: int) -> Interval:
    groups = sorted({group for group, _, _ in cells})
    rows = [[cell for cell in cells if cell[0] == group] for group in groups]
    return ratio_interval(
        [sum(hits[cell] for cell in row) for row in rows],
        [sizes * sum(nodes[cell] for cell in row) for row in rows],
    )


def tree_overlap_table(report: Mapping[str, Any]) -> Table:
    """The report as a table, predictors by their overlap on candidates.

    Args:
        report: Of `tree_overlap_report`.
    """
    columns = list(report["nodes"])
    names = sorted(report["overlap"], key=lambda name: -_mean(report["overlap"][name], "candidates"))
    rows = [
        [name, *(_shown(report["overlap"][name][column], interval=column == "candidates") for column in columns)]
        for name in names
    ]
    rows.append(["nodes", *(f"{report['nodes'][column]:,}" for column in columns)])
    random = f"{100 * report['random']:.1f}"
    notes = [
        f"{report['trees']:,} trees; random sets reach {random} %.",
        "acc.: on the path that the target takes; rej.: the others; the number is the depth.",
    ]
    if report["other_trees"]:
        notes.append(f"Left out: {report['other_trees']:,} trees which the drafter now proposes otherwise.")
    headers = [column.replace("accepted", "acc.").replace("rejected", "rej.") for column in columns]
    return Table("Top-K overlap on tree nodes, %, with 95 % intervals", ["predictor", *headers], rows, notes=notes)


def _mean(entry: Mapping[str, Any], column: str) -> float:
    return float(entry[column]["mean"]) if column in entry else 0.0


def _shown(entry: Mapping[str, Any], *, interval: bool) -> str:
    if not interval:
        return f"{100 * entry['mean']:.1f}" if entry else MISSING
    return percent_interval(Interval(entry["mean"], entry["low"], entry["high"], entry["groups"]))
