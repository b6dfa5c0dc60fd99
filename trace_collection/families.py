"""Which MoE families of the installed transformers are supported, found out by building and running each.

``python -m ecospec.trace_collection.families > docs/families.md`` writes the table; the tests check the same
findings. Each family's tiny random model (`ecospec.trace_collection.tiny_targets`) runs a left-padded batch while
the recorder and hooks that share no code with it watch:

- *ids*: the recorder's sets equal what the experts were called with (or, where they show no index, the entries of
  the router's scores that are not zero);
- *weights*: with the weights of every expert that was not chosen set to NaN, a finite output proves that no other
  expert was read, so the cost of a forward follows the union of the experts. A NaN means that the family computes
  all experts for every token, and the union costs nothing extra.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecospec.predictor.family_notes import note_of, refusal
from ecospec.trace_collection.discovery import MoELayer, find_decoder
from ecospec.trace_collection.hooks import RoutingRecorder
from ecospec.trace_collection.tiny_targets import (
    EXPERTS,
    LAYERS,
    TOP_K,
    VOCAB,
    moe_families,
    tiny_config,
    tiny_model,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What building and running a family showed.

    Attributes:
        family: Its ``model_type``.
        status: ``supported``, ``refused``, ``no MoE`` or ``not built``.
        reason: Why, where it is not supported.
        layers: Decoder layer numbers of the MoE layers of the tiny model.
        num_experts: E of the tiny model.
        top_k: K that was recorded.
        router: Class name of the router.
        boundary: Where the recorder read the ids: ``router``, ``experts`` or ``topk``.
        rows: Rows recorded per layer, of a left-padded batch of `TOKENS` tokens.
        witness: What the ids were held against: arguments of the ``experts``, ``top-k`` calls, or ``scores``.
        agrees: Whether they are the same sets in every layer and row.
        executed: Whether NaN in a chosen expert of each layer reaches the output.
        sparse: Whether NaN in every expert that was not chosen leaves the output finite.
    """

    family: str
    status: str
    reason: str = ""
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    router: str = ""
    boundary: str = ""
    rows: int = 0
    witness: str = ""
    agrees: bool = False
    executed: bool = False
    sparse: bool = False


#: Tokens of the batch that is recorded, padding included: two sequences of nine.
TOKENS = 18


def examine(family: str) -> Finding:
    """Build a tiny model of a family, record it and hold the record against independent witnesses.

    Args:
        family: ``model_type`` as registered with transformers.

    Raises:
        Exception: The family is neither refused nor known to be no MoE, and cannot be built or run: unknown to this
            version, and untested.
    """
    note = note_of(family)
    if note.no_moe:
        return Finding(family, "no MoE", note.no_moe)
    if note.refused and note.refused_if is None:
        return Finding(family, "refused", note.refused)
    if reason := refusal(tiny_config(family)):
        return Finding(family, "refused", reason)
    try:
        model = tiny_model(family)
    except ImportError as error:
        return Finding(family, "not built", str(error).strip().splitlines()[0])
    return examine_model(family, model)


def examine_model(family: str, model: nn.Module) -> Finding:
    """Record a tiny model and hold the record against independent witnesses, see `examine`."""
    owner, layers = find_decoder(model)
    target = owner if note_of(family).decoder_only else model
    ids = torch.randint(3, VOCAB - 3, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding: those rows are computed, and recorded
    with torch.no_grad(), RoutingRecorder(model) as recorder, _watch(layers) as seen, _top_k_calls() as calls:
        target(input_ids=ids, attention_mask=mask)
        recorded, boundary = recorder.last_experts, recorder.source
    if boundary == "experts":
        calls = [call for call in calls if call.shape == recorded[:, 0].shape]
        witness, agrees = "top-k", _same_sets(recorded, calls)
    else:
        witness, agrees = _compare(recorded, seen)
    executed, sparse = _poison(target, model, layers, ids[:1, :2])
    return Finding(
        family,
        "supported",
        layers=tuple(layer.layer_index for layer in layers),
        num_experts=layers[0].num_experts,
        top_k=recorded.shape[-1],
        router=type(layers[0].router).__name__,
        boundary=boundary,
        rows=recorded.shape[0],
        witness=witness,
        agrees=agrees,
        executed=executed,
        sparse=sparse,
    )


@dataclasses.dataclass(slots=True)
class _Seen:
    """What one layer's modules showed: arguments of its experts, returns of its router."""

    experts: list[Tensor]
    scores: list[Tensor]


@contextlib.contextmanager
def _watch(layers: Sequence[MoELayer]) -> Iterator[list[_Seen]]:
    """Note integer arguments of experts modules and score matrices that routers return."""
    seen = [_Seen([], []) for _ in layers]
    handles = []
    for slot, layer in enumerate(layers):

        def before(_module: nn.Module, args: Any, kwargs: Any, slot: int = slot) -> None:
            values = [*args, *kwargs.values()]
            seen[slot].experts += [v.clone() for v in values if torch.is_tensor(v) and not v.is_floating_point()]

        def after(_module: nn.Module, _args: Any, output: Any, slot: int = slot) -> None:
            seen[slot].scores += [output[0].clone()] if isinstance(output, tuple) else []

        handles.append(layer.experts.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.router.register_forward_hook(after))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _top_k_calls() -> Iterator[list[Tensor]]:
    """Note the index of every call of ``torch.topk``."""
    calls: list[Tensor] = []
    original = torch.topk

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(result[1])
        return result

    torch.topk = noting
    try:
        yield calls
    finally:
        torch.topk = original


def _same_sets(recorded: Tensor, seen: Sequence[Tensor]) -> bool:
    """Whether the recorded sets ``[N, L, K]`` are those of an index ``[N, K]`` per layer."""
    return len(seen) == recorded.shape[1] and all(
        [set(row) for row in index.tolist()] == [set(row) for row in recorded[:, slot].tolist()]
        for slot, index in enumerate(seen)
    )


def _compare(recorded: Tensor, seen: Sequence[_Seen]) -> tuple[str, bool]:
    """Name of the witness, and whether the recorded sets ``[N, L, K]`` equal what it saw."""
    top_k = recorded.shape[-1]
    if all(layer.experts for layer in seen):
        index = [torch.cat([part.reshape(-1, top_k) for part in layer.experts]) for layer in seen]
        return "experts", _same_sets(recorded, index)
    chosen = [torch.cat(layer.scores) != 0 for layer in seen]
    return "scores", all(
        [set(row.nonzero().flatten().tolist()) for row in chosen[slot]]
        == [set(row) for row in recorded[:, slot].tolist()]
        for slot in range(len(seen))
    )


def _poison(target: nn.Module, model: nn.Module, layers: Sequence[MoELayer], ids: Tensor) -> tuple[bool, bool]:
    """Whether NaN in a chosen expert of each layer shows in the output, and NaN in all others does not."""
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        target(input_ids=ids)
        union = [set(recorder.last_experts[:, slot].flatten().tolist()) for slot in range(len(layers))]
    executed = all(
        _is_nan(target, ids, [(layer, {min(chosen)})]) for layer, chosen in zip(layers, union, strict=True)
    )
    others = [(layer, set(range(layer.num_experts)) - chosen) for layer, chosen in zip(layers, union, strict=True)]
    return executed, not _is_nan(target, ids, others)


def _is_nan(target: nn.Module, ids: Tensor, poisoned: Sequence[tuple[MoELayer, set[int]]]) -> bool:
    """Whether the output of a forward holds NaN while some experts' weights are NaN."""
    saved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for layer, experts in poisoned:
            for tensor, slices in _slices(layer, experts):
                saved.append((tensor, tensor.clone()))
                for part in slices:
                    part.fill_(torch.nan)
        output = target(input_ids=ids)
        for tensor, before in saved:
            tensor.copy_(before)
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return bool(values.isnan().any())


def _slices(layer: MoELayer, experts: set[int]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each weight of an experts module with its slices of the given experts, whatever the layout."""
    if isinstance(layer.experts, nn.ModuleList):
        for expert in sorted(experts):
            for weight in layer.experts[expert].parameters():
                yield weight, [weight]
        return
    for tensor in layer.experts.parameters():
        if tensor.ndim >= 2 and tensor.shape[0] % layer.num_experts == 0:
            per_expert = tensor.view(layer.num_experts, -1)  # DBRX keeps them in one matrix
            yield tensor, [per_expert[expert] for expert in sorted(experts)]


_HEADER = """# MoE families

Written by `python -m ecospec.trace_collection.families > docs/families.md` with transformers {version}; a test
holds this page against what the code finds. {total} of its model types that generate text speak of experts;
{supported} are supported.

Each supported family was built as a tiny random model from its own configuration class ({experts} experts, top
{top_k}, up to {layers} layers, one of each kind) and run on a CPU in float32 with a left-padded batch: the recorded
ids equal those of the witness in every row and layer, and NaN in the weights showed which experts a forward reads.
Fingerprints from saved files equal those of the model in memory. Real checkpoints, quantised experts and several
GPUs were not part of this; `tests/unit/test_hooks_deployed.py` has stand-ins.

* **recorded at**: where `RoutingRecorder(source="auto")` reads the ids: what the router returns, what the experts
  are called with, or the top-k call inside the block.
* **witness**: what they were held against: the arguments of the experts; where those are what was recorded, the
  top-k calls of the forward; where there are none, the entries of the router's scores that are not zero.
* **union cost**: *yes*: only the chosen experts are read, so the cost of a forward follows their union. *no*: every
  expert is computed for every token, so choosing candidates by their experts saves nothing.

"""

_PLACES = {"router": "router", "experts": "experts", "topk": "top-k call"}


def render(findings: Sequence[Finding], version: str) -> str:
    """Return the page as Markdown.

    Args:
        findings: One per family.
        version: Of transformers.
    """
    supported = [finding for finding in findings if finding.status == "supported"]
    lines = [
        _HEADER.format(
            version=version,
            total=len(findings),
            supported=len(supported),
            experts=EXPERTS,
            top_k=TOP_K,
            layers=LAYERS,
        ),
        "## Supported\n",
        "| family (`model_type`) | router | MoE layers of the tiny model | recorded at | witness | union cost |",
        "|---|---|---|---|---|---|",
    ]
    for item in supported:
        layers = ", ".join(map(str, item.layers))
        union = "yes" if item.sparse else "**no**: all experts are computed"
        place = _PLACES[item.boundary]
        lines.append(f"| `{item.family}` | `{item.router}` | {layers} | {place} | {item.witness} | {union} |")
    for status, title in (("refused", "Refused"), ("not built", "Not built here, untested"), ("no MoE", "No MoE")):
        rest = [item for item in findings if item.status == status]
        if rest:
            lines += [f"\n## {title}\n", "| family (`model_type`) | reason |", "|---|---|"]
            lines += [f"| `{item.family}` | {item.reason} |" for item in rest]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examine every family and write the page to standard output."""
    import transformers  # noqa: PLC0415 - importing this module needs no transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    findings = [examine(family) for family in moe_families()]
    sys.stdout.write(render(findings, transformers.__version__))


if __name__ == "__main__":
    main()
