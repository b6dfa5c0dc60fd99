"""Rows of serving engines: decoding, checking, and turning them into the experts of a routing trace.

vLLM and SGLang return one row per processed token, for *every* decoder layer: dense layers hold zeros, the order
within the top-k means nothing, ids are logical (before any expert is moved or copied for load balance).

Shapes: t processed tokens, D decoder layers, L MoE layers among them, E routed experts, K top-k.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import Experts

Rows = npt.NDArray[Any]

# With one expert per token a zero is also the id of expert 0, so only a whole reply of zeros tells: below this many
# entries it may be chance.
_FEW_ENTRIES = 16

_ZEROS_ADVICE = (
    "the engine did not capture them: vLLM up to 0.26 with monolithic FlashInfer kernels (use --moe-backend triton "
    "or a newer vLLM), or SGLang with NGRAM speculation (start it without)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class RowLayout:
    """What rows of a target look like.

    Attributes:
        spec: The target's RoutingSpec.
        num_decoder_layers: All decoder layers, D, dense ones included (``num_hidden_layers``).
    """

    spec: RoutingSpec
    num_decoder_layers: int


def npy_rows(text: str, where: str) -> Rows:
    """Decode vLLM's ``routed_experts`` of a completion: base64 of a ``.npy`` file.

    Args:
        text: The field.
        where: Beginning of messages.

    Returns:
        ``[t, D, K]`` as sent.

    Raises:
        ValueError: Not such a field.
    """
    data = _from_base64(text, where)
    try:
        array: Rows = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{where}: routed_experts is no base64 of a .npy file; use vLLM >= 0.30") from error
    return array


def int32_rows(text: str, layout: RowLayout, where: str) -> Rows:
    """Decode SGLang's ``meta_info["routed_experts"]``: base64 of little-endian int32 in C order, without a shape.

    Args:
        text: The field.
        layout: Gives the shape.
        where: Beginning of messages.

    Returns:
        int32 ``[t, D, K]``.

    Raises:
        ValueError: Not such a field, or its size is no multiple of one token's.
    """
    data = _from_base64(text, where)
    per_token = layout.num_decoder_layers * layout.spec.top_k
    if len(data) % (4 * per_token):
        raise ValueError(
            f"{where}: routed_experts holds {len(data)} bytes, no multiple of {layout.num_decoder_layers} layers x "
            f"{layout.spec.top_k} experts x 4 bytes; the server runs another model than --target-path"
        )
    return np.frombuffer(data, dtype="<i4").reshape(-1, layout.num_decoder_layers, layout.spec.top_k)


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"{where}: routed_experts is no base64 text") from error


def experts_of_rows(rows: Rows, layout: RowLayout, processed: int, where: str) -> Experts:
    """Check the rows of one sequence and keep what a trace stores.

    Args:
        rows: Integers ``[t, D, K]`` as an engine returned them.
        layout: What they must look like.
        processed: Tokens the engine processed, t: all but the last sampled one.
        where: Beginning of messages, e.g. the sequence's name.

    Returns:
        uint8 (uint16 above 256 experts) ``[t, L, K]``, MoE layers only, ids ascending within a layer.

    Raises:
        ValueError: Another shape, rows that were never captured or are lost, or ids that cannot be.
    """
    _check_shape(rows, layout, processed, where)
    spec = layout.spec
    is_moe = np.zeros(layout.num_decoder_layers, dtype=np.bool_)
    is_moe[list(spec.layer_indices)] = True
    filled_dense = np.flatnonzero(~is_moe & rows.any(axis=(0, 2)))
    if filled_dense.size:
        raise ValueError(
            f"{where}: experts in decoder layer {int(filled_dense[0])}, which has none according to --target-path "
            f"(MoE layers: {_short(spec.layer_indices)}); the engine runs another model"
        )
    experts = np.sort(rows[:, is_moe], axis=-1)
    if not experts.size:
        return experts.astype(spec.expert_dtype)
    low, high = int(experts.min()), int(experts.max())
    if low < 0 or high >= spec.num_experts:
        raise ValueError(
            f"{where}: expert ids from {low} to {high}, the target has 0 to {spec.num_experts - 1}; the engine "
            "runs another model, or returns physical ids"
        )
    _check_zeros(experts, spec, where)
    twice = experts[..., 1:] == experts[..., :-1]
    if twice.any():
        row, layer = (int(place) for place in np.argwhere(twice)[0][:2])
        raise ValueError(
            f"{where}: one token is routed to the same expert twice ({experts[row, layer].tolist()} at row {row}, "
            f"decoder layer {spec.layer_indices[layer]}); the engine's rows are damaged"
        )
    return experts.astype(spec.expert_dtype)


def _check_shape(rows: Rows, layout: RowLayout, processed: int, where: str) -> None:
    spec = layout.spec
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: routed_experts must be integers [tokens, layers, top-k], got {rows.dtype} {list(rows.shape)}"
        )
    if rows.shape[2] != spec.top_k:
        raise ValueError(
            f"{where}: {rows.shape[2]} experts per token and layer, --target-path has top-k {spec.top_k}; the "
            "engine runs another model"
        )
    if rows.shape[1] != layout.num_decoder_layers:
        hint = "the engine runs another model"
        if rows.shape[1] == spec.num_layers:
            hint = "this engine leaves dense layers out, as vLLM before 0.30 did; update it"
        raise ValueError(
            f"{where}: rows of {rows.shape[1]} layers, --target-path has {layout.num_decoder_layers} decoder "
            f"layers ({spec.num_layers} of them MoE); {hint}"
        )
    if rows.shape[0] != processed:
        raise ValueError(
            f"{where}: {rows.shape[0]} rows for {processed} processed tokens; rows were lost or cut (prompt rows "
            "skipped by the server, or evicted); ask again with fewer sequences at once (--batch-size)"
        )


def _check_zeros(experts: npt.NDArray[Any], spec: RoutingSpec, where: str) -> None:
    """Refuse rows that nobody wrote.

    Args:
        experts: ``[t, L, K]``, sorted, so that with K > 1 a written row ends in a positive id.
        spec: The target.
        where: Beginning of messages.
    """
    unwritten = experts[..., -1] == 0
    everything = bool(unwritten.all())
    if everything and (spec.top_k > 1 or unwritten.size >= _FEW_ENTRIES):
        raise ValueError(f"{where}: the experts of all {experts.shape[0]} tokens are zero; {_ZEROS_ADVICE}")
    if spec.top_k > 1 and unwritten.any():
        row, layer = (int(place) for place in np.argwhere(unwritten)[0])
        raise ValueError(
            f"{where}: {int(unwritten.sum())} of {unwritten.size} rows are zero, first that of token {row} in "
            f"decoder layer {spec.layer_indices[layer]}; rows were evicted (lower --batch-size), or {_ZEROS_ADVICE}"
        )


def _short(indices: tuple[int, ...]) -> str:
    """Name layers without listing a hundred of them."""
    listed = ", ".join(str(index) for index in indices[:4])
    return listed if len(indices) <= 4 else f"{listed}, ... {indices[-1]}"
