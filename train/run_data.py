"""The data of a training run: stores to files, files to splits, splits to a data module and to recorded facts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.arrays import open_stores
from ecospec.train.baselines import baseline_overlaps
from ecospec.train.cache import TraceCache, open_cache, stores_key
from ecospec.train.config import CACHE_NAMES, Objective, TrainPredictorConfig
from ecospec.train.data import TraceDataModule
from ecospec.train.processes import is_first_process
from ecospec.train.splits import (
    CALIBRATION,
    HELD_OUT,
    LEFT_OUT,
    SPLITS,
    TRAINING,
    VALIDATION,
    SequenceTable,
    SplitConfig,
    assign_splits,
)
from ecospec.train.tree_cache import TreeRows, open_tree_stores, open_trees, tree_rows


@dataclass(frozen=True)
class RunData:
    """What a run trains and validates on.

    Attributes:
        module: The data module.
        facts: Plain values that describe the data; equal facts mean equal data.
        padding_share: Padded positions of the first epoch divided by all positions.
        baseline_overlaps: Top-K overlap on the validation split of every trivial predictor, fitted on the training
            split; empty in all processes but the first.
    """

    module: TraceDataModule
    facts: dict[str, Any]
    padding_share: float
    baseline_overlaps: dict[str, float]


def prepare_data(config: TrainPredictorConfig, spec: RoutingSpec) -> RunData:
    """Make the data of a run ready; memory does not grow with the stores but for 50 bytes a sequence.

    Args:
        config: Options of the run.
        spec: The target's routing.

    Raises:
        FileNotFoundError: A store does not exist.
        ValueError: Traces of another target, damaged or incomplete ones, an empty split, something to hold out that
            does not occur, or trees of sequences that are not among the traces.
    """
    folder = config.cache or config.out / CACHE_NAMES[0]
    target = f"target {config.target}"
    stores = open_stores(config.trace_paths(), spec, target)
    tree_stores = open_tree_stores(config.tree_paths(), spec, target)
    with_weights = config.objective == Objective.ROUTER_WEIGHTED
    cache = open_cache(stores, folder, with_weights=with_weights)
    table = cache.table(config.seed)
    codes = assign_splits(table, SplitConfig.from_options(dataclasses.asdict(config)))
    parts = [cache.select(codes == code) for code in range(len(SPLITS))]
    trees: list[TreeRows | None] = [None, None]
    if tree_stores:
        files = open_trees(tree_stores, cache, stores_key(stores), folder / "trees")
        rows = tree_rows(cache, files, config.context_length)
        trees = [rows.select(codes == code) for code in (TRAINING, VALIDATION)]
        _refuse_no_trees(trees[0], config)
    module = TraceDataModule(
        parts[TRAINING],
        parts[VALIDATION],
        calibration=parts[CALIBRATION] if parts[CALIBRATION].num_tokens else None,
        training_trees=trees[0],
        validation_trees=trees[1],
        trees_only=config.trees_only,
        context_length=config.context_length,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        workers=config.workers,
        with_weights=with_weights,
    )
    tables: dict[str, float] = {}
    if is_first_process(config.processes()):
        tables = baseline_overlaps(*(parts[code].load(config.baseline_tokens) for code in (TRAINING, VALIDATION)))
    facts = _facts(parts, table, codes)
    if trees[0] is not None:
        facts |= {
            "trees_fingerprint": stores_key(tree_stores),
            "trees": trees[0].num_trees,
            "tree_nodes": trees[0].num_nodes,
        }
    return RunData(module, facts, module.training_plan(0).padding_share(), tables)


def _refuse_no_trees(training: TreeRows | None, config: TrainPredictorConfig) -> None:
    if training is None or not training.num_trees:
        raise ValueError(
            f"--tree_traces {config.tree_traces} holds no tree of a training sequence; record trees of more "
            "groups, or hold out less"
        )


def _facts(parts: list[TraceCache], table: SequenceTable, codes: npt.NDArray[np.int8]) -> dict[str, Any]:
    """Plain values; JSON and ``torch.load(weights_only=True)`` hold them."""
    training = parts[TRAINING]
    groups = [len(np.unique(table.groups[codes == code])) for code in range(len(SPLITS))]
    names = [table.dataset_names[code] for code in np.unique(table.datasets[codes == TRAINING]).tolist()]
    facts: dict[str, Any] = {
        "fingerprint": training.fingerprint(),
        "tokens": training.num_tokens,
        "sequences": len(training.lengths),
        "groups": groups[TRAINING],
        "datasets": sorted(names),
    }
    for code in (VALIDATION, CALIBRATION, HELD_OUT, LEFT_OUT):
        facts |= {f"{SPLITS[code]}_tokens": parts[code].num_tokens, f"{SPLITS[code]}_groups": groups[code]}
    return facts
