"""Recorder against what the model itself executes: routers against experts' inputs, and the reverse."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.hooks import RoutingRecorder, find_moe_layers
from tests.moe_fakes import VOCAB, gpt_oss, ids, qwen3


def deepseek():
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            max_position_embeddings=128,
        )
    )
    for layer in model.model.layers[1:]:  # a correction bias that changes the choice
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.5, 0.5, 8))
    return model


FAMILIES = {"qwen3": qwen3, "gpt_oss": gpt_oss, "deepseek": deepseek}


@pytest.fixture(params=FAMILIES, scope="module")
def model(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built = FAMILIES[request.param]().eval()
    for name, parameter in built.named_parameters():
        if parameter.ndim == 2 and ("gate.weight" in name or "router.weight" in name):
            nn.init.normal_(parameter)  # tiny initial router weights would leave ties
    return built


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return qwen3().eval()


def spec_of(model, **changes):
    layers = find_moe_layers(model)
    spec = RoutingSpec(
        num_layers=len(layers),
        layer_indices=tuple(layer.layer_index for layer in layers),
        num_experts=layers[0].num_experts,
        top_k=2,
        vocab_size=VOCAB,
        tokenizer_fingerprint="0" * 64,
        target_id="tiny",
        target_fingerprint="1" * 64,
    )
    return dataclasses.replace(spec, **changes)


def witness(model, boundary):
    """Rows of (index, weights) seen at one module boundary, written without the recorder's helpers."""
    seen = []
    handles = []
    for module in model.modules():
        name = type(module).__name__
        if boundary == "experts" and name.endswith("Experts"):

            def before(_module, args, kwargs):
                values = [*args, *kwargs.values()]
                seen.append((values[1].clone(), values[2].clone()))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if boundary == "router" and name.endswith("Router"):
            handles.append(module.register_forward_hook(lambda _m, _a, out: seen.append((out[2], out[1]))))
    return seen, handles


@pytest.mark.parametrize(("source", "other"), [("router", "experts"), ("experts", "router")])
def test_recorded_sets_and_weights_equal_the_other_boundary(model, source, other):
    seen, handles = witness(model, other)
    with torch.no_grad(), RoutingRecorder(model, source=source, weights=True) as recorder:
        model(ids())
        routing = recorder.take()
    for handle in handles:
        handle.remove()
    assert routing.experts.dtype == torch.uint8
    assert routing.weights is not None
    assert routing.weights.dtype == torch.float16
    assert routing.experts.shape[:2] == (18, len(seen))
    for layer, (index, weights) in enumerate(seen):
        for row in range(18):
            truth = dict(zip(index[row].tolist(), weights[row].to(torch.float16).tolist(), strict=True))
            mine = routing.experts[row, layer].tolist()
            assert mine == sorted(truth)
            assert routing.weights[row, layer].tolist() == [truth[expert] for expert in mine]


def test_layers_found(model):
    layers = find_moe_layers(model)
    dense = 1 if isinstance(model, DeepseekV3ForCausalLM) else 0
    assert [layer.layer_index for layer in layers] == list(range(dense, model.config.num_hidden_layers))
    assert all(type(layer.router).__name__.endswith("Router") for layer in layers)
    assert all(type(layer.experts).__name__.endswith("Experts") for layer in layers)
    assert {layer.num_experts for layer in layers} == {8}


def test_cached_steps_equal_one_forward(model):
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    twin = twin.double()
    twin.set_experts_implementation("eager")  # grouped_mm knows no float64
    tokens = ids(2, 10)
    with torch.no_grad(), RoutingRecorder(twin) as recorder:
        twin(tokens)
        whole = recorder.last_experts.view(2, 10, recorder.num_layers, -1)
        state = twin(tokens[:, :6], use_cache=True)
        first = recorder.last_experts.view(2, 6, recorder.num_layers, -1)
        steps = [first]
        for position in range(6, 10):
            state = twin(tokens[:, position : position + 1], cache=state.cache, use_cache=True)
            steps.append(recorder.last_experts.view(2, 1, recorder.num_layers, -1))
    assert torch.equal(torch.cat(steps, dim=1), whole)


def test_base_model_and_inputs_embeds_are_recorded_too(tiny):
    with torch.no_grad(), RoutingRecorder(tiny) as recorder:
        tiny(ids())
        expected = recorder.last_experts
        tiny.model(inputs_embeds=tiny.model.embed_tokens(ids()))
        assert torch.equal(recorder.last_experts, expected)
        assert expected.dtype == torch.int64


def test_dense_layers_in_between_are_absent():
    model = qwen3(num_hidden_layers=4, mlp_only_layers=[1]).eval()
    assert [layer.layer_index for layer in find_moe_layers(model)] == [0, 2, 3]
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(ids())
        assert recorder.last_experts.shape == (18, 3, 2)


def test_router_is_told_from_a_shared_expert_with_as_many_rows():
    """E = hidden size: the shared expert's down projection also has E rows."""
    model = qwen3(num_experts=32).eval()
    block = model.model.layers[0].mlp
    block.shared_expert = nn.Linear(16, 32, bias=False)
    assert find_moe_layers(model)[0].router is block.gate


@pytest.mark.parametrize("name", ["vision_tower", "talker"])
def test_experts_of_another_tower_are_not_the_targets(tiny, name):
    other = qwen3().model
    tiny.add_module(name, other)
    assert [layer.name for layer in find_moe_layers(tiny)] == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    tiny.model = qwen3(mlp_only_layers=[0, 1, 2]).model
    with pytest.raises(ValueError, match="has no MoE layer"):
        find_moe_layers(tiny)


@pytest.mark.parametrize("place", ["behind", "beside"])
def test_multi_token_prediction_layer_is_not_hooked(tiny, place):
    extra = qwen3(num_hidden_layers=1).model.layers[0]
    if place == "behind":
        tiny.model.layers.append(extra)
    else:
        tiny.mtp = nn.ModuleDict({"layers": nn.ModuleList([extra])})
    assert [layer.layer_index for layer in find_moe_layers(tiny)] == [0, 1, 2]


def test_hooks_are_removed(tiny):
    with RoutingRecorder(tiny):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny.modules())


def test_more_than_256_experts_need_int16():
    model = qwen3(num_experts=300, num_hidden_layers=1).eval()
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(ids())
        assert recorder.take().experts.dtype == torch.int16


def test_training_mode_is_refused(tiny):
    with pytest.raises(ValueError, match="is in training mode"), RoutingRecorder(tiny.train()):
        pass
    with RoutingRecorder(tiny.eval()):
        tiny.train()
        with pytest.raises(ValueError, match="is in training mode"):
            tiny(ids())


def test_rows_must_equal_tokens(tiny):
    block = tiny.model.layers[1].mlp
    original = block.forward

    def half(hidden):
        block.gate(hidden[:, :1])
        return original(hidden)

    block.forward = half
    with RoutingRecorder(tiny), pytest.raises(ValueError, match="layer 1 recorded 20 rows for 18 tokens"):
        tiny(ids())


def test_hooks_that_never_fire_are_refused(tiny):
    with RoutingRecorder(tiny) as recorder, pytest.raises(ValueError, match=r"no forward was recorded.*compiled"):
        recorder.take()
    gate = tiny.model.layers[2].mlp.gate
    bypass = gate.forward
    tiny.model.layers[2].mlp.gate = None  # a router called past its hooks, as compiled code does
    tiny.model.layers[2].mlp._modules.pop("gate")
    tiny.model.layers[2].mlp.router = gate
    object.__setattr__(tiny.model.layers[2].mlp, "gate", bypass)
    with RoutingRecorder(tiny), pytest.raises(ValueError, match=r"layer 2 recorded 0 rows for 18 tokens.*compiled"):
        tiny(ids())


def test_a_record_is_taken_once(tiny):
    with torch.no_grad(), RoutingRecorder(tiny) as recorder:
        tiny(ids())
        recorder.take()
        with pytest.raises(ValueError, match="no forward was recorded"):
            recorder.take()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 9}, "has num_experts 8, its RoutingSpec says 9"),
        ({"layer_indices": (0, 1, 3)}, r"has layer_indices \(0, 1, 2\), its RoutingSpec says \(0, 1, 3\)"),
    ],
)
def test_spec_of_another_target_is_refused(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        RoutingRecorder(tiny, spec_of(tiny, **change))


def test_spec_with_another_top_k_is_refused(tiny):
    with (
        RoutingRecorder(tiny, spec_of(tiny, top_k=3)),
        pytest.raises(ValueError, match="routes to 2 experts, its RoutingSpec says top_k 3"),
    ):
        tiny(ids())


def test_out_of_range_ids_are_refused(tiny):
    gate = tiny.model.layers[0].mlp.gate
    original = gate.forward
    gate.forward = lambda hidden: (*original(hidden)[:2], original(hidden)[2] + 7)
    with RoutingRecorder(tiny), pytest.raises(ValueError, match="allowed: 0 to 7; under expert parallelism"):
        tiny(ids())


def test_the_same_expert_twice_is_refused(tiny):
    gate = tiny.model.layers[0].mlp.gate
    original = gate.forward
    gate.forward = lambda hidden: (*original(hidden)[:2], torch.zeros_like(original(hidden)[2]))
    with RoutingRecorder(tiny), pytest.raises(ValueError, match="same expert twice"):
        tiny(ids())


def test_router_without_index_names_the_other_source(tiny):
    block = tiny.model.layers[0].mlp
    original = block.gate.forward
    block.gate.forward = lambda hidden: original(hidden)[0]
    block.forward = lambda hidden: (block.gate(hidden), hidden)[1]
    with RoutingRecorder(tiny), pytest.raises(ValueError, match=r"layer 0 shows no .*record with source='experts'"):
        tiny(ids())


def test_router_without_weights_names_the_other_source(tiny):
    block = tiny.model.layers[0].mlp
    original = block.gate.forward
    block.gate.forward = lambda hidden: (original(hidden)[2],)
    block.forward = lambda hidden: (block.gate(hidden), hidden)[1]
    with (
        RoutingRecorder(tiny, weights=True),
        pytest.raises(ValueError, match="no weights beside its index; record with source='experts'"),
    ):
        tiny(ids())


def test_unknown_source_is_refused(tiny):
    with pytest.raises(ValueError, match="source must be one of auto, router, experts, topk; got 'logits'"):
        RoutingRecorder(tiny, source="logits")  # type: ignore[arg-type]


def test_dense_models_are_refused():
    model = qwen3(mlp_only_layers=[0, 1, 2])
    with pytest.raises(ValueError, match="has no MoE layer"):
        find_moe_layers(model)


def test_encoder_decoder_models_are_refused(tiny):
    tiny.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        find_moe_layers(tiny)


def test_two_experts_modules_in_one_layer_are_refused(tiny):
    tiny.model.layers[1].self_attn.experts = qwen3().model.layers[0].mlp.experts
    with pytest.raises(ValueError, match="layer 1 has 2 experts modules"):
        find_moe_layers(tiny)


def test_layers_of_different_size_are_refused(tiny):
    tiny.model.layers[1].mlp = qwen3(num_experts=4).model.layers[0].mlp
    with pytest.raises(ValueError, match=r"layers have \[4, 8\] experts"):
        find_moe_layers(tiny)


def test_two_decoders_are_refused(tiny):
    tiny.draft = qwen3().model
    with pytest.raises(
        ValueError, match=r"MoE layers in \['draft.layers', 'model.layers'\].*pass the target alone"
    ):
        find_moe_layers(tiny)


def test_missing_router_is_refused(tiny):
    tiny.model.layers[0].mlp.gate = nn.Identity()
    with pytest.raises(
        ValueError, match=r"0 modules beside model.layers.0.mlp.experts look like its router \(none\)"
    ):
        find_moe_layers(tiny)


def test_call_without_ids_is_refused(tiny):
    with RoutingRecorder(tiny), pytest.raises(ValueError, match="neither input_ids nor inputs_embeds"):
        tiny.model()
