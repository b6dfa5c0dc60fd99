"""Rows of serving engines against bytes written out by hand from the documented layouts, and every refusal."""

from __future__ import annotations

import base64
import struct

import numpy as np
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.engines.replies import Reply, trace_of_reply
from ecospec.trace_collection.engines.rows import RowLayout, experts_of_rows, int32_rows, npy_rows
from ecospec.trace_collection.planned import PlannedSequence

WHERE = "sequence 's'"


def layout(layers=(1, 2), decoder_layers=4, experts=8, top_k=2):
    """Four decoder layers of which 1 and 2 are MoE, the first and the last dense."""
    spec = RoutingSpec(len(layers), layers, experts, top_k, 100, "a" * 64, "t", "b" * 64)
    return RowLayout(spec, decoder_layers)


def rows(*tokens):
    """One (layer 1, layer 2) pair of expert lists per token, dense layers zero."""
    return np.array([[[0, 0], one, two, [0, 0]] for one, two in tokens], dtype=np.uint8)


GOOD = rows(([7, 0], [1, 2]), ([3, 4], [6, 5]))


def test_sglang_bytes_written_by_hand():
    """Two tokens x 4 layers x top-2: little-endian int32, token by token, layer by layer, dense layers zero."""
    data = (
        b"\x00\x00\x00\x00" b"\x00\x00\x00\x00"  # token 0, layer 0 (dense)
        b"\x07\x00\x00\x00" b"\x00\x00\x00\x00"  # token 0, layer 1: experts 7, 0
        b"\x01\x00\x00\x00" b"\x02\x00\x00\x00"  # token 0, layer 2: 1, 2
        b"\x00\x00\x00\x00" b"\x00\x00\x00\x00"  # token 0, layer 3 (dense)
        b"\x00\x00\x00\x00" b"\x00\x00\x00\x00"
        b"\x03\x00\x00\x00" b"\x04\x00\x00\x00"  # token 1, layer 1: 3, 4
        b"\x06\x00\x00\x00" b"\x05\x00\x00\x00"  # token 1, layer 2: 6, 5
        b"\x00\x00\x00\x00" b"\x00\x00\x00\x00"
    )  # fmt: skip
    decoded = int32_rows(base64.b64encode(data).decode(), layout(), WHERE)
    experts = experts_of_rows(decoded, layout(), 2, WHERE)
    assert experts.dtype == np.uint8
    assert experts.tolist() == [[[0, 7], [1, 2]], [[3, 4], [5, 6]]]


def test_sglang_ids_above_256_need_two_bytes():
    wide = layout(layers=(0,), decoder_layers=1, experts=512, top_k=3)
    data = struct.pack("<6i", 300, 2, 511, 256, 0, 255)
    experts = experts_of_rows(int32_rows(base64.b64encode(data).decode(), wide, WHERE), wide, 2, WHERE)
    assert experts.dtype == np.uint16
    assert experts.tolist() == [[[2, 300, 511]], [[0, 255, 256]]]


def npy_file(shape, values, kind="|u1"):
    """A .npy file (format 1.0) spelled out: magic, version, header length, header padded to 64 bytes, data."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust(128 - 10 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin1") + values


def test_vllm_npy_written_by_hand():
    data = npy_file("(2, 4, 2)", bytes([0, 0, 7, 0, 1, 2, 0, 0, 0, 0, 3, 4, 6, 5, 0, 0]))
    decoded = npy_rows(base64.b64encode(data).decode(), WHERE)
    assert experts_of_rows(decoded, layout(), 2, WHERE).tolist() == [[[0, 7], [1, 2]], [[3, 4], [5, 6]]]


def test_vllm_npy_of_two_bytes():
    wide = layout(layers=(0,), decoder_layers=1, experts=257, top_k=2)
    data = npy_file("(1, 1, 2)", b"\x00\x01\x05\x00", kind="<u2")
    experts = experts_of_rows(npy_rows(base64.b64encode(data).decode(), WHERE), wide, 1, WHERE)
    assert experts.dtype == np.uint16
    assert experts.tolist() == [[[5, 256]]]


def test_one_expert_per_token_may_be_expert_zero():
    """With K = 1 a zero is an id; only a long reply of nothing but zeros is suspicious."""
    single = layout(layers=(0, 1), decoder_layers=2, experts=4, top_k=1)
    mixed = np.array([[[0], [0]], [[0], [3]]])
    assert experts_of_rows(mixed, single, 2, WHERE).tolist() == mixed.tolist()
    assert not experts_of_rows(np.zeros((2, 2, 1), int), single, 2, WHERE).any()
    with pytest.raises(ValueError, match="experts of all 8 tokens are zero"):
        experts_of_rows(np.zeros((8, 2, 1), int), single, 8, WHERE)


def test_a_text_of_one_token_has_no_rows_before_it_is_continued():
    assert experts_of_rows(np.zeros((0, 4, 2), np.uint8), layout(), 0, WHERE).shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("array", "processed", "message"),
    [
        (GOOD.reshape(2, -1), 2, r"must be integers \[tokens, layers, top-k\], got uint8 \[2, 8\]"),
        (GOOD.astype(float), 2, "must be integers .* got float64"),
        (GOOD[..., :1], 2, "1 experts per token and layer, --target-path has top-k 2"),
        (
            GOOD[:, :3],
            2,
            r"rows of 3 layers, --target-path has 4 decoder layers \(2 of them MoE\); the engine runs an",
        ),
        (GOOD[:, 1:3], 2, "leaves dense layers out, as vLLM before 0.30 did"),
        (GOOD, 3, "2 rows for 3 processed tokens; rows were lost or cut"),
        (GOOD, 1, "2 rows for 1 processed"),
        (np.roll(GOOD, 1, axis=1), 2, r"experts in decoder layer 3, which has none .*MoE layers: 1, 2\)"),
        (rows(([7, 0], [1, 8]), ([3, 4], [6, 5])), 2, "expert ids from 0 to 8, the target has 0 to 7"),
        (GOOD.astype(np.int32) - 1 * (GOOD == 7) * 8, 2, "expert ids from -1 to 6"),
        (GOOD * 0, 2, "experts of all 2 tokens are zero; .*monolithic FlashInfer.*NGRAM"),
        (
            rows(([7, 0], [1, 2]), ([3, 4], [0, 0])),
            2,
            "1 of 4 rows are zero, first that of token 1 in decoder layer 2",
        ),
        (rows(([7, 0], [1, 2]), ([4, 4], [6, 5])), 2, r"same expert twice \(\[4, 4\] at row 1, decoder layer 1\)"),
    ],
)
def test_wrong_rows_are_refused(array, processed, message):
    with pytest.raises(ValueError, match=message):
        experts_of_rows(array, layout(), processed, WHERE)


def test_many_layers_are_not_all_listed():
    long = layout(layers=tuple(range(1, 60)), decoder_layers=61)
    with pytest.raises(ValueError, match=r"MoE layers: 1, 2, 3, 4, \.\.\. 59\)"):
        experts_of_rows(np.ones((1, 61, 2), np.uint8), long, 1, WHERE)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (lambda: npy_rows("not base64!", WHERE), "no base64 text"),
        (
            lambda: npy_rows(base64.b64encode(b"PK...").decode(), WHERE),
            "no base64 of a .npy file; use vLLM >= 0.30",
        ),
        (lambda: npy_rows("", WHERE), "no base64 of a .npy file"),
        (lambda: int32_rows("äöü", layout(), WHERE), "no base64 text"),
        (
            lambda: int32_rows(base64.b64encode(bytes(36)).decode(), layout(), WHERE),
            "holds 36 bytes, no multiple of 4 layers x 2 experts x 4 bytes",
        ),
    ],
)
def test_wrong_fields_are_refused(decode, message):
    with pytest.raises(ValueError, match=message):
        decode()


def sequence(max_new, ids=(5, 6)):
    return PlannedSequence("s", "g", "d", "c", np.array(ids, np.int32), max_new, 0)


def test_reading_drops_the_sampled_token_and_keeps_a_row_per_token():
    trace = trace_of_reply(sequence(0), Reply([9], GOOD, "length"), layout(), {1})
    assert trace.token_ids.tolist() == [5, 6]
    assert (trace.origin, trace.finish_reason, trace.num_processed, trace.prompt_length) == (
        "teacher_forced", "text", 2, 2,
    )  # fmt: skip


def test_continuing_has_no_row_for_the_last_sampled_token():
    three = np.concatenate([GOOD, GOOD[:1]])
    trace = trace_of_reply(sequence(2), Reply([9, 1], three, "stop"), layout(), {1})
    assert trace.token_ids.tolist() == [5, 6, 9, 1]
    assert (trace.origin, trace.finish_reason, trace.num_processed, trace.prompt_length) == (
        "generated", "eos", 3, 2,
    )  # fmt: skip
    assert trace_of_reply(sequence(2), Reply([9, 8], three, "length"), layout(), {1}).finish_reason == "length"
    named = trace_of_reply(sequence(2), Reply([9, 8], three, "stop", stopped_at=8), layout(), {1})
    assert named.finish_reason == "eos"  # an end of the server's own


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([], GOOD[:1], "abort"), "asked for at most 2 tokens, the engine generated 0"),
        (Reply([1, 2, 3], GOOD, "length"), "asked for at most 2 tokens, the engine generated 3"),
        (Reply([9, 8], GOOD, "stop"), r"stopped after token 8, which ends nothing .* \(ends: \[1\]\)"),
        (Reply([9, 8], GOOD, "stop", stopped_at=7), "stopped after token 8"),
        (Reply([9, 8], GOOD, "abort"), r"the engine gave up \('abort'\)"),
        (Reply([9, 8], GOOD, "length"), "2 rows for 3 processed tokens"),
    ],
)
def test_wrong_replies_are_refused(reply, message):
    with pytest.raises(ValueError, match=message):
        trace_of_reply(sequence(2), reply, layout(), {1})
