"""Tiny targets of three families with a word-level tokenizer, and what they do with one sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ecospec.trace_collection.hooks import RoutingRecorder
from ecospec.trace_collection.prompts import Prompt

WORDS = [f"w{i}" for i in range(60)]
EOS = 61
VOCAB = 62


def make_tokenizer():
    vocab = {word: i for i, word in enumerate(WORDS)} | {"<unk>": 60, "<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def make_target(family="qwen3", positions=96):
    torch.manual_seed(3)
    model: Any
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "max_position_embeddings": positions,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shared, intermediate_size=48, num_experts=8, moe_intermediate_size=16, norm_topk_prob=True
            )
        )
    elif family == "deepseek":
        shared |= {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3}
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **shared,
                intermediate_size=48,
                moe_intermediate_size=16,
                n_routed_experts=8,
                n_shared_experts=1,
                n_group=4,
                topk_group=2,
                first_k_dense_replace=1,
                q_lora_rank=16,
                kv_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
            )
        )
    else:
        model = GptOssForCausalLM(
            GptOssConfig(
                **shared, intermediate_size=16, num_local_experts=8, sliding_window=16, initial_context_length=96
            )
        )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)  # peaked enough that no argmax is a near tie
    return model.eval()


def doubled(model):
    model.double().set_experts_implementation("eager")  # grouped_mm knows no float64
    return model


def texts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, size=length)) for length in lengths]
    return [Prompt(f"set{i % 2}", f"group{i}", text=line) for i, line in enumerate(lines)]


def alone(model, tokens):
    """Sets of experts of every token, from one forward of the sequence without any batch."""
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        logits = model(torch.tensor(tokens)[None].long()).logits[0]
        return logits, recorder.take().experts.numpy()
