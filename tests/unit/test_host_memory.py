"""What encoding a shard takes is given back to the system when the shard is written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter

SPEC = RoutingSpec(6, tuple(range(6)), 64, 4, 2048, "0" * 64, "demo", "0" * 64)
TOKENS, UNITS = 4096, 40


def resident():
    """Memory of this process, in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.skipif(
    sys.platform != "linux", reason="resident memory is read from /proc, and glibc's heap is trimmed"
)
def test_a_written_shard_leaves_no_memory_behind(tmp_path):
    rng = np.random.default_rng(0)
    experts = np.sort(rng.random((TOKENS, 6, 64)).argpartition(4)[..., :4]).astype(np.uint8)
    unit = RoutingTrace(
        sequence_id="s",
        group_id="g",
        dataset="d",
        category="",
        token_ids=rng.integers(0, 2048, TOKENS).astype(np.int32),
        prompt_length=TOKENS,
        origin="teacher_forced",
        experts=experts,
        weights=None,
        finish_reason="text",
    )
    with TraceStoreWriter(tmp_path / "store", SPEC, tokens_per_shard=2**40, compression="zstd-1") as writer:
        for units in (1, UNITS):  # the first flush loads code
            for _ in range(units):
                writer.append([unit])
            before = resident()
            writer.flush()
    grown = resident() - before  # 58 MiB where nothing is given back
    assert grown < 8, f"{grown:.0f} MiB stay"
    assert TraceStore(tmp_path / "store").num_tokens == (1 + UNITS) * TOKENS
