"""The EAGLE-3 head: layout, file checks, draft vocabulary, rotary tables, training-time unrolling."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ecospec.decoding.drafters.eagle3 import Eagle3Head
from ecospec.decoding.drafters.eagle3_config import Eagle3Config
from ecospec.decoding.drafters.eagle3_layers import RotaryTable

CONFIG = Eagle3Config(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=10,
    aux_layers=(0, 1, 3),
)


def make_head(*, own_embedding=False, dtype=torch.float64, seed=0, config=CONFIG):
    torch.manual_seed(seed)
    embedding = None if own_embedding else nn.Embedding(config.vocab_size, config.hidden_size)
    head = Eagle3Head(config, embedding).to(dtype)
    head.set_draft_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return head


def saved(tmp_path, **options):
    head = make_head(**options)
    head.save_pretrained(tmp_path / "head", dtype=torch.float64)
    return head, tmp_path / "head"


def test_tensors_are_specforge_s():
    shapes = {name: tuple(tensor.shape) for name, tensor in make_head().state_dict().items()}
    assert shapes == {
        "d2t": (10,),
        "t2d": (40,),
        "fc.weight": (16, 48),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (32, 32),
        "midlayer.self_attn.k_proj.weight": (16, 32),
        "midlayer.self_attn.v_proj.weight": (16, 32),
        "midlayer.self_attn.o_proj.weight": (16, 32),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (10, 16),
    }
    assert "embed_tokens.weight" in make_head(own_embedding=True).state_dict()


def test_draft_vocabulary_is_an_offset():
    head = make_head()
    ids = torch.tensor([1, 2, 5, 8, 13, 21, 30, 37, 38, 39])
    head.set_draft_vocabulary(ids)
    assert torch.equal(head.draft_vocabulary, ids)
    assert head.d2t.tolist() == [1, 1, 3, 5, 9, 16, 24, 30, 30, 30]
    assert torch.equal(head.t2d.nonzero().flatten(), ids)
    for bad, message in (
        (ids[:9], "draft_vocab_size is 10"),
        (ids.flip(0), "ascending"),
        (ids + 5, "from 0 to 39"),
    ):
        with pytest.raises(ValueError, match=message):
            head.set_draft_vocabulary(bad)


@pytest.mark.parametrize("own_embedding", [False, True])
def test_round_trip(tmp_path, own_embedding):
    head, folder = saved(tmp_path, own_embedding=own_embedding)
    target_embedding = None if own_embedding else head._shared[0]
    loaded = Eagle3Head.from_pretrained(folder, target_embedding)
    assert loaded.config == CONFIG
    assert loaded.shares_embedding is not own_embedding
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert set(loaded.state_dict()) == set(head.state_dict())
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    if not own_embedding:
        assert loaded._shared[0] is target_embedding
        assert target_embedding.weight.requires_grad  # the target's own module is left as it was
    ids, aux = torch.randint(0, 40, (1, 9)), torch.randn(1, 9, 48, dtype=torch.float64)
    for ours, theirs in zip(loaded.unroll(ids, aux), head.unroll(ids, aux), strict=True):
        assert torch.equal(ours, theirs)


def test_stored_types(tmp_path):
    head = make_head(dtype=torch.float32)
    head.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: t.dtype for name, t in tensors.items() if t.dtype != torch.bfloat16} == {
        "d2t": torch.int64,
        "t2d": torch.bool,
    }
    loaded = Eagle3Head.from_pretrained(tmp_path, head._shared[0], dtype=torch.float32)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.draft_vocabulary, head.draft_vocabulary)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert raw["torch_dtype"] == "bfloat16"


def test_accepts_model_prefix(tmp_path):
    head, folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(Eagle3Head.from_pretrained(folder, head._shared[0]).fc.weight, head.fc.weight)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), r"tensor norm\.weight is missing"),
        (drop("d2t"), "tensor d2t is missing"),
        (put("fc_norm.0.weight", torch.ones(4)), r"unexpected tensor fc_norm\.0\.weight"),
        (
            put("lm_head.weight", torch.ones(9, 16)),
            r"lm_head\.weight has shape \[9, 16\], config\.json asks for \[10, 16\]",
        ),
        (put("t2d", torch.ones(40)), r"t2d is torch\.float32, allowed: torch\.bool"),
        (put("d2t", torch.zeros(10, dtype=torch.int64)), "d2t .* and t2d name different tokens"),
    ],
)
def test_damaged_tensors(tmp_path, change, message):
    head, folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        Eagle3Head.from_pretrained(folder, head._shared[0])
    assert "\n" not in str(caught.value)


def test_drafter_of_another_vocabulary(tmp_path):
    _, folder = saved(tmp_path)
    with pytest.raises(ValueError, match="made for a target of vocabulary 40, this target has 44"):
        Eagle3Head.from_pretrained(folder, nn.Embedding(44, 16))
    with pytest.raises(ValueError, match="embedding of width 16, the target's has 20"):
        Eagle3Head.from_pretrained(folder, nn.Embedding(40, 20))
    with pytest.raises(ValueError, match="stores no embedding; pass the target's"):
        Eagle3Head.from_pretrained(folder)


def test_require_target():
    config = dataclasses.replace(CONFIG, identity={"target_fingerprint": "aa"})
    target = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4}
    config.require_target(SimpleNamespace(**target))
    config.require_target(SimpleNamespace(**target), identity={"target_fingerprint": "aa"})
    for change, message in (
        ({"vocab_size": 41}, "vocabulary 40, this target has 41"),
        ({"hidden_size": 17}, "hidden size 16, this target has 17"),
        ({"num_hidden_layers": 3}, "reads the output of layer 3, this target has layers 0 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            config.require_target(SimpleNamespace(**(target | change)))
    with pytest.raises(ValueError, match="target_fingerprint is aa there, bb here"):
        config.require_target(SimpleNamespace(**target), identity={"target_fingerprint": "bb"})


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Eagle3Head.from_pretrained(tmp_path / "nothing")
    _, folder = saved(tmp_path)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Eagle3Head.from_pretrained(folder, nn.Embedding(40, 16))
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        Eagle3Head.from_pretrained(folder, nn.Embedding(40, 16))
    (folder / "model.safetensors").touch()
    for text, message in (("{", "not a JSON file"), ("[]", "expected a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Eagle3Head.from_pretrained(folder, nn.Embedding(40, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "'LlamaForCausalLM' is no EAGLE-3 head this version reads; allowed",
        ),
        ({"eagle_config": None}, "eagle_aux_hidden_state_layer_ids is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}}, "ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "must be a list"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; allowed: 'silu'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 exceeds vocab_size 40"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": "16"}, "hidden_size must be a positive integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; allowed: default"),
    ],
)
def test_refused_configs(tmp_path, change, message):
    _, folder = saved(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        Eagle3Head.from_pretrained(folder, nn.Embedding(40, 16))


def test_config_without_optional_entries():
    raw = CONFIG.to_dict()
    for name in ("target_hidden_size", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act"):
        del raw[name]
    assert Eagle3Config.from_dict(raw | {"unknown": 1, "head_dim": None}) == dataclasses.replace(CONFIG, head_dim=4)
    del raw["vocab_size"]
    with pytest.raises(ValueError, match=r"x\.json: vocab_size is missing"):
        Eagle3Config.from_dict(raw, "x.json")


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_rotary_tables_equal_transformers(scaling):
    config = dataclasses.replace(CONFIG, rope_theta=5000.0, rope_scaling=scaling)
    llama = LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5000.0},
    )
    positions = torch.arange(100)
    cosine, sine = RotaryTable(config)(positions, torch.float32)
    expected = LlamaRotaryEmbedding(llama)(torch.zeros(1, 100, 16), positions[None])
    torch.testing.assert_close(cosine, expected[0][0])
    torch.testing.assert_close(sine, expected[1][0])


def norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def reference_row(head, token, feature, position, cache):
    """One row of the head, written out; appends its key and value to the cache, returns its hidden state."""
    w = head.state_dict()
    name = "midlayer.self_attn."
    embedded = head.embed(token)
    x = torch.cat(
        (norm(embedded, w["midlayer.input_layernorm.weight"]), norm(feature, w["midlayer.hidden_norm.weight"]))
    )
    cosine, sine = head.rotary(torch.tensor([position]), x.dtype)

    def rotated(y):
        pairs = [
            y[..., :4] * cosine[0, :4] - y[..., 4:] * sine[0, :4],
            y[..., 4:] * cosine[0, :4] + y[..., :4] * sine[0, :4],
        ]
        return torch.cat(pairs, -1)

    q = rotated((w[name + "q_proj.weight"] @ x).view(4, 8))
    cache.append((rotated((w[name + "k_proj.weight"] @ x).view(2, 8)), (w[name + "v_proj.weight"] @ x).view(2, 8)))
    mixed = []
    for h in range(4):
        scores = torch.stack([q[h] @ k[h // 2] for k, _ in cache]) / 8**0.5
        mixed.append(sum(p * v[h // 2] for p, (_, v) in zip(scores.softmax(0), cache, strict=True)))
    hidden = feature + w[name + "o_proj.weight"] @ torch.cat(mixed)
    y = norm(hidden, w["midlayer.post_attention_layernorm.weight"])
    gated = F.silu(w["midlayer.mlp.gate_proj.weight"] @ y) * (w["midlayer.mlp.up_proj.weight"] @ y)
    return hidden + w["midlayer.mlp.down_proj.weight"] @ gated


def test_unroll_equals_a_row_by_row_reference():
    """Step k of base t sees target-processed rows up to t, then the head's own rows of that base, up to t + k."""
    head = make_head()
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    ids, aux = torch.randint(0, 40, (2, 10)), torch.randn(2, 10, 48, dtype=torch.float64)
    with torch.no_grad():
        unrolled = head.unroll(ids, aux, steps=3)
        assert [tuple(logits.shape) for logits in unrolled] == [(2, 7, 10)] * 3
        for b in range(2):
            cache: list[tuple[torch.Tensor, torch.Tensor]] = []
            for t in range(7):
                hidden = reference_row(head, ids[b, t + 1], head.fc.weight @ aux[b, t], t, cache)
                own = list(cache)
                for step in range(3):
                    if step:
                        hidden = reference_row(head, ids[b, t + 1 + step], hidden, t + step, own)
                    expected = head.lm_head.weight @ norm(hidden, head.norm.weight)
                    torch.testing.assert_close(unrolled[step][b, t], expected, rtol=1e-10, atol=1e-10)


def test_unroll_needs_enough_tokens():
    with pytest.raises(ValueError, match="unrolling 3 steps"):
        make_head().unroll(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, 48, dtype=torch.float64))


def test_every_weight_is_trained():
    head = make_head()
    ids, aux = torch.randint(0, 40, (2, 12)), torch.randn(2, 12, 48, dtype=torch.float64)
    sum(logits.log_softmax(-1)[..., 0].sum() for logits in head.unroll(ids, aux)).backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in head.parameters())
