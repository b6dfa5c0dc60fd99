"""Training a drafter-attached predictor: states of a drafter along traced text, kept in a file, then two matrices.

Target and drafter run over every sequence once. What the drafter has before each token, at every level of a tree
that could have proposed it, goes to a file, and the epochs read that file. On disk, below the cache folder::

    arrays/                # the traces as plain files (`ecospec.train.cache`)
    states/
      states.bin           # float16 [N, D + 1, H], aligned with arrays/tokens.bin
      cache.json

Shapes: N tokens of all sequences, B tokens of a batch, D deepest level, H width of a state, F of what describes a
node, L MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecospec.predictor.attached import Activation, AttachedHeads, DrafterAttachedPredictor
from ecospec.predictor.choices import require_choice
from ecospec.predictor.overlap import topk_overlap_counts
from ecospec.trace_collection.store import TraceStore
from ecospec.train.baselines import baseline_overlaps
from ecospec.train.cache import RowFile, TraceCache, open_cache, require_files, stores_key
from ecospec.train.calibration import TemperatureFit
from ecospec.train.losses import selected_expert_cross_entropy
from ecospec.train.schedule import learning_rate_factor
from ecospec.train.splits import CALIBRATION, SPLITS, TRAINING, VALIDATION, SplitConfig, assign_splits

_WARMUP = 0.03
_BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class AttachedTraining:
    """Options of a training.

    Attributes:
        rank: Rank of the heads.
        activation: What stands between the two matrices.
        depth: Deepest level of draft trees.
        epochs: Passes over the training tokens.
        batch_tokens: Tokens of a batch; each counts at every level.
        learning_rate: Peak of AdamW's.
        weight_decay: Decoupled, of the matrices.
        max_length: Tokens of a sequence that are used, from its start; the drafter's memory grows with its square.
        validation_fraction: Share of groups for validation.
        calibration_fraction: Share of groups for calibration; None: 0.05, if that is any group at all.
        baseline_tokens: Most tokens of a split that the tables are fitted on, or compared on.
        seed: Seed of split, initial weights and order.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    rank: int = 256
    activation: str = Activation.SILU.value
    depth: int = 3
    epochs: int = 10
    batch_tokens: int = 2048
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    max_length: int = 2048
    validation_fraction: float = 0.2
    calibration_fraction: float | None = None
    baseline_tokens: int = 2_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        lows = {
            "rank": 1,
            "depth": 0,
            "epochs": 1,
            "batch_tokens": 1,
            "max_length": 2,
            "baseline_tokens": 1,
            "seed": 0,
        }
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("learning_rate", "validation_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < 1:
            raise ValueError(f"weight_decay must be at least 0 and below 1, got {self.weight_decay}")
        if not 0 <= (self.calibration_fraction or 0.0) < 1 - self.validation_fraction:
            raise ValueError(
                f"calibration_fraction must be at least 0 and leave groups for training beside validation_fraction "
                f"{self.validation_fraction}, got {self.calibration_fraction}"
            )
        require_choice("activation", self.activation, [choice.value for choice in Activation])


@dataclass(frozen=True)
class DrafterView:
    """What training sees of target and drafter; decoding makes it, so that training need not import decoding.

    Attributes:
        fingerprint: ``state_fingerprint`` of the drafter.
        state_sizes: Widths of the two halves of a node's states.
        token_states: int64 ``[...]`` → ``[..., F_token]``.
        text_states: int64 ``[T]`` → ``[D + 1, T, H]``; runs target and drafter.
    """

    fingerprint: str
    state_sizes: tuple[int, int]
    token_states: Callable[[Tensor], Tensor]
    text_states: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StateCache:
    """Traces and the states before their tokens.

    Attributes:
        traces: The sequences, cut to the length that is used.
        states: Rows ``[D + 1, H]``, aligned with the tokens in the files of the traces.
    """

    traces: TraceCache
    states: RowFile

    def sequence(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids int64 ``[T]``, states float16 ``[T, D + 1, H]`` and experts int64 ``[T, L, K]`` of one sequence."""
        length = int(self.traces.lengths[index])
        tokens, experts = self.traces.window(index, 0, length)
        states = self.states.read(int(self.traces.starts[index]), length)
        return (
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(states),
            torch.from_numpy(experts.astype(np.int64)),
        )

    def select(self, keep: Any) -> StateCache:
        """The same files with the chosen sequences, bool ``[S]``."""
        return dataclasses.replace(self, traces=self.traces.select(keep))


def open_states(
    stores: list[TraceStore],
    folder: Path,
    drafter: DrafterView,
    options: AttachedTraining,
    progress: Callable[[int], None] | None = None,
) -> StateCache:
    """The states of all sequences as a file; computed where it is missing or stale.

    Args:
        stores: Stores of one spec (`ecospec.train.arrays.open_stores`).
        folder: Where the files are.
        drafter: Target and drafter.
        options: Deepest level and longest sequence.
        progress: Called with the tokens of every sequence done.

    Raises:
        ValueError: The stores hold no token, or ``folder`` holds something else.
    """
    whole = open_cache(stores, folder / "arrays")
    traces = dataclasses.replace(whole, lengths=np.minimum(whole.lengths, options.max_length))
    shape = (options.depth + 1, drafter.state_sizes[1])
    key = stores_key(stores, drafter.fingerprint, str(shape), str(options.max_length))

    def write(partial: Path) -> None:
        with (partial / "states.bin").open("wb") as handle:
            for index, length in enumerate(traces.lengths.tolist()):
                ids = torch.from_numpy(traces.tokens(index, 0, length).astype(np.int64))
                states = drafter.text_states(ids).transpose(0, 1).to(device="cpu", dtype=torch.float16)
                handle.write(np.ascontiguousarray(states.numpy()).data)
                left = int(whole.lengths[index]) - length  # rows of the tokens that are not used
                handle.write(bytes(2 * left * shape[0] * shape[1]))
                if progress is not None:
                    progress(length)

    require_files(folder / "states", key, write)
    return StateCache(traces, RowFile(folder / "states" / "states.bin", "<f2", shape))


@dataclass(frozen=True)
class _Batch:
    """Nodes at every level: states ``[D + 1, B, F]``, experts ``[D + 1, B, L, K]``, mask bool ``[D + 1, B]``."""

    states: Tensor
    experts: Tensor
    mask: Tensor


def train_attached(
    stores: list[TraceStore],
    folder: Path,
    drafter: DrafterView,
    options: AttachedTraining,
    *,
    device: torch.device | str = "cpu",
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    on_epoch: Callable[[int, float, list[float]], None] | None = None,
) -> DrafterAttachedPredictor:
    """Train the heads, and calibrate them.

    Args:
        stores: Stores of one spec.
        folder: Cache of traces and states.
        drafter: Target and drafter.
        options: Options.
        device: Where to train.
        provenance: Versions, command, seeds.
        progress: See `open_states`.
        on_epoch: Called with the number of the epoch, its mean loss and the validation overlap at every level.

    Returns:
        The predictor. Its metrics are the validation overlap, over all levels and at each, and those of the tables
        fitted on the training split.

    Raises:
        ValueError: An empty split, or a loss that is not finite.
    """
    data = open_states(stores, folder, drafter, options, progress)
    spec = data.traces.spec
    split = SplitConfig(options.validation_fraction, options.calibration_fraction, seed=options.seed)
    codes = assign_splits(data.traces.table(options.seed), split)
    parts = [data.select(codes == code) for code in range(len(SPLITS))]
    torch.manual_seed(options.seed)
    heads = AttachedHeads(spec, sum(drafter.state_sizes), options.rank, options.activation).to(device)
    trainer = _Trainer(heads, drafter, options, device)
    by_level: list[float] = []
    for epoch in range(options.epochs):
        loss = trainer.epoch(parts[TRAINING], epoch)
        by_level = trainer.overlap(parts[VALIDATION])
        if on_epoch is not None:
            on_epoch(epoch, loss, by_level)
    tables = baseline_overlaps(
        *(parts[code].traces.load(options.baseline_tokens) for code in (TRAINING, VALIDATION))
    )
    training = parts[TRAINING].traces
    return DrafterAttachedPredictor.from_heads(
        heads.eval().requires_grad_(requires_grad=False),
        drafter.fingerprint,
        temperature=trainer.temperature(parts[CALIBRATION]),
        options={name: value for name, value in dataclasses.asdict(options).items() if name != "rank"},
        training_data={
            "fingerprint": training.fingerprint(),
            "tokens": training.num_tokens,
            "sequences": len(training.lengths),
            "validation_tokens": parts[VALIDATION].traces.num_tokens,
        },
        metrics={"val_overlap": float(np.mean(by_level))}
        | {f"val_overlap_depth_{level}": value for level, value in enumerate(by_level)}
        | {f"val_overlap_{name}": value for name, value in tables.items()},
        provenance=provenance,
    )


class _Trainer:
    """AdamW over the heads, batch by batch of whole sequences."""

    def __init__(
        self, heads: AttachedHeads, drafter: DrafterView, options: AttachedTraining, device: torch.device | str
    ) -> None:
        self._heads, self._drafter, self._options, self._device = heads, drafter, options, device
        matrices = [heads.down.weight, heads.up.weight]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": [heads.up.bias], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=_BETAS)

    def batches(self, part: StateCache, order: Any = None) -> Iterator[_Batch]:
        """Batches of whole sequences, in ``order`` (indices) or as they stand."""
        indices = range(len(part.traces.lengths)) if order is None else order
        chosen: list[int] = []
        size = 0
        for index in indices:
            length = int(part.traces.lengths[index])
            if chosen and size + length > self._options.batch_tokens:
                yield self._batch(part, chosen)
                chosen, size = [], 0
            chosen.append(int(index))
            size += length
        if chosen:
            yield self._batch(part, chosen)

    def _batch(self, part: StateCache, chosen: list[int]) -> _Batch:
        ids, states, experts = zip(*(part.sequence(index) for index in chosen), strict=True)
        levels = states[0].shape[1]
        tokens = self._drafter.token_states(torch.cat(ids)).to(device=self._device, dtype=torch.float32)
        before = torch.cat(states).to(self._device).float().transpose(0, 1)
        used = torch.cat(experts).to(self._device)
        # Before the first token of a text there is nothing; no tree has its root there.
        counts = torch.cat([torch.arange(len(one)) > 0 for one in ids]).to(self._device)
        return _Batch(
            torch.cat((tokens.expand(levels, -1, -1), before), dim=-1),
            used.expand(levels, -1, -1, -1),
            counts.expand(levels, -1),
        )

    def epoch(self, part: StateCache, number: int) -> float:
        """Train on every sequence once; return the mean loss of the batches."""
        order = np.random.default_rng((self._options.seed, number)).permutation(len(part.traces.lengths))
        total = part.traces.num_tokens
        losses: list[Tensor] = []
        done = 0
        for batch in self.batches(part, order):
            progress = (number + done / total) / self._options.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = self._options.learning_rate * learning_rate_factor(progress, _WARMUP)
            loss = selected_expert_cross_entropy(self._heads(batch.states), batch.experts, batch.mask)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            losses.append(loss.detach())
            done += batch.mask.shape[1]
        mean = float(torch.stack(losses).mean())
        if not np.isfinite(mean):
            raise ValueError(f"the loss is not finite in epoch {number}; start again with a lower --learning-rate")
        return mean

    @torch.no_grad()
    def temperature(self, part: StateCache) -> tuple[float, ...]:
        """The calibrated temperature of every layer; empty without calibration tokens."""
        if not part.traces.num_tokens:
            return ()
        fit = TemperatureFit(self._heads.spec.num_layers)
        for batch in self.batches(part):
            fit.update(self._heads(batch.states).cpu(), batch.experts.cpu(), batch.mask.cpu())
        return tuple(fit.compute().tolist())

    @torch.no_grad()
    def overlap(self, part: StateCache) -> list[float]:
        """Top-K overlap at every level, over all tokens and layers."""
        nodes = 0
        spec = self._heads.spec
        sums = torch.zeros(self._options.depth + 1, dtype=torch.float64)
        for batch in self.batches(part):
            found = topk_overlap_counts(self._heads(batch.states), batch.experts)
            sums += (found * batch.mask[..., None]).sum(dim=(1, 2)).double().cpu()
            nodes += int(batch.mask[0].sum())
        return (sums / max(nodes * spec.num_layers * spec.top_k, 1)).tolist()
