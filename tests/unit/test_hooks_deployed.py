"""What deployments do to a target's modules: quantised classes, expert parallelism, compilation, offloading."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ecospec.trace_collection.hooks import RoutingRecorder, find_moe_layers
from ecospec.trace_collection.tiny_targets import tiny_config, tiny_model
from tests.moe_fakes import gpt_oss, ids, qwen3


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return qwen3().eval()


def test_fp8_experts_class_is_found_and_recorded():
    """The real, undecorated class with its float8 weights; only its matrix product, a GPU kernel, is replaced."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    model = qwen3().eval()
    expected = record(model)
    for layer in model.model.layers:
        experts = FP8Experts(model.config, block_size=(16, 16)).eval()
        with torch.no_grad():
            for tensor in experts.parameters():
                tensor.copy_(torch.full(tensor.shape, 0.01))
        experts.linear = lambda value, weight, scale, activation_scale=None: value @ weight.float().T
        layer.mlp.experts = experts
    assert {type(layer.experts).__name__ for layer in find_moe_layers(model)} == {"FP8Experts"}
    assert find_moe_layers(model)[0].num_experts == 8
    for source in ("auto", "router", "experts"):
        assert torch.equal(record(model, source)[:, 0], expected[:, 0])  # the first layer's input is the same


def test_mxfp4_experts_class_is_found_and_recorded():
    """The real class with its packed bytes; its forward, a Triton kernel, is replaced by one with its arguments."""
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    model = gpt_oss().eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.router.weight)
    expected = record(model)
    for layer in model.model.layers:
        layer.mlp.experts = Mxfp4GptOssExperts(model.config).eval()
        layer.mlp.experts.forward = lambda hidden_states, top_k_index, top_k_weights: hidden_states
    assert {type(layer.experts).__name__ for layer in find_moe_layers(model)} == {"Mxfp4GptOssExperts"}
    for source in ("auto", "router", "experts"):
        assert torch.equal(record(model, source)[:, 0], expected[:, 0])


def record(model, source="auto", tokens=None):
    with torch.no_grad(), RoutingRecorder(model, source=source) as recorder:
        model(ids() if tokens is None else tokens)
        return recorder.last_experts.clone()


def split_experts(model):
    """One of two ranks: each layer keeps experts 0 to 3, other ids become the sentinel 4 on the way to them."""
    for layer in model.model.layers:
        block, experts = layer.mlp, layer.mlp.experts
        experts.num_experts = 4
        experts._is_expert_parallel = True
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, nn.Parameter(getattr(experts, name)[:4].clone()))

        def forward(hidden, block=block):
            flat = hidden.view(-1, hidden.shape[-1])
            _, weights, chosen = block.gate(flat)
            local = torch.where(chosen < 4, chosen, 4)
            return block.experts(flat, local, weights * (chosen < 4)).view_as(hidden)

        block.forward = forward
    return model


def test_expert_parallelism_records_global_ids_at_the_router(tiny):
    tiny.set_experts_implementation("eager")
    expected = record(tiny)
    split = split_experts(tiny)
    assert find_moe_layers(split)[0].num_experts == 8
    for source in ("auto", "router"):
        assert torch.equal(record(split, source)[:, 0], expected[:, 0])
    assert record(split).max() > 4
    with pytest.raises(ValueError, match="local to a process; record with source='router'"):
        RoutingRecorder(split, source="experts")


def test_compiled_blocks_are_refused(tiny):
    """Compiled before the recorder is opened: the hooks inside the block never fire and raise nothing."""
    block = tiny.model.layers[0].mlp
    block.forward = torch.compile(block.forward, backend="eager")
    with torch.no_grad():
        tiny(ids())
        with (
            RoutingRecorder(tiny),
            pytest.raises(ValueError, match=r"layer 0 recorded 0 rows for 18 tokens.*compiled"),
        ):
            tiny(ids())


def test_offloaded_layers_are_recorded(tiny):
    """Weights on the meta device between forwards, as accelerate's dispatch leaves them."""
    from accelerate import cpu_offload

    expected = record(tiny)
    cpu_offload(tiny, execution_device=torch.device("cpu"))
    assert tiny.model.layers[0].mlp.gate.weight.is_meta
    for source in ("auto", "router", "experts"):
        assert torch.equal(record(tiny, source), expected)


def test_weights_of_shared_experts_are_not_taken_for_the_routed_ones():
    """Inkling's router returns the weights of as many shared experts behind its index."""
    model = tiny_model("inkling_text")
    results = []
    for source in ("router", "experts"):
        with torch.no_grad(), RoutingRecorder(model, source=source, weights=True) as recorder:
            model(ids())
            weights = recorder.take().weights
            assert weights is not None
            results.append(weights)
    assert torch.equal(results[0], results[1])


class Waits(TorchDispatchMode):
    """Counts the operations that wait for the device or copy from it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("source", ["auto", "router", "experts", "topk"])
def test_nothing_waits_for_the_device_after_the_first_forward(tiny, source):
    def waits():
        with torch.no_grad(), Waits() as mode:
            tiny(ids())
        return mode.count

    tiny(ids())
    alone = waits()
    with torch.no_grad(), RoutingRecorder(tiny, source=source) as recorder:
        first, second = waits(), waits()
        assert first > alone
        assert second == alone
        assert recorder.last_experts.shape == (18, 3, 2)


def test_looped_layers_are_refused_by_their_rows(tiny):
    """A layer that runs twice per token has no one routing."""
    layer = tiny.model.layers[1]
    original = layer.forward
    layer.forward = lambda hidden, *args, **kwargs: original(original(hidden, *args, **kwargs), *args, **kwargs)
    with RoutingRecorder(tiny), pytest.raises(ValueError, match="layer 1 recorded 36 rows for 18 tokens"):
        tiny(ids())


@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
def test_encoder_decoder_families_are_refused_by_name(family):
    class Target(nn.Module):
        config = tiny_config(family)

    with pytest.raises(ValueError, match=f"family '{family}' is encoder-decoder"):
        find_moe_layers(Target())
