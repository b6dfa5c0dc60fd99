"""The fastest implementation of the experts is chosen by time, and computes what the others do."""

from __future__ import annotations

import pytest
import torch

from ecospec.decoding.experts_choice import CANDIDATES, use_experts, use_fastest_experts
from ecospec.decoding.experts_kernel import IMPLEMENTATION
from tests.decoding_fakes import VOCAB, tiny_target


def clock(model, seconds):
    """A stopwatch that runs the call and says how long its implementation pretends to take."""

    def stopwatch(run, device):
        run()
        return seconds[model.config._experts_implementation]

    return stopwatch


@pytest.mark.parametrize("fastest", CANDIDATES)
def test_the_fastest_is_kept(fastest):
    model = tiny_target("qwen3_moe", torch.float32)
    seconds = {name: 1.0 if name == fastest else 2.0 for name in CANDIDATES}
    assert use_fastest_experts(model, repeats=3, stopwatch=clock(model, seconds)) == fastest
    assert model.config._experts_implementation == fastest


def test_what_does_not_run_is_not_kept():
    model = tiny_target("qwen3_moe", torch.float64)

    def stopwatch(run, device):
        if model.config._experts_implementation != "eager":
            raise RuntimeError("no float64")
        run()
        return 9.0

    assert use_fastest_experts(model, repeats=2, stopwatch=stopwatch) == "eager"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_every_candidate_computes_the_same(family):
    model = tiny_target(family, torch.float32)
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    logits = {}
    with torch.no_grad():
        for name in CANDIDATES:
            assert use_experts(model, name) == name
            logits[name] = model(input_ids=ids).logits
    for name in CANDIDATES:
        torch.testing.assert_close(logits[name], logits["eager"], rtol=1e-4, atol=1e-4)


def test_a_real_measurement_keeps_one_that_runs():
    model = tiny_target("qwen3_moe", torch.float64)
    assert use_fastest_experts(model, repeats=2) in (IMPLEMENTATION, "eager")
