"""The network: what it reads, its head, its backbones from scratch and from pretrained files."""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from ecospec.predictor import BACKBONE_PRESETS, ExpertPredictor, RoutingPredictorModel, backbone_config
from ecospec.predictor.backbones import load_backbone
from ecospec.predictor.fingerprint import tokenizer_fingerprint
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.tree_session import TreeSession, require_tree_scoring
from tests.predictor_fakes import BACKBONE, EMBEDDING_SIZE, SPEC, embedding_table

IDS = torch.arange(6).unsqueeze(0)
WORDS = {f"w{i}": i for i in range(SPEC.vocab_size)}
SAME_VOCABULARY = RoutingSpec.from_dict(SPEC.to_dict() | {"tokenizer_fingerprint": tokenizer_fingerprint(WORDS)})


def small(preset, **changes):
    """A preset's architecture with small sizes; everything else as published."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 48}
    if "head_dim" in BACKBONE_PRESETS[preset]:
        sizes["head_dim"] = 16
    return {**BACKBONE_PRESETS[preset], **sizes, **changes}


def save_backbone(path, preset="qwen3-0.6b", words=WORDS, **changes):
    """A causal LM with LM head and tokenizer, as it is published."""
    torch.manual_seed(3)
    values = small(preset, **changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return model.eval()


def target_model(**options):
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "backbone": BACKBONE,
        "embedding_size": EMBEDDING_SIZE,
        "target_embedding": embedding_table(),
    }
    return RoutingPredictorModel(SPEC, **(fields | options)).eval()


def own_model(**options):
    torch.manual_seed(0)
    fields: dict[str, Any] = {"backbone": BACKBONE, "input_mode": "backbone_embedding"}
    return RoutingPredictorModel(SPEC, **(fields | options)).eval()


# ---- backbones from their configuration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("qwen3-06b", "unknown backbone preset 'qwen3-06b'; did you mean 'qwen3-0.6b'. allowed: tiny, qwen3-0.6b"),
        ({"hidden_size": 8}, "no model_type"),
        ({"model_type": "no_such_family"}, "model_type 'no_such_family'"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba"}, "no attention heads"),
        ({"model_type": "vit"}, "'vit' is no causal LM"),
        ({"model_type": "mpt"}, "'mpt' takes no position_ids, so it cannot score draft trees"),
        ({"model_type": "gpt_oss"}, "sliding_attention layers; only full attention"),
        ({"model_type": "mistral"}, "sliding_attention layers"),
        ({"model_type": "gpt_neo"}, "local layers"),
        (
            {**BACKBONE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'dynamic' depends on the longest position",
        ),
    ],
)
def test_backbones_that_cannot_score_trees_are_refused(backbone, message):
    with pytest.raises(ValueError, match=message) as error:
        backbone_config(backbone)
    assert "\n" not in str(error.value)


def test_presets_are_the_published_networks():
    """Parameters of the built presets, counted without allocating them, against counts from the shapes by hand."""
    expected = {}
    # Per layer: q, k, v, o projections (Qwen2: biases of q, k, v), three MLP matrices, norms (Qwen3: also of q, k).
    expected["qwen3-0.6b"] = 28 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128)
    attention = 1536 * (1536 + 256 + 256) + (1536 + 256 + 256) + 1536 * 1536
    expected["deepseek-r1-distill-qwen-1.5b"] = 28 * (attention + 3 * 1536 * 8960 + 2 * 1536)
    for preset, layers in expected.items():
        config = backbone_config(preset)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        table = config["vocab_size"] * config["hidden_size"]
        embeddings = table if config["tie_word_embeddings"] else 2 * table
        assert sum(p.numel() for p in network.parameters()) == layers + config["hidden_size"] + embeddings
    assert backbone_config("qwen3-0.6b")["rope_parameters"]["rope_theta"] == 1e6
    assert backbone_config("deepseek-r1-distill-qwen-1.5b")["rope_parameters"]["rope_theta"] == 1e4


FAMILIES = [
    "qwen3",
    "qwen2",
    "llama",
    "gemma",
    "gpt2",
    "gpt_neox",
    "opt",
    "phi3",
    "olmo2",
    "cohere",
    "stablelm",
    "glm4",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_score_trees_as_plain_forward_passes_do(family):
    changes = {"opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}}.get(family, {})
    head = {"head_dim": 8} if family in {"qwen3", "glm4", "gemma"} else {}
    backbone = {key: value for key, value in BACKBONE.items() if key != "head_dim"}
    model = target_model(backbone={**backbone, **head, **changes, "model_type": family}).double()
    require_tree_scoring(model, 1e-9)
    assert model.embed(IDS).shape == (1, 6, EMBEDDING_SIZE)
    assert not model.training


def test_a_family_that_is_silently_wrong_is_found(monkeypatch):
    with pytest.raises(ValueError, match="backbone family 'bert' cannot score draft trees: "):
        require_tree_scoring(target_model(backbone=BACKBONE | {"model_type": "bert"}))
    model = target_model()
    require_tree_scoring(model)
    with monkeypatch.context() as patch:
        patch.setattr(TreeSession, "_tree_mask", lambda self, on_path: None)
        with pytest.raises(ValueError, match="'qwen3' cannot score draft trees: with a tree mask and a KV cache"):
            require_tree_scoring(model)
    original = model.backbone.forward
    monkeypatch.setattr(
        model.backbone, "forward", lambda position_ids=None, **rest: original(position_ids=None, **rest)
    )
    with pytest.raises(ValueError, match="'qwen3' cannot score draft trees"):
        require_tree_scoring(model)


# ---- input modes ------------------------------------------------------------------------------------------------


def test_input_modes_are_checked():
    with pytest.raises(
        ValueError, match="unknown input_mode 'pixels'; allowed: target_embedding, backbone_embedding"
    ):
        target_model(input_mode="pixels")
    for size in (0, None, True):
        with pytest.raises(ValueError, match="embedding_size must be a positive integer"):
            RoutingPredictorModel(SPEC, backbone=BACKBONE, embedding_size=size)
    with pytest.raises(ValueError, match="embedding_size must be None with input_mode 'backbone_embedding'"):
        own_model(embedding_size=4)
    with pytest.raises(ValueError, match="either token ids or embeddings"):
        target_model()()


def test_backbones_own_embedding_is_part_of_the_predictor(tmp_path):
    model = own_model()
    names = [name for name in model.state_dict() if "embed" in name or "projection" in name]
    assert names == ["backbone.embed_tokens.weight"]
    assert model.embed(IDS).shape == (1, 6, BACKBONE["hidden_size"])
    assert torch.equal(model.embed(IDS)[0], model.state_dict()[names[0]][:6])
    predictor = ExpertPredictor.from_model(model)
    predictor.set_target_embedding(torch.zeros(1, 1))  # not looked at: whoever loads need not know the mode
    expected = model.backbone(input_ids=IDS).last_hidden_state @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(predictor.score_batch(IDS).flatten(2), expected)
    predictor.save_pretrained(tmp_path / "bundle")
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert "over its own token embeddings" in card
    assert "get_input_embeddings" not in card
    loaded = ExpertPredictor.from_pretrained(tmp_path / "bundle", target_embedding=embedding_table())
    assert torch.equal(loaded.score_batch(IDS), predictor.score_batch(IDS))
    require_tree_scoring(loaded.model)
    with pytest.raises(ValueError, match="reads its own embedding, which is always stored"):
        predictor.save_pretrained(tmp_path / "never", store_embedding=True)


def test_from_scratch_the_own_embedding_has_the_targets_vocabulary():
    torch.manual_seed(0)
    model = RoutingPredictorModel(SPEC, backbone="tiny", input_mode="backbone_embedding")
    assert model.state_dict()["backbone.embed_tokens.weight"].shape == (SPEC.vocab_size, 192)
    assert model.backbone_config["vocab_size"] == SPEC.vocab_size
    with pytest.raises(
        ValueError, match=r"embedding has 39 tokens, target tiny has 40; use input_mode 'target_emb"
    ):
        own_model(backbone=BACKBONE | {"vocab_size": 39})


# ---- the target's embedding: sharded, offloaded, wrapped ---------------------------------------------------------


class Sharded(nn.Module):
    """An embedding spread over devices: its own weight must not be read, only the module called."""

    def __init__(self, table):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape
        self._shards = [nn.Parameter(part, requires_grad=False) for part in table.chunk(3)]

    @property
    def weight(self):
        raise RuntimeError("reading the weight of a sharded embedding would gather it")

    def forward(self, ids):
        return torch.cat([*self._shards])[ids]


def test_sharded_embeddings_are_called_and_their_weight_never_read():
    model, plain = target_model(target_embedding=Sharded(embedding_table())), target_model()
    assert torch.equal(model(IDS), plain(IDS))
    with pytest.raises(ValueError, match=r"embedding is \(39, 12\), this predictor was made for \(40, 12\)"):
        model.set_target_embedding(Sharded(embedding_table()[:39]))
    with pytest.raises(ValueError, match="needs the whole embedding table; pass it as a tensor"):
        ExpertPredictor.from_model(model).bundle_tensors(store_embedding=True)


def test_offloaded_embeddings_are_called_through_their_hooks():
    class Offloaded(nn.Embedding):
        def forward(self, ids):
            return nn.functional.embedding(ids, embedding_table())

    module = Offloaded(SPEC.vocab_size, EMBEDDING_SIZE, device="meta")
    assert torch.equal(target_model(target_embedding=module)(IDS), target_model()(IDS))


class Failing(nn.Module):
    def forward(self, ids):
        raise RuntimeError("got mixed torch.Tensor and DTensor")


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (
            nn.Embedding(40, EMBEDDING_SIZE, device="meta"),
            r"holds no data \(meta device\) and no hook loads it; pass",
        ),
        (torch.empty(40, EMBEDDING_SIZE, device="meta"), r"table holds no data \(meta device\); load it, or pass"),
        (Failing(), r"cannot be called \(got mixed torch.Tensor and DTensor\); pass get_input_embeddings"),
        (nn.Embedding(40, 5), r"embedding is \(40, 5\), this predictor was made for \(40, 12\)"),
        (nn.Sequential(nn.Embedding(40, 5)), r"embedding is \(40, 5\), this predictor was made for \(40, 12\)"),
    ],
)
def test_embeddings_that_cannot_answer_are_refused_when_given(embedding, message):
    with pytest.raises(ValueError, match=message):
        target_model(target_embedding=embedding)


def test_dtensor_tables_are_refused_and_dtensor_modules_called(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match="sharded over devices, so no row can be looked up; pass the module"):
            target_model(target_embedding=distribute_tensor(embedding_table(), mesh, [Shard(0)]))
        from torch.distributed.tensor import Replicate

        module = nn.Embedding.from_pretrained(embedding_table())
        # As transformers' tp_plan does it: the vocabulary is sharded, and the output stays a DTensor.
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=False)
        parallelize_module(module, mesh, plan)
        torch.testing.assert_close(target_model(target_embedding=module)(IDS), target_model()(IDS))
    finally:
        distributed.destroy_process_group()


# ---- head -------------------------------------------------------------------------------------------------------


def test_low_rank_head_is_one_product_for_all_layers(tmp_path):
    model = target_model(head_rank=5)
    assert model.head_down is not None
    product = model.head.weight @ model.head_down.weight
    assert product.shape == (SPEC.num_layers * SPEC.num_experts, BACKBONE["hidden_size"])
    assert torch.linalg.matrix_rank(product) == 5
    states = torch.randn(2, 7, model.head_down.in_features)
    expected = (states @ product.T + model.head.bias).view(2, 7, SPEC.num_layers, SPEC.num_experts)
    torch.testing.assert_close(model.heads(states), expected)
    ExpertPredictor.from_model(model).save_pretrained(tmp_path / "bundle")
    assert json.loads((tmp_path / "bundle" / "config.json").read_text())["head_rank"] == 5
    loaded = ExpertPredictor.from_pretrained(tmp_path / "bundle", target_embedding=embedding_table())
    assert torch.equal(loaded.model(IDS), model(IDS))
    for rank in (0, 24, 99):
        with pytest.raises(
            ValueError, match=f"head_rank must lie between 1 and 23 for a head of 32 x 24, got {rank}"
        ):
            target_model(head_rank=rank)


# ---- pretrained backbones ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["qwen3-0.6b", "deepseek-r1-distill-qwen-1.5b"])
def test_pretrained_backbones_of_the_paper_load_from_a_saved_causal_lm(tmp_path, preset):
    saved = save_backbone(tmp_path, preset)
    assert isinstance(saved, Qwen3ForCausalLM if "qwen3" in preset else Qwen2ForCausalLM)
    model = RoutingPredictorModel.from_pretrained_backbone(
        SPEC, tmp_path, embedding_size=EMBEDDING_SIZE, target_embedding=embedding_table()
    ).eval()
    assert not [name for name in model.state_dict() if "embed_tokens" in name or "lm_head" in name]
    inputs = torch.randn(1, 5, 32)
    expected = saved.model(inputs_embeds=inputs).last_hidden_state
    assert torch.equal(model.backbone(inputs_embeds=inputs).last_hidden_state, expected)
    assert model.backbone_config["model_type"] == saved.config.model_type
    projected = model.project(model.embed(torch.arange(40).unsqueeze(0))).detach()
    table = saved.get_input_embeddings().weight.detach()
    assert 0.8 < float(projected.square().mean().sqrt() / table.square().mean().sqrt()) < 1.25
    require_tree_scoring(model)
    ExpertPredictor.from_model(model).save_pretrained(tmp_path / "bundle")
    loaded = ExpertPredictor.from_pretrained(tmp_path / "bundle", target_embedding=embedding_table())
    assert torch.equal(loaded.model(IDS), model(IDS))


def test_pretrained_backbone_reads_its_own_embedding_where_the_vocabularies_are_identical(tmp_path):
    saved = save_backbone(tmp_path / "same")
    model = RoutingPredictorModel.from_pretrained_backbone(
        SAME_VOCABULARY, tmp_path / "same", input_mode="backbone_embedding", dtype=torch.bfloat16
    )
    assert model.head.weight.dtype == model.backbone.get_parameter("embed_tokens.weight").dtype == torch.bfloat16
    table = saved.get_input_embeddings().weight.detach().bfloat16()
    assert torch.equal(model.embed(IDS)[0], table[:6])  # 48 rows: padded as published, the target has 40
    with pytest.raises(
        ValueError, match=r"needs one vocabulary; the tokenizer of backbone .*same is not that of target"
    ):
        RoutingPredictorModel.from_pretrained_backbone(SPEC, tmp_path / "same", input_mode="backbone_embedding")
    save_backbone(tmp_path / "short", vocab_size=20)
    with pytest.raises(ValueError, match="embedding has 20 tokens, target tiny has 40"):
        RoutingPredictorModel.from_pretrained_backbone(
            SAME_VOCABULARY, tmp_path / "short", input_mode="backbone_embedding"
        )
    (tmp_path / "short" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"short: no tokenizer \(.*tokenizer.json"):
        RoutingPredictorModel.from_pretrained_backbone(
            SAME_VOCABULARY, tmp_path / "short", input_mode="backbone_embedding"
        )


def test_what_holds_no_causal_lm_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cases: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "nowhere", FileNotFoundError, "backbone .*nowhere")
    ]
    cases.append(
        ("Qwen/Qwen3-0.6B", FileNotFoundError, "backbone Qwen/Qwen3-0.6B: .*; download it where there is a net")
    )
    (tmp_path / "empty").mkdir()
    cases.append(
        (tmp_path / "empty", FileNotFoundError, r"empty has no config\.json; give a folder that holds a causal LM")
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "vit"}')
    cases.append((tmp_path / "other", ValueError, "backbone family 'vit' is no causal LM"))
    save_backbone(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    cases.append((tmp_path / "bare", FileNotFoundError, "backbone .*bare: .*model.safetensors"))
    save_backbone(tmp_path / "half")
    weights = tmp_path / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    cases.append((tmp_path / "half", FileNotFoundError, "backbone .*half: "))
    save_backbone(tmp_path / "lacking")
    deeper = json.loads((tmp_path / "lacking" / "config.json").read_text())
    deeper |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "lacking" / "config.json").write_text(json.dumps(deeper))
    cases.append((tmp_path / "lacking", FileNotFoundError, r"weights lack 'layers\.2.*\d+ are missing"))
    for path, kind, message in cases:
        with pytest.raises(kind, match=message) as error:
            load_backbone(path, torch.float32)
        assert "\n" not in str(error.value)


def test_base_models_without_a_head_load_too(tmp_path):
    config = Qwen2Config(**{k: v for k, v in small("deepseek-r1-distill-qwen-1.5b").items() if k != "model_type"})
    Qwen2ForCausalLM(config).model.save_pretrained(tmp_path)
    module = load_backbone(tmp_path, torch.float64).module
    assert module.get_parameter("layers.0.mlp.up_proj.weight").dtype == torch.float64
