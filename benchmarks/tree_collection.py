r"""How fast are draft trees recorded, against one tree per forward and against writing every path out?

    ecospec collect-traces --target checkpoints/target --prompts stdlib:report --max-new-tokens 48 --limit 24 \
        --out runs/greedy
    python benchmarks/tree_collection.py --target checkpoints/target --drafter checkpoints/drafter \
        --traces runs/greedy

Writes ``tree_collection.json`` and ``tree_collection.md``. Side by side, in random order for each text:

- B trees per forward, as `ecospec.decoding.tree_recording.record_text` does it, for several B;
- drafting alone, the part that no batching of the target's forwards shortens;
- one forward of the whole prefix and path for every node, without a cache, on a few positions of each text: the way
  the tests check against. It gets the trees for nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.cli.loading import load_target
from ecospec.decoding import RecordedTree, TargetModel, record_text
from ecospec.decoding.drafters import Eagle3Drafter
from ecospec.decoding.measurement import interleaved
from ecospec.trace_collection.hooks import RoutingRecorder
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.tree_plan import make_tree_plan, roots_of

DRAFTING, PATHS = "drafting alone", "one forward per path"
#: What takes a text and returns the number of nodes it recorded.
Method = Callable[[RoutingTrace], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeCollectionConfig:
    """Speed of recording draft trees."""

    target: Path
    """Folder of the target."""
    drafter: Path
    """Folder of the EAGLE-3 head."""
    traces: Path
    """Store of greedy texts."""
    limit: int = 12
    """Texts."""
    batches: tuple[int, ...] = (1, 4, 16, 32)
    """Trees per forward."""
    paths: int = 3
    """Positions of each text whose paths are written out."""
    dtype: str = "float32"
    """Arithmetic."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of the order."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""


def run(config: TreeCollectionConfig) -> None:
    """Measure and write both files."""
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    plan = make_tree_plan(TraceStore(config.traces), at="positions", limit=config.limit)
    model = load_target(config.target, config.dtype, "cpu")
    drafter = Eagle3Drafter.from_pretrained(config.drafter, model, dtype=model.dtype)
    methods = _methods(TargetModel(model), drafter, plan.sequences, config)
    for method in methods.values():  # warm-up
        method(plan.sequences[0])
    seconds, nodes = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
    for number, trace in enumerate(plan.sequences):
        for name in interleaved(list(methods), 1, config.seed + number):
            start = time.perf_counter()
            nodes[name] += methods[name](trace)
            seconds[name] += time.perf_counter() - start
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "nodes": nodes[name],
            "seconds": seconds[name],
            "nodes_per_second": nodes[name] / seconds[name],
        }
        for name in methods
    ]
    results: dict[str, Any] = {"texts": len(plan.sequences), "rows": rows}
    common.write_json(
        config.out / "tree_collection.json", common.result("tree_collection", conditions, config, results)
    )
    table = [[r["method"], r["nodes"], round(r["seconds"], 2), round(r["nodes_per_second"])] for r in rows]
    parts = [
        f"Trees of 11 nodes below every generated token of {len(plan.sequences)} texts of {config.target}.",
        "Drafting is part of every row but the last, which is measured on a few positions only.",
        common.markdown_table(["method", "nodes", "seconds", "nodes/s"], table),
    ]
    common.write_page(config.out / "tree_collection.md", "Recording draft trees", conditions, parts)
    print("\n\n".join(parts))


def _methods(
    target: TargetModel, drafter: Eagle3Drafter, texts: Sequence[RoutingTrace], config: TreeCollectionConfig
) -> dict[str, Method]:
    def record(trace: RoutingTrace, batch: int) -> list[RecordedTree]:
        return record_text(target, drafter, _ids(trace), roots_of(trace), trees_per_forward=batch)

    def batched(batch: int, trace: RoutingTrace) -> int:
        return sum(len(tree.tree) for tree in record(trace, batch))

    given = {}  # recorded before the clock starts
    for trace in texts:
        trees = record(trace, max(config.batches))
        given[trace.sequence_id] = trees[:: max(1, len(trees) // config.paths)][: config.paths]

    def written_out(trace: RoutingTrace) -> int:
        return sum(write_out(target, _ids(trace), tree) for tree in given[trace.sequence_id])

    found: dict[str, Method] = {
        f"{batch} tree{'s' * (batch > 1)} per forward": functools.partial(batched, batch)
        for batch in config.batches
    }
    return found | {DRAFTING: functools.partial(draft_only, target, drafter), PATHS: written_out}


def _ids(trace: RoutingTrace) -> Tensor:
    return torch.tensor(trace.token_ids, dtype=torch.int64)


@torch.no_grad()
def draft_only(target: TargetModel, drafter: Eagle3Drafter, trace: RoutingTrace) -> int:
    """Draft every tree of a text from the target's states, and return the number of nodes."""
    ids, roots, nodes = _ids(trace), roots_of(trace), 0
    with target.session(aux_layers=drafter.required_aux_layers, record_experts=False) as session:
        states = session.extend(ids).drafter_states
    drafter.reset()
    drafter.prefill(ids[: roots.start], states[: roots.start])
    for position in roots:
        nodes += len(drafter.draft(ids[position : position + 1]))
        drafter.extend(ids[position : position + 1], states[position : position + 1])
    return nodes


@torch.no_grad()
def write_out(target: TargetModel, ids: Tensor, recorded: RecordedTree) -> int:
    """Run the target over prefix and path of every node; its experts must be those recorded.

    Returns:
        The number of nodes.

    Raises:
        ValueError: More than one node differs; a single one may be a near tie in a router.
    """
    tree, wrong = recorded.tree, 0
    for node, path in enumerate(_paths(tree.parents.tolist())):
        with RoutingRecorder(target.model) as recorder:
            target.model(
                input_ids=torch.cat([ids[: recorded.position], tree.tokens[path]])[None],
                use_cache=False,
                logits_to_keep=1,
            )
            wrong += not torch.equal(recorder.last_experts[-1], recorded.experts[node].long())
    if wrong > 1:
        raise ValueError(f"{wrong} of {len(tree)} nodes were recorded with other experts than their path has")
    return len(tree)


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Node indices from the root to every node."""
    paths = [[0]]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node])
    return paths


if __name__ == "__main__":
    common.run_script(TreeCollectionConfig, run)
