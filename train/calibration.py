"""Temperature calibration, one temperature for each MoE layer, fitted while batches stream by.

Scores divided by a temperature T keep their order; T is chosen where the cross-entropy of the selected experts on
the calibration split is least (temperature scaling, Guo et al. 2017, arXiv 1706.04599). In ``b = 1/T`` that loss is
convex, and its slope is a sum over tokens: ``Σ (E_softmax(b·s)[s] − mean_k s[e_k])``. The slopes on a fixed grid of
temperatures say between which two the minimum lies, need no stored scores, and add up over batches and processes.

Shapes: B batch, T tokens, L MoE layers, E experts, K top-k, G grid points.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from ecospec.predictor.calibration import calibration_counts, marginal_probabilities

#: From 1/8 to 8; beyond, scores carry next to nothing. Neighbours differ by 9 %: a line between the slopes
#: there is off by less than 0.1 % of the temperature.
_GRID = tuple(2.0 ** (point / 8) for point in range(-24, 25))
_BINS = 15


class TemperatureFit(Metric):
    """Temperatures that minimise the cross-entropy of the selected experts, one for each layer.

    Args:
        num_layers: L.
    """

    full_state_update = False
    slopes: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.add_state("slopes", torch.zeros(len(_GRID), num_layers, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, experts: Tensor, mask: Tensor) -> None:
        """Add one batch.

        Args:
            scores: Float ``[B, T, L, E]``, not calibrated.
            experts: Integer ``[B, T, L, K]``.
            mask: Bool ``[B, T]``, true where a token counts.
        """
        wide = scores.float()
        chosen = wide.gather(-1, experts.long()).mean(dim=-1)
        for point, temperature in enumerate(_GRID):
            expected = ((wide / temperature).softmax(dim=-1) * wide).sum(dim=-1)
            self.slopes[point] += ((expected - chosen) * mask.unsqueeze(-1)).sum(dim=(0, 1), dtype=torch.float64)

    def compute(self) -> Tensor:
        """Temperatures, float32 ``[L]``; 1 where nothing was counted, or the scores of a layer are all equal.

        The minimum is where the slope passes 0, on a line in log T between neighbours; outside the grid it becomes
        the nearest end.
        """
        slopes = self.slopes
        log_grid = torch.tensor(_GRID, dtype=slopes.dtype, device=slopes.device).log()
        # Rows ascend in T, so slopes fall: the minimum lies behind the last positive one.
        low = ((slopes > 0).sum(dim=0) - 1).clamp(0, len(_GRID) - 2)
        at_low, at_high = (slopes.gather(0, (low + step).unsqueeze(0))[0] for step in (0, 1))
        share = (at_low / (at_low - at_high)).clamp(0, 1)
        fitted = (log_grid[low] + share * (log_grid[low + 1] - log_grid[low])).exp()
        return torch.where(slopes.any(dim=0), fitted, 1.0).float()


class CalibrationError(Metric):
    """Expected calibration error of the probabilities that an expert is used.

    Args:
        top_k: K.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.add_state("counts", torch.zeros(_BINS, 3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, experts: Tensor, mask: Tensor) -> None:
        """Count one batch; arguments as `TemperatureFit.update`."""
        used = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, experts.long(), value=True)
        self.counts += calibration_counts(marginal_probabilities(scores, self.top_k)[mask], used[mask], _BINS)

    def compute(self) -> Tensor:
        """The error, float64, 0 to 1."""
        return (self.counts[:, 1] - self.counts[:, 2]).abs().sum() / self.counts[:, 0].sum().clamp_min(1)
