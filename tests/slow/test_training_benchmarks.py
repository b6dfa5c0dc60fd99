"""The benchmark of training speed runs on a tiny network, and its three loops do the same work."""

from __future__ import annotations

import pytest

from tests.slow.test_trace_benchmarks import run

pytestmark = pytest.mark.slow

TINY = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 1, "
TINY += "num_key_value_heads: 1, head_dim: 32}"


def test_training_speed(tmp_path):
    options = ("--steps", 3, "--warmup_steps", 1, "--rounds", 2, "--batch_tokens", 256, "--context_length", 64)
    results, page = run("training_speed", tmp_path / "out", *options, "--backbone", TINY)
    assert results["same_work"], results["last_loss"]
    assert all(len(values) == 2 and min(values) > 0 for values in results["tokens_per_second"].values())
    assert set(results["last_loss"]) == {"train-predictor", "transformers.Trainer", "bare loop"}
    assert "over the bare loop" in page
