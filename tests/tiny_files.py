"""Tiny artefacts on disk: a target with tokenizer, an EAGLE-3 head, a predictor bundle, a manifest of prompts."""

from __future__ import annotations

import json

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ecospec.decoding.drafters import Eagle3Config, Eagle3Head
from ecospec.predictor.bundle import ExpertPredictor
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.train.arrays import TraceArrays
from ecospec.train.baselines import fit_baselines, save_baselines

VOCAB, LAYERS, EXPERTS, TOP_K, HIDDEN = 40, 3, 8, 2, 16


def save_target(path, seed=0, layers=LAYERS):
    """A random Qwen3-MoE with a word-level tokenizer of ``w0`` … ``w39``."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def save_head(path, target, seed=1):
    """A random EAGLE-3 head for a target of `save_target`."""
    torch.manual_seed(seed)
    spec = routing_spec_of(target)
    config = Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layers=(0, 1, 2),
        identity={
            "tokenizer_fingerprint": spec.tokenizer_fingerprint,
            "target_fingerprint": spec.target_fingerprint,
        },
    )
    head = Eagle3Head(
        config, torch.nn.Embedding.from_pretrained(load_target_embedding(target, dtype=torch.float32))
    )
    head.save_pretrained(path, dtype=torch.float32)
    return path


def save_predictor(path, target, seed=2):
    """A random neural predictor for a target of `save_target`."""
    torch.manual_seed(seed)
    backbone = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    backbone |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "vocab_size": VOCAB}
    model = RoutingPredictorModel(
        routing_spec_of(target),
        backbone=backbone,
        embedding_size=HIDDEN,
        target_embedding=load_target_embedding(target, dtype=torch.float32),
    )
    ExpertPredictor.from_model(model.eval()).save_pretrained(path)
    return path


def save_tables(path, target, seed=4):
    """Table baselines of random traces of a target of `save_target`, as in ``checkpoints/tables``."""
    spec = routing_spec_of(target)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, 400, dtype=np.int32)
    experts = np.sort(np.argsort(rng.random((400, LAYERS, EXPERTS)))[..., :TOP_K]).astype(np.uint8)
    offsets = np.array([0, 200, 400], dtype=np.int64)
    save_baselines(fit_baselines(TraceArrays(spec, tokens, experts, offsets, ("t0", "t1"), ("d", "d"))), path)
    return path


def save_prompts(path, count, seed, length=(8, 14), layout="prompt"):
    """A ``.jsonl`` file of random prompts (or, with layout ``text``, documents) of two datasets."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for index in range(count):
        size = int(torch.randint(length[0], length[1], (1,), generator=generator))
        words = torch.randint(0, VOCAB, (size,), generator=generator).tolist()
        record = {
            layout: " ".join(f"w{i}" for i in words),
            "dataset": f"set{index % 2}",
            "group_id": f"{seed}-{index}",
        }
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    return path
