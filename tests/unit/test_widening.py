"""Widening and ballast change what a step costs and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3ForCausalLM, NemotronHConfig, NemotronHForCausalLM

from ecospec.decoding.experts_choice import CANDIDATES
from ecospec.decoding.fused_experts import fused_experts
from ecospec.decoding.widening import (
    COST_LEVELS,
    Ballast,
    CostLevel,
    ExtraMemory,
    add_ballast_,
    apply_cost_level_,
    cost_level,
    remove_ballast_,
    widen_,
    widening_memory,
)
from ecospec.predictor.fingerprint import carry_routing_spec, fingerprint_of_state, routing_spec_of_model
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.hooks import RoutingRecorder
from tests.decoding_fakes import VOCAB, tiny_target

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
BALLAST = 16 * 2 * 32 * 8  # 16 neurons in float64 at the fakes' hidden size of 32


def observe(model, ids):
    """Logits and executed experts, sorted within a layer."""
    with torch.no_grad(), RoutingRecorder(model, source="experts") as recorder:
        logits = model(input_ids=ids).logits
        return logits, recorder.last_experts.clone()


@pytest.fixture
def ids():
    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("factor", [2, 16])
def test_widening_keeps_logits_and_routing(family, dtype, tolerance, factor, ids):
    model = tiny_target(family, dtype)
    logits, experts = observe(model, ids)
    before = fused_experts(model)
    report = widen_(model, factor)
    widened_logits, widened_experts = observe(model, ids)
    assert torch.equal(experts, widened_experts)
    scale = max(1.0, float(logits.abs().max()))
    assert float((logits - widened_logits).abs().max()) <= tolerance * scale
    after = fused_experts(model)
    assert [layer.width for layer in after] == [layer.width * factor for layer in before]
    assert (report.width_before, report.width_after) == (before[0].width, before[0].width * factor)
    assert report.layers == len(before)
    assert report.expert_bytes == after[0].expert_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_widened_weights_are_stored_and_are_equal_copies(family):
    model = tiny_target(family)
    old = copy.deepcopy(model)
    widen_(model, 4)
    for before, after in zip(fused_experts(old), fused_experts(model), strict=True):
        for name, weight in after.weights.items():
            assert weight.is_contiguous()
            assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
            factor = 1 if name == "down_proj_bias" else 4
            assert weight.numel() == before.weights[name].numel() * factor
        down_axis = 1 if after.transposed else 2
        copies = after.weights["down_proj"].unflatten(down_axis, (4, before.width))
        for number in range(4):
            assert torch.equal(copies.select(down_axis, number) * 4, before.weights["down_proj"])


def test_factor_one_is_the_identity(ids):
    model = tiny_target("qwen3_moe")
    tensors = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    logits, _ = observe(model, ids)
    report = widen_(model, 1)
    assert report.memory.extra_bytes == report.memory.peak_bytes == 0
    assert tensors == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    assert torch.equal(observe(model, ids)[0], logits)


@pytest.mark.parametrize("factor", [0, 3, -2, 2.0, True])
def test_factor_must_be_a_power_of_two(factor):
    with pytest.raises(ValueError, match="must be a power of two"):
        widen_(tiny_target("qwen3_moe"), factor)


def test_widths_in_config_and_modules_follow():
    model = tiny_target("qwen3_moe")
    widen_(model, 4)
    assert model.config.moe_intermediate_size == 64
    assert model.config.intermediate_size == 32  # the dense width, which is another
    assert {layer.module.intermediate_dim for layer in fused_experts(model)} == {64}
    oss = tiny_target("gpt_oss")
    widen_(oss, 2)
    assert oss.config.intermediate_size == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_stated_before_and_exact(family):
    model = tiny_target(family)
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    stated = widening_memory(model, 8)
    report = widen_(model, 8)
    after = sum(p.numel() * p.element_size() for p in model.parameters())
    assert after - before == stated.extra_bytes == report.memory.extra_bytes
    assert stated.peak_bytes > stated.extra_bytes


def test_too_little_memory_is_refused(monkeypatch):
    monkeypatch.setattr("ecospec.decoding.widening.available_bytes", lambda _: 1000)
    model = tiny_target("qwen3_moe")
    with pytest.raises(ValueError, match=r"widening by 4 needs .* choose a smaller factor"):
        widen_(model, 4)
    with pytest.raises(ValueError, match=r"ballast needs .* choose less"):
        add_ballast_(model, BALLAST)
    assert ExtraMemory(5, 6, None).fits


def test_other_layouts_are_refused_by_name():
    config = NemotronHConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16, mamba_num_heads=2, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
        layers_block_type=["attention", "moe"],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"experts \(NemotronH\w+\) has no gate_up_proj and down_proj"):
        widen_(NemotronHForCausalLM(config).eval(), 2)
    quantised = tiny_target("qwen3_moe")
    experts: Any = fused_experts(quantised)[0].module
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="is quantised"):
        widen_(quantised, 2)


def test_coupled_neurons_and_misfitting_shapes_are_refused():
    model = tiny_target("qwen3_moe")
    experts: Any = fused_experts(model)[1].module
    experts._apply_gate = lambda x: x.chunk(2, -1)[0].softmax(-1)
    with pytest.raises(ValueError, match="neurons depend on each other"):
        widen_(model, 2)
    del experts._apply_gate
    experts.down_proj = nn.Parameter(experts.down_proj[:, :, :-1].detach().clone())
    with pytest.raises(ValueError, match="do not fit"):
        widen_(model, 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ballast_keeps_logits_bitwise(family, dtype, ids):
    model = tiny_target(family, dtype)
    logits, experts = observe(model, ids)
    names = [name for name, _ in model.named_modules()]
    state = set(model.state_dict())
    memory = add_ballast_(model, BALLAST)
    loaded, loaded_experts = observe(model, ids)
    assert torch.equal(logits, loaded)
    assert torch.equal(experts, loaded_experts)
    blocks = [module for module in model.modules() if isinstance(module, Ballast)]
    assert len(blocks) == len(fused_experts(model))
    assert sum(block.weight_bytes for block in blocks) == memory.extra_bytes
    assert set(names) < {name for name, _ in model.named_modules()}
    assert set(model.state_dict()) == state
    assert remove_ballast_(model) == len(blocks)
    assert [name for name, _ in model.named_modules()] == names
    assert remove_ballast_(model) == 0


def test_ballast_reads_its_weights_in_every_forward(ids):
    model = tiny_target("qwen3_moe")
    add_ballast_(model, BALLAST)
    block: Any = next(module for module in model.modules() if isinstance(module, Ballast))
    block.down[0, 0] = float("nan")
    assert observe(model, ids)[0].isnan().any()


def test_ballast_output_is_zero_for_extreme_inputs():
    generator = torch.Generator().manual_seed(0)
    block = Ballast(8, 16, torch.device("cpu"), torch.float32, generator)
    rows = torch.full((300, 8), float("inf"))
    rows[0] = torch.finfo(torch.float32).max
    rows[1] = 0.0
    rows[2:, 1:] = 0.0
    assert torch.equal(block(rows)[:2], torch.zeros(2, 8))
    assert block(torch.zeros(2, 3, 8)).shape == (2, 3, 8)
    long = torch.randn(600, 8, generator=generator)
    assert torch.equal(block(long), torch.zeros(600, 8))


def test_ballast_survives_a_copy_and_refuses_a_second():
    model = tiny_target("gpt_oss")
    add_ballast_(model, BALLAST)
    with pytest.raises(ValueError, match="carries ballast already"):
        add_ballast_(model, BALLAST)
    twin = copy.deepcopy(model)
    assert remove_ballast_(twin) == len(fused_experts(model))
    assert any(isinstance(module, Ballast) for module in model.modules())
    with pytest.raises(ValueError, match=f"the least is {BALLAST}"):
        add_ballast_(twin, BALLAST - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_and_carried_spec_stay(family):
    model = tiny_target(family)
    fingerprint = fingerprint_of_state(model.config, model.state_dict())
    spec = RoutingSpec(1, (0,), 8, 2, VOCAB, "0" * 64, "source", fingerprint)
    carry_routing_spec(model, spec)
    apply_cost_level_(model, CostLevel("test", 4, BALLAST))
    assert fingerprint_of_state(model.config, model.state_dict()) == fingerprint
    assert routing_spec_of_model(model) is spec


def test_shared_experts_are_left_alone():
    model = tiny_target("deepseek_v3")
    assert isinstance(model, DeepseekV3ForCausalLM)
    shapes = [
        m.weight.shape for name, m in model.named_modules() if "shared_experts" in name and hasattr(m, "weight")
    ]
    widen_(model, 4)
    after = [
        m.weight.shape for name, m in model.named_modules() if "shared_experts" in name and hasattr(m, "weight")
    ]
    assert shapes == after
    assert shapes


def test_cost_levels(ids):
    assert set(COST_LEVELS) == {"bare", "ballast"}
    assert cost_level("bare").ballast_bytes_per_layer == 0
    assert cost_level("ballast").widening_factor == cost_level("bare").widening_factor
    with pytest.raises(ValueError, match="unknown cost level 'heavy'; allowed: bare, ballast"):
        cost_level("heavy")
    with pytest.raises(ValueError, match="must not be negative"):
        CostLevel("x", 2, -1)
    model = tiny_target("qwen3_moe", torch.float32)
    logits, experts = observe(model, ids)
    report = apply_cost_level_(model, CostLevel("test", 8, 2 * BALLAST))
    assert report.experts_implementation == model.config._experts_implementation
    assert report.experts_implementation in CANDIDATES
    assert report.ballast is not None
    after, experts_after = observe(model, ids)
    assert torch.equal(experts, experts_after)
    assert torch.allclose(logits, after, rtol=1e-5, atol=1e-4)
