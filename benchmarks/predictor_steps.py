"""How long a predictor's session takes for one step of decoding, every predictor in turn at every step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecospec.cli.train_attached import open_drafter
from ecospec.decoding import DraftTree
from ecospec.eval.tree_overlap import Redrafter
from ecospec.predictor.bundle import load_predictor
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.session import AttachedSession, PredictorSession
from ecospec.trace_collection.store import TraceStore

#: Tokens of the context before the first timed tree.
CONTEXT = 128


@dataclasses.dataclass(frozen=True)
class _Drafting:
    """What `open_drafter` reads."""

    target: Path
    drafter: Path
    device: str = "cpu"
    dtype: str = "float32"


def step_times(
    target: Path, drafter: Path, greedy: Path, bundles: Mapping[str, Path], steps: int
) -> dict[str, dict[str, float]]:
    """Time sessions on the draft trees at every second token of greedy texts.

    A step scores root and candidates and takes in the root and, if it was drafted, the next token. Drafting, and
    tokens taken in because they were not drafted, are outside the clock.

    Args:
        target: Folder of the target.
        drafter: Folder of its EAGLE-3 head.
        greedy: Store of greedy texts.
        bundles: Predictors by name.
        steps: Trees at least.

    Returns:
        By name: ``step_ms_p50`` and ``step_ms_p95``, milliseconds, and ``steps``.
    """
    spec = routing_spec_of(target)
    embedding = load_target_embedding(target, dtype=torch.float32)
    predictors = {
        name: load_predictor(path, target_embedding=embedding, require_spec=spec) for name, path in bundles.items()
    }
    model, head = open_drafter(_Drafting(target, drafter), spec)
    redrafter = Redrafter(model, head, {"depth": 3, "top_k": 2, "beam": 2})
    seconds: dict[str, list[float]] = {name: [] for name in predictors}
    random = np.random.default_rng(0)
    for text in TraceStore(greedy).iter_sequences(["experts"]):
        ids, used = (torch.from_numpy(np.asarray(part).astype(np.int64)) for part in (text.token_ids, text.experts))
        positions = range(CONTEXT, len(used) - 1, 2)
        sessions: dict[str, Any] = {name: predictor.session() for name, predictor in predictors.items()}
        with torch.no_grad():
            for session in sessions.values():
                session.prefill(ids[:CONTEXT], used[:CONTEXT])
            for position, tree in zip(positions, redrafter.trees(ids, list(positions)), strict=True):
                step = _Step(tree, head.node_states(tree), ids[position + 1], used[position : position + 2])
                for name in random.permutation(list(sessions)):
                    seconds[name].append(step.timed(sessions[name]))
        for session in sessions.values():
            session.close()
        if len(next(iter(seconds.values()))) >= steps:
            break
    return {name: _summary(values) for name, values in seconds.items()}


@dataclasses.dataclass(frozen=True)
class _Step:
    """A tree, the drafter's states of its nodes, the text's next token, and the experts of root and next token."""

    tree: DraftTree
    states: Tensor
    following: Tensor
    used: Tensor

    def timed(self, session: PredictorSession) -> float:
        """Take the step; return its seconds."""
        drafted = ((self.tree.parents == 0) & (self.tree.tokens == self.following)).nonzero().flatten()[:1]
        path = torch.cat([torch.zeros(1, dtype=torch.int64), drafted])
        started = time.perf_counter()
        if isinstance(session, AttachedSession):
            session.score_states(self.tree.tokens, self.tree.parents, self.states)
        else:
            session.score(self.tree.tokens, self.tree.parents)
        session.commit(path, self.used[: len(path)])
        elapsed = time.perf_counter() - started
        if len(path) == 1:
            session.prefill(self.following[None], self.used[1:])
        return elapsed


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "step_ms_p50": 1e3 * statistics.median(seconds),
        "step_ms_p95": 1e3 * float(np.quantile(seconds, 0.95)),
        "steps": len(seconds),
    }
