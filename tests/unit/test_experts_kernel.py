"""Our experts implementation against transformers' eager one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ecospec.decoding.experts_kernel import IMPLEMENTATION, linear_few_rows, use_grouped_experts
from ecospec.decoding.fused_experts import fused_experts
from ecospec.decoding.widening import widen_
from tests.decoding_fakes import VOCAB, tiny_target

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize("shape", [(96, 16), (16, 96), (520, 513), (1, 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_linear_few_rows(rows, shape, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, shape[1], generator=generator, dtype=dtype)
    weight = torch.randn(*shape, generator=generator, dtype=dtype)
    torch.testing.assert_close(
        linear_few_rows(left, weight), F.linear(left, weight), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 30])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_equal_to_eager_on_any_routing(family, tokens, dtype, tolerance):
    model = tiny_target(family, dtype)
    widen_(model, 4)
    layer = fused_experts(model)[0]
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, layer.hidden, generator=generator, dtype=dtype)
    index = torch.stack([torch.randperm(layer.num_experts, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator, dtype=dtype)
    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = layer.module(hidden, index, weights)
        assert use_grouped_experts(model) == IMPLEMENTATION
        actual = layer.module(hidden, index, weights)
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_model_equal_to_eager(family):
    model = tiny_target(family)
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = model(input_ids=ids).logits
        use_grouped_experts(model)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-11, atol=1e-11)


def test_bfloat16_keeps_its_type():
    model = tiny_target("qwen3_moe", torch.float32)
    layer = fused_experts(model)[0]
    layer.module.bfloat16()
    use_grouped_experts(model)
    hidden = torch.randn(3, layer.hidden, dtype=torch.bfloat16)
    index = torch.tensor([[0, 1], [1, 2], [1, 7]])
    with torch.no_grad():
        output = layer.module(hidden, index, torch.rand(3, 2))
    assert output.dtype == torch.bfloat16
    assert output.shape == hidden.shape


def test_it_is_differentiable():
    model = tiny_target("qwen3_moe", torch.float32)
    use_grouped_experts(model)
    layer = fused_experts(model)[0]
    hidden = torch.randn(3, layer.hidden, requires_grad=True)
    layer.module(hidden, torch.tensor([[0, 1], [1, 2], [1, 7]]), torch.rand(3, 2)).sum().backward()
    assert hidden.grad is not None
    assert layer.module.gate_up_proj.grad is not None


def test_a_model_outside_the_interface_is_refused():
    class Bare(nn.Module):
        device = torch.device("cpu")

        def _can_set_experts_implementation(self):
            return False

    with pytest.raises(ValueError, match="Bare does not follow transformers' experts interface"):
        use_grouped_experts(Bare())


def test_other_devices_keep_their_implementation():
    class Elsewhere(nn.Module):
        device = torch.device("cuda")

        class config:  # noqa: N801 - stands for an attribute
            _experts_implementation = "grouped_mm"

    assert use_grouped_experts(Elsewhere()) == "grouped_mm"
