"""TreeTrace: one draft tree at one position of a sequence, one row of a draft-tree store.

Trees recorded at every position of a text that the target itself emitted allow the exact offline replay of every
selection policy. Shapes: N nodes, index 0 the root, parents before children; L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import Experts, expert_problem

_NODE_ARRAYS: dict[str, type[np.generic]] = {
    "token": np.int32,
    "parent": np.int16,
    "draft_logprob": np.float32,
    "target_logprob": np.float32,
    "emitted": np.int32,
    "accepted": np.bool_,
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TreeTrace:
    """One speculation step with the true experts of every candidate, also of those not verified.

    Attributes:
        sequence_id: The sequence the step belongs to.
        group_id: Its source document or prompt.
        position: Position of the root token in the sequence, from 0.
        token: int32 ``[N]``, token of each node; index 0 is the root, the last emitted token.
        parent: int16 ``[N]``, index of the parent, -1 for the root.
        draft_logprob: float32 ``[N]``, cumulative log-probability under the drafter; 0 for the root.
        experts: uint8 (uint16 above 256 experts) ``[N, L, K]``, ids ascending within a layer.
        target_logprob: float32 ``[N]``, log-probability of each node's token under the target, given its path; 0
            for the root.
        emitted: int32 ``[N]``, the target's own next token at each node.
        accepted: bool ``[N]``, whether the node lies on the path the target emits; the root always does.
        temperature: Sampling temperature, 0 for greedy.
        seed: Seed of the sequence's noise.

    Raises:
        ValueError: A field is wrong; the message names the step and the field.
    """

    sequence_id: str
    group_id: str
    position: int
    token: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int16]
    draft_logprob: npt.NDArray[np.float32]
    experts: Experts
    target_logprob: npt.NDArray[np.float32]
    emitted: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        """Validate everything that needs no RoutingSpec."""
        for name in ("sequence_id", "group_id"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                self._refuse(f"{name} must be a non-empty string, got {getattr(self, name)!r}")
        for name in ("position", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                self._refuse(f"{name} must be an integer >= 0, got {value!r}")
        temperature = self.temperature
        if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
            self._refuse(f"temperature must be a finite number >= 0, got {self.temperature!r}")
        nodes = self.token.shape
        if len(nodes) != 1 or not nodes[0]:
            self._refuse(f"token must be [N] with N >= 1, got {list(nodes)}")
        for name, dtype in _NODE_ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != nodes:
                self._refuse(
                    f"{name} must be {np.dtype(dtype)} {list(nodes)}, got {array.dtype} {list(array.shape)}"
                )
        if self.experts.ndim != 3 or self.experts.shape[0] != nodes[0]:
            self._refuse(f"experts must be [{nodes[0]}, L, K], got {list(self.experts.shape)}")
        self._check_tree()

    def _check_tree(self) -> None:
        """The links must form a tree, and the accepted nodes one path from the root."""
        order = np.arange(self.num_nodes)
        if self.parent[0] != -1 or (self.parent[1:] < 0).any() or (self.parent[1:] >= order[1:]).any():
            self._refuse(f"parent must be -1 for the root and an earlier index else, got {self.parent.tolist()}")
        for name in ("draft_logprob", "target_logprob"):
            values = getattr(self, name)
            if values[0] != 0 or np.isnan(values).any() or (values > 1e-6).any():
                self._refuse(f"{name} must be 0 for the root and at most 0 else, got {values.tolist()}")
        if (self.draft_logprob[1:] > self.draft_logprob[self.parent[1:]] + 1e-6).any():
            self._refuse("draft_logprob must be cumulative: no node lies above its parent")
        path = np.flatnonzero(self.accepted)
        if not self.accepted[0] or (self.parent[path[1:]] != path[:-1]).any():
            self._refuse(f"accepted must mark one path from the root, got {path.tolist()}")

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree with its root, N."""
        return self.token.size

    def require(self, spec: RoutingSpec) -> None:
        """Check the values against the target's RoutingSpec.

        Raises:
            ValueError: Experts or tokens are impossible for this target.
        """
        for name in ("token", "emitted"):
            values = getattr(self, name)
            if values.min() < 0 or values.max() >= spec.vocab_size:
                self._refuse(f"{name} must lie in 0 to {spec.vocab_size - 1}, got {values.tolist()}")
        if problem := expert_problem(self.experts, spec):
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"tree of sequence {self.sequence_id!r} at position {self.position!r}: {problem}")
