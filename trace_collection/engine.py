"""Running a target and keeping its routing: batched generation, and reading of fixed text.

Sampling noise is one uniform number per (sequence seed, position), so a sequence does not depend on which others
share its batch, beyond rounding.

Shapes: B sequences, P prompt positions (left-padded), L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ecospec.trace_collection.engine_protocol import PendingTraces, ending, trace_of
from ecospec.trace_collection.growing_cache import make_cache
from ecospec.trace_collection.hooks import RecordedRouting, RoutingRecorder
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.records import RoutingTrace

#: Steps between looks at which sequences have ended: each look waits for the device.
CHECK_EVERY = 16
#: Share of ended sequences at which the others move together; moving copies the KV cache.
COMPACT_AT = 0.25


class HostCopy:
    """Recorded tensors on their way to the host: into pinned memory without waiting, where the model runs on a GPU.

    Args:
        routing: Routing of a forward whose copy is started, or whose shape the steps to come have.
        steps: Forwards to make room for; None copies ``routing`` itself.
        rows: Place of each sequence in the batch, ``[b]``, for steps of one token per sequence.
    """

    def __init__(
        self, routing: RecordedRouting, *, steps: int | None = None, rows: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.rows = rows
        self.steps = 0
        self._marker = _Marker(routing.experts.device)
        self._experts = self._allocate(routing.experts, steps)
        self._weights = None if routing.weights is None else self._allocate(routing.weights, steps)
        if steps is None:
            self._marker.set()

    @staticmethod
    def _allocate(tensor: Tensor, steps: int | None) -> Tensor:
        if steps is None:
            return to_host(tensor)
        return torch.empty(steps, *tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def add(self, routing: RecordedRouting) -> None:
        """Start copying the next step; does not wait."""
        self._experts[self.steps].copy_(routing.experts, non_blocking=True)
        if self._weights is not None and routing.weights is not None:
            self._weights[self.steps].copy_(routing.weights, non_blocking=True)
        self._marker.set()
        self.steps += 1

    def wait(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16] | None]:
        """Wait for the copies and return experts and weights, ``[N, L, K]`` or ``[steps, b, L, K]``."""
        self._marker.wait()
        experts = _unsigned(self._experts.numpy())
        weights = None if self._weights is None else self._weights.numpy()
        return (experts, weights) if self.rows is None else (experts[: self.steps], _first(weights, self.steps))


class _Marker:
    """A place in the work queue of a device that can be waited for; on a CPU everything has been done already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Mark the end of what is queued now."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self._event is not None:
            self._event.synchronize()


def to_host(tensor: Tensor) -> Tensor:
    """Start copying a tensor to pinned host memory without waiting; a tensor on the host is returned as it is."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


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

    Attributes:
        uses_host: See `Engine`.
    """

    def __init__(
        self, model: nn.Module, recorder: RoutingRecorder, *, eos_ids: Collection[int], temperature: float
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._eos_ids = sorted(eos_ids)
        self._temperature = temperature
        self._device: torch.device = input_embedding(model).weight.device
        self.uses_host = self._device.type == "cpu"

    def process(self, batch: Sequence[PlannedSequence]) -> list[RoutingTrace]:
        """Run one batch; see `Engine.process`."""
        return self.start(batch)()

    @torch.inference_mode()
    def start(self, batch: Sequence[PlannedSequence]) -> PendingTraces:
        """Queue one batch on the device; see `OverlappingEngine.start`."""
        rows = input_embedding(self._model).num_embeddings
        highest = max(int(sequence.ids.max()) for sequence in batch)
        if highest >= rows:
            raise ValueError(
                f"the tokenizer gives token id {highest}, the target has embeddings for {rows}: they do not belong "
                "together; give the tokenizer that was saved with the target"
            )
        return self._generate(batch) if batch[0].max_new else self._read(batch)

    def _read(self, batch: Sequence[PlannedSequence]) -> PendingTraces:
        """Run fixed texts through the target in one forward; the padding lies behind and cannot be seen."""
        longest = max(sequence.ids.size for sequence in batch)
        ids = np.zeros((len(batch), longest), dtype=np.int64)
        for row, sequence in enumerate(batch):
            ids[row, : sequence.ids.size] = sequence.ids
        output = self._model(input_ids=torch.from_numpy(ids).to(self._device), use_cache=False, logits_to_keep=1)
        broken = to_host(output.logits.isnan().any())  # attention carries a NaN to the last position
        copy = HostCopy(self._recorder.take())

        def finish() -> list[RoutingTrace]:
            arrays = copy.wait()
            self._require_numbers(broken)
            experts, weights = (_batched(array, len(batch)) for array in arrays)
            assert experts is not None
            return [
                trace_of(s, s.ids, experts[row, : s.ids.size], _first(_row(weights, row), s.ids.size), "text")
                for row, s in enumerate(batch)
            ]

        return finish

    def _generate(self, batch: Sequence[PlannedSequence]) -> PendingTraces:
        """Continue prompts until an end-of-sequence token or each sequence's ``max_new``."""
        run = _Generation(batch, self._device)
        steps = max(sequence.max_new for sequence in batch)
        cache = make_cache(self._model, run.width + steps)
        tokens = self._choose(run, self._forward(run, run.prompt, cache), 0)
        prompt = HostCopy(self._recorder.take())
        buffer: HostCopy | None = None
        for step in range(1, steps):
            if step % CHECK_EVERY == 0 and (keep := run.survivors(step, self._eos_ids)) is not None:
                if not keep.numel():
                    break
                cache.batch_select_indices(keep)
                tokens, buffer = tokens[keep], None
            logits = self._forward(run, tokens.unsqueeze(1), cache)
            routing = self._recorder.take()
            if buffer is None:
                buffer = HostCopy(routing, steps=steps - step, rows=run.rows_on_host.copy())
                run.buffers.append(buffer)
            buffer.add(routing)
            tokens = self._choose(run, logits, step)
        generated, broken = to_host(run.generated), to_host(run.broken)
        marker = _Marker(self._device)
        marker.set()

        def finish() -> list[RoutingTrace]:
            marker.wait()
            self._require_numbers(broken)
            return self._collect(run, prompt, generated.numpy())

        return finish

    def _require_numbers(self, broken: Tensor) -> None:
        """Refuse a batch in which NaN appeared: the experts that NaN chooses mean nothing."""
        if broken.item():
            dtype = str(self._model.dtype).removeprefix("torch.")
            raise ValueError(
                f"the target gave NaN instead of logits in {dtype}: its numbers overflow there (then use --dtype "
                "bfloat16 or float32), or its weights are damaged (then fetch them again)"
            )

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
            run.broken |= logits.gather(1, tokens.unsqueeze(1)).isnan().any()  # NaN counts as the largest
        else:
            mass = torch.softmax(logits.float() / self._temperature, dim=-1).double().cumsum(-1)
            run.broken |= mass[:, -1].isnan().any()
            threshold = run.noise[run.rows, step].unsqueeze(1) * mass[:, -1:]
            tokens = torch.searchsorted(mass, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
        run.generated[run.rows, step] = tokens
        return tokens

    def _collect(self, run: _Generation, prompt: HostCopy, generated: npt.NDArray[np.int64]) -> list[RoutingTrace]:
        """Wait for the copies and cut out each sequence's own rows."""
        first_experts, first_weights = (_batched(array, len(run.batch)) for array in prompt.wait())
        assert first_experts is not None
        parts = [(part.rows, *part.wait()) for part in run.buffers]
        traces = []
        for row, sequence in enumerate(run.batch):
            length, reason = ending(generated[row, : sequence.max_new], self._eos_ids)
            tokens = np.concatenate([sequence.ids, generated[row, :length].astype(np.int32)])
            start, processed = run.width - sequence.ids.size, tokens.size - 1
            later = [(part, int(place[0])) for part in parts if (place := np.flatnonzero(part[0] == row)).size]
            experts = [first_experts[row, start:], *(part[1][:, place] for part, place in later)]
            weights = None
            if first_weights is not None:
                rows = [part[2][:, place] for part, place in later if part[2] is not None]
                weights = np.concatenate([first_weights[row, start:], *rows])[:processed]
            traces.append(trace_of(sequence, tokens, np.concatenate(experts)[:processed], weights, reason))
        return traces


class _Generation:
    """State of one batch that is being generated.

    Attributes:
        prompt: int64 ``[B, P]``, left-padded.
        mask: int64 ``[B, P + max_new]``, 0 on padding; None without any padding.
        generated: int64 ``[B, max_new]``, chosen tokens; entries behind an end are meaningless.
        noise: float64 ``[B, max_new]``, uniform numbers of each sequence.
        rows: int64 ``[b]`` on the device, running sequences.
        broken: bool scalar on the device, whether NaN has appeared.
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
        self.broken = torch.zeros((), dtype=torch.bool, device=device)
        self.buffers: list[HostCopy] = []

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


def _batched(array: npt.NDArray[Any] | None, size: int) -> npt.NDArray[Any] | None:
    """``[B * T, L, K]`` as ``[B, T, L, K]``."""
    return None if array is None else array.reshape(size, -1, *array.shape[1:])


def _row(array: npt.NDArray[Any] | None, row: int) -> npt.NDArray[Any] | None:
    return None if array is None else array[row]


def _first(array: npt.NDArray[Any] | None, count: int) -> npt.NDArray[Any] | None:
    return None if array is None else array[:count]


def _unsigned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids above 256 experts travel as int16, because torch knows little of uint16."""
    return array.view(np.uint16) if array.dtype == np.int16 else array
