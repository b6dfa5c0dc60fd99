"""Tiny targets and token ids for tests of the recorder."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 97


def qwen3(**changes):
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**values | changes))


def gpt_oss():
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=16,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=16,
            max_position_embeddings=128,
        )
    )


def ids(batch=2, tokens=9, seed=0):
    return torch.randint(VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))
