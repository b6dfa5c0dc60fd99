"""What an overlap report counts while it streams through traces, in memory that does not grow with their length.

Per (group, dataset) and predictor it keeps sums only: hits per layer and rank, exact sets per layer, hits per
segment and position range. Everything a table needs, intervals by group included, is a sum of these.

Legend: T tokens, L MoE layers, E experts, K top-k, R ranks k', S segments, P position ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ecospec.eval.metrics import hits_at_ranks, membership, union_sizes
from ecospec.predictor.calibration import calibration_counts, marginal_probabilities
from ecospec.predictor.routing_spec import RoutingSpec

#: Where a token stands: in the prompt, in what the target generated, or in a fixed text no model wrote.
SEGMENTS = ("prompt", "generated", "text")
#: First position of each range; the last range is open.
POSITION_STARTS = (0, 16, 64, 256, 1024, 4096)
POSITION_LABELS = ("0–15", "16–63", "64–255", "256–1023", "1024–4095", "4096+")
#: Window lengths of the union error, in tokens; 4 is the default budget of a draft tree.
WINDOWS = (2, 4, 8)
BINS = 15

Counts = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What the counts need to know of a sequence besides its tokens.

    Attributes:
        group_id: Group the bootstrap resamples.
        dataset: Name of its dataset.
        prompt_length: Tokens of the prompt.
        origin: ``"generated"`` or ``"teacher_forced"``.
    """

    group_id: str
    dataset: str
    prompt_length: int
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence is counted: its row, and the cell of every token, int64 ``[T]``."""

    row: int
    cells: Counts


def ranks_for(spec: RoutingSpec) -> tuple[int, ...]:
    """Ranks k' of the recall: K, 1.5 K, 2 K and 4 K, as far as there are experts."""
    top_k = spec.top_k
    return tuple(
        sorted({min(rank, spec.num_experts) for rank in (top_k, (3 * top_k + 1) // 2, 2 * top_k, 4 * top_k)})
    )


class PredictorCounts:
    """Sums of one predictor.

    Attributes:
        layer_hits: One int64 ``[R + 1, L]`` per row (see `OverlapCounts.rows`): true experts among the first k'
            predicted ones, for every rank; last entry: number of exact sets.
        cell_hits: One int64 ``[S, P]`` per row: hits at K, summed over layers.
        unions: int64 ``[len(WINDOWS), 5]``: windows × layers counted, sums of the predicted union, of the true
            union, of their intersection, of |predicted - true|.
        calibration: float64 ``[BINS, 3]``, see `calibration_counts`.
        predicted: int64 ``[L, E]``, how often each expert was predicted.
        ranks_only: Whether its scores only order the K best experts, so that neither calibration nor hits beyond
            rank K mean anything.
    """

    def __init__(self, spec: RoutingSpec, *, ranks_only: bool = False) -> None:
        self.ranks_only = ranks_only
        self.layer_hits: list[Counts] = []
        self.cell_hits: list[Counts] = []
        self.unions = torch.zeros(len(WINDOWS), 5, dtype=torch.int64)
        self.calibration = torch.zeros(BINS, 3, dtype=torch.float64)
        self.predicted = torch.zeros(spec.num_layers, spec.num_experts, dtype=torch.int64)


class OverlapCounts:
    """Streaming sums of several predictors over the same tokens.

    Args:
        spec: The target's routing.
        names: Names of the predictors.
        ranks_only: Those of them whose scores only order the K best experts.

    Attributes:
        rows: Row number of each (group, dataset).
        tokens: One int64 ``[S, P]`` per row: tokens counted.
        used: int64 ``[L, E]``, how often each expert was used.
        true_unions: int64 ``[len(WINDOWS), 2]``: windows × layers, sum of true union sizes.
        predictors: Sums by predictor name.
    """

    def __init__(self, spec: RoutingSpec, names: Sequence[str], ranks_only: AbstractSet[str] = frozenset()) -> None:
        self.spec = spec
        self.ranks = ranks_for(spec)
        self.rows: dict[tuple[str, str], int] = {}
        self.tokens: list[Counts] = []
        self.sequences = 0
        self.used = torch.zeros(spec.num_layers, spec.num_experts, dtype=torch.int64)
        self.true_unions = torch.zeros(len(WINDOWS), 2, dtype=torch.int64)
        self.predictors = {name: PredictorCounts(spec, ranks_only=name in ranks_only) for name in names}

    def add(self, info: SequenceInfo, experts: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Count one sequence.

        Args:
            info: Where it belongs.
            experts: Integer ``[T, L, K]``, the experts the target used.
            scores: Predictor name → float ``[T, L, E]``; every predictor of the constructor.

        Raises:
            ValueError: A shape does not fit the spec or a predictor has no scores.
        """
        shape = (experts.shape[0], self.spec.num_layers, self.spec.top_k)
        if experts.shape != shape:
            raise ValueError(f"experts have shape {tuple(experts.shape)}, the spec asks for {shape}")
        if not experts.shape[0]:
            return
        place = _Place(self._row(info), _cells(info, experts.shape[0]))
        size = len(SEGMENTS) * len(POSITION_STARTS)
        self.tokens[place.row] += np.bincount(place.cells, minlength=size).reshape(len(SEGMENTS), -1)
        self.sequences += 1
        experts = experts.long()
        true_sets = membership(experts, self.spec.num_experts)
        self.used += true_sets.sum(0).cpu()
        for index, window in enumerate(WINDOWS):
            true = union_sizes(true_sets, true_sets, window)[1]
            self.true_unions[index] += torch.tensor([true.numel(), int(true.sum())])
        for name, counts in self.predictors.items():
            found = scores.get(name)
            wanted = (*experts.shape[:2], self.spec.num_experts)
            if found is None or found.shape != wanted:
                got = None if found is None else tuple(found.shape)
                raise ValueError(f"scores of predictor {name!r} have shape {got}, expected {wanted}")
            ranked = found.topk(self.ranks[-1], dim=-1).indices
            self._add_hits(counts, place, experts, ranked)
            self._add_scores(counts, true_sets, ranked, found)

    def _row(self, info: SequenceInfo) -> int:
        key = (info.group_id, info.dataset)
        if key not in self.rows:
            self.rows[key] = len(self.rows)
            cells = (len(SEGMENTS), len(POSITION_STARTS))
            self.tokens.append(np.zeros(cells, dtype=np.int64))
            for counts in self.predictors.values():
                counts.layer_hits.append(np.zeros((len(self.ranks) + 1, self.spec.num_layers), dtype=np.int64))
                counts.cell_hits.append(np.zeros(cells, dtype=np.int64))
        return self.rows[key]

    def _add_scores(self, counts: PredictorCounts, true_sets: Tensor, ranked: Tensor, scores: Tensor) -> None:
        """Add what is summed over all rows: unions, calibration, predicted experts."""
        top_k = self.spec.top_k
        predicted_sets = membership(ranked[..., :top_k], self.spec.num_experts)
        counts.predicted += predicted_sets.sum(0).cpu()
        for index, window in enumerate(WINDOWS):
            predicted, true, common = union_sizes(predicted_sets, true_sets, window)
            sums = [predicted.sum(), true.sum(), common.sum(), (predicted - true).abs().sum()]
            counts.unions[index] += torch.stack([torch.tensor(predicted.numel()), *(s.cpu() for s in sums)])
        if counts.ranks_only:
            return
        counts.calibration += calibration_counts(marginal_probabilities(scores, top_k), true_sets, BINS).cpu()

    def _add_hits(self, counts: PredictorCounts, place: _Place, experts: Tensor, ranked: Tensor) -> None:
        """Add what is kept per row: hits per rank and layer, hits per segment and position."""
        hits = hits_at_ranks(ranked, experts, self.ranks)
        at_k = hits[..., self.ranks.index(self.spec.top_k)]
        exact = (at_k == self.spec.top_k).sum(0, keepdim=True)
        counts.layer_hits[place.row] += torch.cat([hits.sum(0).transpose(0, 1), exact]).cpu().numpy()
        size = len(SEGMENTS) * len(POSITION_STARTS)
        summed = np.bincount(place.cells, weights=at_k.sum(1).cpu().numpy(), minlength=size)
        counts.cell_hits[place.row] += summed.astype(np.int64).reshape(len(SEGMENTS), -1)

    @property
    def total_tokens(self) -> int:
        """Tokens counted."""
        return int(sum(int(cells.sum()) for cells in self.tokens))


def _cells(info: SequenceInfo, length: int) -> Counts:
    """Flat (segment, position range) index of every token, int64 ``[T]``."""
    positions = np.arange(length)
    ranges = np.searchsorted(np.asarray(POSITION_STARTS), positions, side="right") - 1
    if info.origin == "generated":
        segments = np.where(positions < info.prompt_length, SEGMENTS.index("prompt"), SEGMENTS.index("generated"))
    else:
        segments = np.full(length, SEGMENTS.index("text"))
    return (segments * len(POSITION_STARTS) + ranges).astype(np.int64)
