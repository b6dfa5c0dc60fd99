"""The tie rule, on crafted margins and on a target made to have ties."""

import pytest
import torch
from torch import nn

from ecospec.decoding.lossless import (
    Comparison,
    LosslessCheck,
    Margins,
    classify_mismatch,
    first_difference,
    measure_margins,
    router_margin,
)
from tests.decoding_fakes import tiny_target

REFERENCE = [3, 1, 4, 1, 5]


def margins(gap=1.0, router=(1.0, 1.0, 1.0, 1.0, 1.0), other=2):
    logits = torch.zeros(5, 8, dtype=torch.float64)
    for position, token in enumerate(REFERENCE):
        logits[position, token] = 5.0
        logits[position, other] = 5.0 - gap
    return Margins(logits, torch.tensor(router, dtype=torch.float64))


@pytest.mark.parametrize(
    ("candidate", "position"),
    [(REFERENCE, None), ([3, 1, 4], 3), ([3, 1, 4, 1, 5, 9], 5), ([3, 2, 4, 1, 5], 1), ([], 0)],
)
def test_first_difference(candidate, position):
    assert first_difference(REFERENCE, candidate) == position


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [
        (margins(gap=1e-5), "tie"),
        (margins(gap=9e-5), "tie"),
        (margins(gap=2e-4), "mismatch"),
        (margins(router=(1.0, 1.0, 1e-6, 1.0, 1.0)), "tie"),  # the router at the position itself
        (margins(router=(1e-6, 1.0, 1.0, 1.0, 1.0)), "tie"),  # an earlier one
        (margins(router=(1.0, 1.0, 1.0, 1e-6, 1.0)), "mismatch"),  # a later one explains nothing
        (margins(router=(1.0, 2e-5, 1.0, 1.0, 1.0)), "mismatch"),
        (margins(gap=1e-5, other=6), "mismatch"),  # near another token than the one emitted
    ],
)
def test_tie_rule(margin, verdict):
    comparison = classify_mismatch(REFERENCE, [3, 1, 2, 7, 7], margin)
    assert (comparison.verdict, comparison.position) == (verdict, 2)


def test_only_the_first_difference_counts_and_length_is_never_a_tie():
    near = margins(gap=1e-5)
    assert classify_mismatch(REFERENCE, REFERENCE, near) == Comparison("same")
    assert classify_mismatch(REFERENCE, [3, 2, 0, 0, 0], near).position == 1
    assert classify_mismatch(REFERENCE, REFERENCE[:3], near).verdict == "mismatch"
    assert classify_mismatch(REFERENCE, [*REFERENCE, 2], near).verdict == "mismatch"


def test_router_margin_of_plain_and_grouped_routers():
    logits = torch.tensor([[0.0, 3.0, 2.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert router_margin(nn.Module(), logits, 2).tolist() == [1.5, 0.0]
    assert router_margin(nn.Module(), logits, 4).tolist() == [torch.inf] * 2
    grouped = nn.Module()
    grouped.e_score_correction_bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0])
    for name, value in (("num_group", 3), ("topk_group", 2)):
        setattr(grouped, name, value)
    scores = torch.tensor([[0.9, 0.1, 0.8, 0.3, 0.2, 0.35]])  # groups 1.0, 1.1, 1.05 with the bias on expert 4
    # Groups 1 and 2 are chosen, by 0.05 over group 0; experts 2 (0.8) and 4 (0.7) by 0.35 over expert 5.
    assert router_margin(grouped, scores.logit(), 2).tolist() == pytest.approx([0.05], abs=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_margins_measured_on_a_model(family):
    model = tiny_target(family)
    prompt, output = [5, 6, 7], [1, 2, 3, 4]
    measured = measure_margins(model, prompt, output)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0]
    torch.testing.assert_close(measured.logits, logits[2:6], rtol=0, atol=1e-9)
    assert measured.router.shape == (4,)
    assert (measured.router > 0).all()
    # The bound is sharp: the margin of the weakest layer, by hand.
    if family == "gpt_oss":
        rows = []
        handles = [
            layer.mlp.router.register_forward_hook(lambda _m, _a, out: rows.append(out[0]))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(torch.tensor([prompt + output]))
        for handle in handles:
            handle.remove()
        ranked = torch.stack(rows).sort(dim=-1, descending=True).values[:, 2:6]
        torch.testing.assert_close(measured.router, (ranked[..., 1] - ranked[..., 2]).amin(0), rtol=0, atol=1e-9)


def test_check_counts_and_is_strict_in_float64():
    output = [1, 2, 3, 4]
    single = tiny_target("qwen3_moe", torch.float32)
    with torch.no_grad():
        # All logits equal: in float32 any other token is a tie, in float64 a mismatch.
        single.lm_head.weight.zero_()
    check = LosslessCheck(single)
    assert check.compare([5, 6], output, output).verdict == "same"
    assert check.compare([5, 6], output, [1, 2, 9, 9]).verdict == "tie"
    assert check.compare([5, 6], output, [1, 2]).verdict == "mismatch"
    assert check.summary() == {"runs": 3, "tokens": 10, "mismatches": 1, "ties": 1}
    assert not check.passed
    double = LosslessCheck(single.double())
    assert double.compare([5, 6], output, [1, 2, 9, 9]).verdict == "mismatch"
    assert double.failures[0].position == 2
    few = LosslessCheck(single)
    few.compare([5], output, output)
    assert few.passed
