"""Running a target and keeping its routing: batched generation, and reading of fixed text.

Sampling noise is one uniform number per (sequence seed, position), so a sequence does not depend on which others
share its batch, beyond rounding.

Shapes: B sequences, P prompt positions (left-padded), L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ecospec.trace_collection.growing_cache import make_cache
from ecospec.trace_collection.hooks import RecordedRouting, RoutingRecorder
from ecospec.trace_collection.plan import PlannedSequence
from ecospec.trace_collection.records import FinishReason, RoutingTrace

#: Steps between looks at which sequences have ended: each look waits for the device.
CHECK_EVERY = 16
#: Share of ended sequences at which the others move together; moving copies the KV cache.
COMPACT_AT = 0.25


@dataclasses.dataclass
class _HostRows:
    """Routing of consecutive steps on its way to the host, for sequences that keep their places.

    Attributes:
        rows: Place of each sequence in the batch, ``[b]``.
        experts: Host ``[steps, b, L, K]``, pinned where the model runs on a GPU; filled up to ``steps``.
        weights: Likewise, or None.
        steps: Steps recorded.
    """

    rows: npt.NDArray[np.int64]
    experts: Tensor
    weights: Tensor | None
    steps: int = 0

    @classmethod
    def like(cls, routing: RecordedRouting, rows: npt.NDArray[np.int64], steps: int) -> _HostRows:
        """Allocate for ``steps`` forwards of one token per sequence."""

        def allocate(sample: Tensor) -> Tensor:
            shape = (steps, len(rows), *sample.shape[1:])
            return torch.empty(shape, dtype=sample.dtype, pin_memory=sample.is_cuda)

        weights = None if routing.weights is None else allocate(routing.weights)
        return cls(rows, allocate(routing.experts), weights)

    def add(self, routing: RecordedRouting) -> None:
        """Start copying one step to the host; does not wait."""
        self.experts[self.steps].copy_(routing.experts, non_blocking=True)
        if self.weights is not None and routing.weights is not None:
            self.weights[self.steps].copy_(routing.weights, non_blocking=True)
        self.steps += 1


def input_embedding(model: nn.Module) -> nn.Embedding:
    """Token embedding of a transformers model."""
    get: Callable[[], nn.Embedding] = model.get_input_embeddings  # type: ignore[assignment]
    return get()


class TargetEngine:
    """A target ready to be traced.

    Args:
        model: transformers causal language model in eval mode.
        recorder: Open recorder on it.
        eos_ids: Tokens that end a generation.
        temperature: Sampling temperature, 0 for greedy.
    """

    def __init__(
        self, model: nn.Module, recorder: RoutingRecorder, *, eos_ids: Collection[int], temperature: float
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._eos_ids = sorted(eos_ids)
        self._temperature = temperature
        self._device: torch.device = input_embedding(model).weight.device

    @torch.inference_mode()
    def read(self, batch: Sequence[PlannedSequence]) -> list[RoutingTrace]:
        """Run fixed texts through the target in one forward; the padding lies behind and cannot be seen."""
        longest = max(sequence.ids.size for sequence in batch)
        ids = np.zeros((len(batch), longest), dtype=np.int64)
        for row, sequence in enumerate(batch):
            ids[row, : sequence.ids.size] = sequence.ids
        self._model(input_ids=torch.from_numpy(ids).to(self._device), use_cache=False, logits_to_keep=1)
        experts, weights = _to_numpy(self._recorder.take(), (len(batch), longest))
        traces = []
        for row, sequence in enumerate(batch):
            size = sequence.ids.size
            kept = None if weights is None else weights[row, :size]
            traces.append(_trace(sequence, sequence.ids, experts[row, :size], kept, "text"))
        return traces

    @torch.inference_mode()
    def generate(self, batch: Sequence[PlannedSequence]) -> list[RoutingTrace]:
        """Continue prompts until an end-of-sequence token or each sequence's ``max_new``."""
        run = _Generation(batch, self._device)
        steps = max(sequence.max_new for sequence in batch)
        cache = make_cache(self._model, run.width + steps)
        tokens = self._choose(run, self._forward(run, run.prompt, cache), 0)
        prompt_rows = self._recorder.take()
        buffer: _HostRows | None = None
        for step in range(1, steps):
            if step % CHECK_EVERY == 0 and (keep := run.survivors(step, self._eos_ids)) is not None:
                if not keep.numel():
                    break
                cache.batch_select_indices(keep)
                tokens, buffer = tokens[keep], None
            logits = self._forward(run, tokens.unsqueeze(1), cache)
            routing = self._recorder.take()
            if buffer is None:
                buffer = _HostRows.like(routing, run.rows_on_host.copy(), steps - step)
                run.buffers.append(buffer)
            buffer.add(routing)
            tokens = self._choose(run, logits, step)
        return self._collect(run, prompt_rows)

    def _forward(self, run: _Generation, ids: Tensor, cache: Any) -> Tensor:
        """Last-position logits ``[b, V]``; masks and positions are only passed where there is padding."""
        padding: dict[str, Tensor] = {}
        if run.mask is not None:
            past = cache.get_seq_length()
            padding["attention_mask"] = run.mask[:, : past + ids.shape[1]]
            positions = padding["attention_mask"].cumsum(1) - 1
            padding["position_ids"] = positions[:, -ids.shape[1] :].clamp(min=0)
        output = self._model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **padding)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _choose(self, run: _Generation, logits: Tensor, step: int) -> Tensor:
        """Choose and note the next token of each running sequence, int64 ``[b]``."""
        if self._temperature == 0:
            tokens = logits.argmax(-1)
        else:
            mass = torch.softmax(logits.float() / self._temperature, dim=-1).double().cumsum(-1)
            threshold = run.noise[run.rows, step].unsqueeze(1) * mass[:, -1:]
            tokens = torch.searchsorted(mass, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
        run.generated[run.rows, step] = tokens
        return tokens

    def _collect(self, run: _Generation, prompt_rows: RecordedRouting) -> list[RoutingTrace]:
        """Wait for the copies and cut out each sequence's own rows."""
        first_experts, first_weights = _to_numpy(prompt_rows, (len(run.batch), run.width))
        if prompt_rows.experts.is_cuda:
            torch.cuda.synchronize(prompt_rows.experts.device)
        generated = run.generated.cpu().numpy()
        traces = []
        for row, sequence in enumerate(run.batch):
            length, reason = _ending(generated[row, : sequence.max_new], self._eos_ids)
            tokens = np.concatenate([sequence.ids, generated[row, :length].astype(np.int32)])
            steps = [(part, np.flatnonzero(part.rows == row)) for part in run.buffers]
            present = [(part, int(place[0])) for part, place in steps if place.size]
            start, processed = run.width - sequence.ids.size, tokens.size - 1
            experts = _join(first_experts[row, start:], [p.experts[: p.steps, s] for p, s in present], processed)
            weights = None
            if first_weights is not None:
                later = [p.weights[: p.steps, s] for p, s in present if p.weights is not None]
                weights = _join(first_weights[row, start:], later, processed)
            traces.append(_trace(sequence, tokens, experts, weights, reason))
        return traces


class _Generation:
    """State of one batch that is being generated.

    Attributes:
        prompt: int64 ``[B, P]``, left-padded.
        mask: int64 ``[B, P + max_new]``, 0 on padding; None without any padding.
        generated: int64 ``[B, max_new]``, chosen tokens; entries behind an end are meaningless.
        noise: float64 ``[B, max_new]``, uniform numbers of each sequence.
        rows: int64 ``[b]`` on the device, running sequences.
    """

    def __init__(self, batch: Sequence[PlannedSequence], device: torch.device) -> None:
        self.batch = batch
        self.width = max(sequence.ids.size for sequence in batch)
        steps = max(sequence.max_new for sequence in batch)
        prompt = np.zeros((len(batch), self.width), dtype=np.int64)
        mask = np.ones((len(batch), self.width + steps), dtype=np.int64)
        for row, sequence in enumerate(batch):
            prompt[row, self.width - sequence.ids.size :] = sequence.ids
            mask[row, : self.width - sequence.ids.size] = 0
        self.prompt = torch.from_numpy(prompt).to(device)
        self.mask = None if mask.all() else torch.from_numpy(mask).to(device)
        self.generated = torch.zeros(len(batch), steps, dtype=torch.int64, device=device)
        noise = [np.random.Generator(np.random.Philox(sequence.seed)).random(steps) for sequence in batch]
        self.noise = torch.from_numpy(np.stack(noise)).to(device)
        self._max_new = np.array([sequence.max_new for sequence in batch])
        self.rows_on_host = np.arange(len(batch))
        self.rows = torch.from_numpy(self.rows_on_host).to(device)
        self.buffers: list[_HostRows] = []

    def survivors(self, step: int, eos_ids: Sequence[int]) -> Tensor | None:
        """Return the places of those still running, if so many ended that moving them pays; waits for the device.

        Args:
            step: Tokens chosen so far.
            eos_ids: Tokens that end a generation.
        """
        chosen = self.generated[self.rows, :step].cpu().numpy()
        ended = np.isin(chosen, eos_ids).any(axis=1) | (self._max_new[self.rows_on_host] <= step)
        if ended.mean() < COMPACT_AT:
            return None
        keep = np.flatnonzero(~ended)
        places = torch.from_numpy(keep).to(self.rows.device)
        self.rows_on_host, self.rows = self.rows_on_host[keep], self.rows[places]
        if self.mask is not None:
            self.mask = self.mask[places]
        return places


def _ending(tokens: npt.NDArray[np.int64], eos_ids: Sequence[int]) -> tuple[int, FinishReason]:
    """Tokens that belong to the sequence, its end included, and why it ended."""
    ends = np.flatnonzero(np.isin(tokens, eos_ids))
    return (int(ends[0]) + 1, "eos") if ends.size else (tokens.size, "length")


def _to_numpy(
    routing: RecordedRouting, shape: tuple[int, int]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16] | None]:
    """Arrays ``[*shape, L, K]`` on the host; waits for the device."""
    experts = _unsigned(routing.experts.cpu().numpy()).reshape(*shape, *routing.experts.shape[1:])
    weights = None
    if routing.weights is not None:
        weights = routing.weights.cpu().numpy().reshape(*shape, *routing.weights.shape[1:])
    return experts, weights


def _join(first: npt.NDArray[Any], later: Sequence[Tensor], processed: int) -> npt.NDArray[Any]:
    """Rows of the prompt, then of the steps, cut to what belongs to the sequence."""
    return np.concatenate([first, *(_unsigned(part.numpy()) for part in later)])[:processed]


def _unsigned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids above 256 experts travel as int16, because torch knows little of uint16."""
    return array.view(np.uint16) if array.dtype == np.int16 else array


def _trace(
    sequence: PlannedSequence,
    tokens: npt.NDArray[np.int32],
    experts: npt.NDArray[Any],
    weights: npt.NDArray[np.float16] | None,
    reason: FinishReason,
) -> RoutingTrace:
    return RoutingTrace(
        sequence_id=sequence.sequence_id,
        group_id=sequence.prompt.group_id,
        dataset=sequence.prompt.dataset,
        category=sequence.prompt.category,
        token_ids=tokens,
        prompt_length=sequence.ids.size,
        origin="teacher_forced" if reason == "text" else "generated",
        experts=experts,
        weights=weights,
        finish_reason=reason,
    )
