"""Fingerprints from files: what they must ignore, what they must notice, what they must refuse."""

import copy
import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ecospec.decoding.widening import add_ballast_, widen_
from ecospec.predictor import (
    carry_routing_spec,
    fingerprint_of_state,
    load_target_embedding,
    routing_spec_of,
    routing_spec_of_model,
    target_fingerprint,
    tokenizer_fingerprint,
)
from tests.predictor_fakes import SPEC

COMMON = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def qwen3_moe(**changes):
    config = {"num_experts": 8, "moe_intermediate_size": 8, "norm_topk_prob": True, **COMMON, **changes}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))


def gpt_oss():
    model = GptOssForCausalLM(GptOssConfig(num_local_experts=8, **COMMON))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.router.bias)
    return model


def deepseek_v3():
    config = {**COMMON, "num_key_value_heads": 2, "n_routed_experts": 8, "moe_intermediate_size": 8, "n_group": 2}
    config |= {"topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    config |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    del config["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(num_local_experts=8, **COMMON))


FAMILIES = {
    "qwen3_moe": (qwen3_moe, (0, 1, 2)),
    "gpt_oss": (gpt_oss, (0, 1, 2)),
    "deepseek_v3": (deepseek_v3, (1, 2)),
    "mixtral": (mixtral, (0, 1, 2)),
}


def built(make, seed=0, **changes):
    torch.manual_seed(seed)
    return make(**changes).eval()


def save_tokenizer(folder, extra=()):
    vocabulary = {token: index for index, token in enumerate(["<unk>", "a", "b", *extra])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")))
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    built(qwen3_moe).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def edit(folder, name="config.json", **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_files_single_and_sharded_and_the_loaded_model_agree(family, tmp_path):
    make, layers = FAMILIES[family]
    model = built(make)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    expected = fingerprint_of_state(model.config, model.state_dict())
    assert target_fingerprint(tmp_path / "single") == expected
    assert target_fingerprint(tmp_path / "sharded") == expected
    save_tokenizer(tmp_path / "single")
    spec = routing_spec_of(tmp_path / "single")
    assert spec.layer_indices == layers
    assert (spec.num_layers, spec.num_experts, spec.top_k, spec.vocab_size) == (len(layers), 8, 2, 24)
    assert spec.target_fingerprint == expected
    other = built(make, seed=1)
    assert fingerprint_of_state(other.config, other.state_dict()) != expected


def test_definition_written_out(target):
    digest = hashlib.sha256()
    tensors = load_file(target / "model.safetensors")
    for layer in range(3):
        weight = tensors[f"model.layers.{layer}.mlp.gate.weight"].numpy().astype("<f4")
        digest.update(f'[{layer},"weight",[8,16]]\n'.encode() + np.ascontiguousarray(weight).tobytes())
    digest.update(
        b'{"E":8,"K":2,"groups":null,"normalisation":true,"scaling":null,"scoring":"softmax"}',
    )
    assert target_fingerprint(target) == digest.hexdigest()


def test_deepseek_bias_and_groups_count(tmp_path):
    model = built(deepseek_v3)
    before = fingerprint_of_state(model.config, model.state_dict())
    model.model.layers[1].mlp.gate.e_score_correction_bias.add_(1.0)
    after = fingerprint_of_state(model.config, model.state_dict())
    model.config.topk_group = 2
    assert len({before, after, fingerprint_of_state(model.config, model.state_dict())}) == 3


def test_dtype_is_ignored_where_the_router_survives_it(tmp_path):
    model = built(qwen3_moe)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.bfloat16().float()
    model.save_pretrained(tmp_path / "fp32")
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "bf16")
    assert (
        load_file(tmp_path / "bf16" / "model.safetensors")["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    )
    assert target_fingerprint(tmp_path / "bf16") == target_fingerprint(tmp_path / "fp32")


def test_a_float32_router_rounded_to_bf16_is_another_router_but_the_loaded_model_is_not(target, tmp_path):
    save_tokenizer(target)
    loaded = Qwen3MoeForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert routing_spec_of_model(loaded) == routing_spec_of(target)
    loaded.save_pretrained(tmp_path / "bf16")
    assert target_fingerprint(tmp_path / "bf16") != target_fingerprint(target)


def test_expert_width_is_ignored(target, tmp_path):
    wide = built(qwen3_moe, moe_intermediate_size=32)
    for mine, theirs in zip(wide.model.layers, built(qwen3_moe).model.layers, strict=True):
        mine.mlp.gate.weight.data.copy_(theirs.mlp.gate.weight)
    wide.save_pretrained(tmp_path / "wide")
    assert target_fingerprint(tmp_path / "wide") == target_fingerprint(target)


def test_widened_and_ballasted_models_are_the_same_target(target):
    spec = routing_spec_of(target)
    model = Qwen3MoeForCausalLM.from_pretrained(target)
    for change in (lambda: widen_(model, 4), lambda: add_ballast_(model, 4096)):
        change()
        assert fingerprint_of_state(model.config, model.state_dict()) == spec.target_fingerprint
        assert routing_spec_of_model(model) == spec


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 3}, {"norm_topk_prob": False}])
def test_routing_configuration_counts(target, changes):
    before = target_fingerprint(target)
    edit(target, **changes)
    assert target_fingerprint(target) != before


def test_mtp_layers_and_other_towers_are_left_out(target):
    before = target_fingerprint(target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    gate = torch.randn(8, 16)
    tensors |= {"model.layers.3.mlp.gate.weight": gate, "mtp.layers.0.mlp.gate.weight": gate.clone()}
    tensors |= {"model.visual.layers.0.mlp.gate.weight": gate.clone()}
    tensors |= {"model.layers.0.mlp.shared_expert_gate.weight": torch.randn(1, 16)}
    tensors |= {"model.layers.0.mlp.experts.0.gate.weight": gate.clone()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert target_fingerprint(target) == before


def test_config_wrapped_in_text_config():
    model = built(qwen3_moe)

    class Wrapped:
        text_config = model.config
        model_type = "some_vl_moe"

    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in model.state_dict().items()}
    assert fingerprint_of_state(Wrapped(), renamed) == fingerprint_of_state(model.config, model.state_dict())


def test_tokenizer_fingerprint_is_of_the_pairs(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    pairs = json.dumps([["<unk>", 0], ["a", 1], ["b", 2]], separators=(",", ":"))
    assert tokenizer_fingerprint(tokenizer) == hashlib.sha256(pairs.encode()).hexdigest()
    assert tokenizer_fingerprint({"b": 2, "<unk>": 0, "a": 1}) == tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint({"b": 1, "<unk>": 0, "a": 2}) != tokenizer_fingerprint(tokenizer)


def test_models_in_memory_carry_their_sources_spec(target):
    spec = routing_spec_of(target)
    model = built(qwen3_moe, seed=3)
    carry_routing_spec(model, spec)
    assert routing_spec_of_model(copy.deepcopy(model).bfloat16()) == spec
    loaded = Qwen3MoeForCausalLM.from_pretrained(target)
    assert routing_spec_of_model(loaded).target_id == str(target)
    fresh = built(qwen3_moe)
    tokenizer = {"<unk>": 0, "a": 1, "b": 2}
    assert routing_spec_of_model(fresh, tokenizer).differences(spec) == []
    with pytest.raises(ValueError, match="built in memory; attach its source's spec"):
        routing_spec_of_model(fresh)


def test_embedding_read_from_files(target):
    expected = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_target_embedding(target), expected)
    assert load_target_embedding(target, dtype=torch.float64).dtype == torch.float64


def test_wrong_paths_and_folders(target, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*nowhere does not exist"):
        target_fingerprint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is a file; give the checkpoint folder"):
        target_fingerprint(target / "config.json")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        target_fingerprint(tmp_path)
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="has no safetensors files"):
        target_fingerprint(target)
    (target / "model.safetensors").write_bytes(b"\x00" * 32)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        target_fingerprint(target)


def test_missing_shard_and_broken_index(tmp_path):
    built(qwen3_moe).save_pretrained(tmp_path, max_shard_size="10KB")
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="which is missing; complete the download"):
        target_fingerprint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="not a safetensors index"):
        target_fingerprint(tmp_path)


def test_targets_that_are_no_moe(tmp_path):
    dense = {key: value for key, value in COMMON.items() if key != "num_experts_per_tok"}
    Qwen3ForCausalLM(Qwen3Config(**dense)).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="no MoE target: family 'qwen3' states no number of experts"):
        target_fingerprint(tmp_path / "dense")
    built(qwen3_moe, mlp_only_layers=[0, 1, 2]).save_pretrained(tmp_path / "all_dense")
    with pytest.raises(ValueError, match="no MoE layers: found no router of 8 rows"):
        target_fingerprint(tmp_path / "all_dense")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "jetmoe"}, "family 'jetmoe' is not supported: its attention has experts"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_local_experts": [8, 8]}, "num_local_experts differs by layer"),
    ],
)
def test_families_that_do_not_fit(changes, message):
    model = built(qwen3_moe)

    class Config:
        model_type = "qwen3_moe"
        num_local_experts = 8
        num_experts_per_tok = 2

    for name, value in changes.items():
        setattr(Config, name, value)
    with pytest.raises(ValueError, match=message):
        fingerprint_of_state(Config(), model.state_dict())


def test_unknown_family_and_missing_tokenizer(target, tmp_path):
    for path in target.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        routing_spec_of(target)
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no readable tokenizer"):
        routing_spec_of(target)
    edit(target, model_type="no_such_family")
    with pytest.raises(ValueError, match=r"config\.json: transformers cannot read it") as error:
        target_fingerprint(target)
    assert "\n" not in str(error.value)


def test_two_routers_in_a_layer_and_quantised_routers():
    model = built(qwen3_moe)
    state = model.state_dict()
    with pytest.raises(ValueError, match="layer 0 has two routers"):
        fingerprint_of_state(model.config, {**state, "model.layers.0.moe.router.weight": torch.randn(8, 16)})
    state["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match="use a checkpoint with float routers"):
        fingerprint_of_state(model.config, state)


def test_spec_fits_other_parts(target):
    with pytest.raises(ValueError, match="was made for another target"):
        routing_spec_of(target).require_same(SPEC, mine="target", theirs="predictor")
