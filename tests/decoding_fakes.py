"""Tiny random targets, a drafter and a predictor whose proposals are plain functions of the prefix."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ecospec.decoding.tree import DraftTree
from ecospec.predictor.routing_spec import RoutingSpec

VOCAB = 64
WINDOW = 16


def tiny_target(family: str, dtype: torch.dtype = torch.float64, seed: int = 0):
    """Build a random target in eval mode; weights are large enough that logits and routing are far from ties."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "initializer_range": 0.4,
        "max_position_embeddings": 256,
    }
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(
            **common,
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=8,
            moe_intermediate_size=16,
        )
        config._attn_implementation = "sdpa"
        model = Qwen3MoeForCausalLM(config)
    elif family == "deepseek_v3":
        config = DeepseekV3Config(
            **common,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            moe_intermediate_size=16,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            rope_scaling=None,
        )
        config._attn_implementation = "sdpa"
        model = DeepseekV3ForCausalLM(config)
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    elif family == "gpt_oss":
        config = GptOssConfig(
            **common,
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
        config._attn_implementation = "eager"
        model = GptOssForCausalLM(config)
    else:
        raise ValueError(family)
    model.set_experts_implementation("eager")  # grouped_mm knows no float64
    return model.to(dtype).eval()


def random_tree(size: int, rng: random.Random, *, ties: bool = False) -> DraftTree:
    """Build a random tree; with ``ties`` many log-probabilities coincide."""
    parents, logprobs, depths = [-1], [0.0], [0]
    for node in range(1, size):
        parent = rng.randrange(node)
        step = rng.choice([0.0, 0.5, 1.0]) if ties else rng.random() * 3
        parents.append(parent)
        depths.append(depths[parent] + 1)
        logprobs.append(logprobs[parent] - step)
    # Siblings carry different tokens, as a drafter's do.
    tokens = rng.sample(range(VOCAB), size)
    return DraftTree(
        torch.tensor(tokens),
        torch.tensor(parents),
        torch.tensor(logprobs, dtype=torch.float32),
        torch.tensor(depths),
    )


class ScriptedDrafter:
    """Proposes the scripted next token most of the time, beside a token hashed from the prefix.

    The script is a prompt with its plain continuation, so acceptance is neither none nor all. Everything is a
    function of the processed tokens, the root and the script.
    """

    def __init__(self, script: list[int], aux_layers: tuple[int, ...] = (), hit_rate: float = 0.7) -> None:
        self.script = script
        self.required_aux_layers = aux_layers
        self.hit_rate = hit_rate
        self.processed: list[int] = []
        self.aux: list[Tensor] = []

    def prefill(self, ids: Tensor, aux_hidden: Tensor) -> None:
        self.extend(ids, aux_hidden)

    def extend(self, ids: Tensor, aux_hidden: Tensor) -> None:
        assert ids.dtype == torch.int64
        assert aux_hidden.shape[0] == ids.shape[0]
        self.processed += ids.tolist()
        self.aux.append(aux_hidden.clone())

    def reset(self) -> None:
        self.processed, self.aux = [], []

    def draft(self, root_token: Tensor, *, depth: int = 3, top_k: int = 2, beam: int = 2) -> DraftTree:
        prefix = [*self.processed, int(root_token)]
        tokens, parents, logprobs, depths = [prefix[-1]], [-1], [0.0], [0]
        paths, level = {0: prefix}, [0]
        for step in range(1, depth + 1):
            children = []
            for parent in sorted(level, key=lambda node: -logprobs[node])[:beam]:
                rng = random.Random(hash(tuple(paths[parent])))
                for token, drop in self._proposals(paths[parent], rng, top_k):
                    children.append(len(tokens))
                    paths[len(tokens)] = [*paths[parent], token]
                    tokens.append(token)
                    parents.append(parent)
                    logprobs.append(logprobs[parent] - drop)
                    depths.append(step)
            level = children
        return DraftTree(
            torch.tensor(tokens),
            torch.tensor(parents),
            torch.tensor(logprobs, dtype=torch.float32),
            torch.tensor(depths),
        )

    def _proposals(self, path: list[int], rng: random.Random, top_k: int) -> list[tuple[int, float]]:
        tokens = rng.sample(range(VOCAB), top_k)
        on_script = path == self.script[: len(path)] and len(path) < len(self.script)
        if on_script and rng.random() < self.hit_rate:
            wanted = self.script[len(path)]
            if wanted not in tokens:
                tokens[rng.randrange(top_k)] = wanted
        return [(token, 0.3 + rank + rng.random()) for rank, token in enumerate(tokens)]


class TablePredictor:
    """Scores experts by a fixed random table over tokens, and remembers what its session was told."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.table = torch.randn(VOCAB, layers, experts, generator=torch.Generator().manual_seed(5))
        self.spec = RoutingSpec(layers, tuple(range(layers)), experts, top_k, VOCAB, "0" * 64, "fake", "1" * 64)
        self.context: list[int] = []
        self.experts: list[Tensor] = []
        self.closed = False
        self._tree: Tensor | None = None

    def session(self) -> TablePredictor:
        self.context, self.experts, self.closed = [], [], False
        return self

    def prefill(self, ids: Tensor, experts: Tensor | None = None) -> None:
        self.context += ids.tolist()
        if experts is not None:
            self.experts.append(experts)

    def score(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._tree = tokens
        return self.table[tokens]

    def commit(self, path: Tensor, experts: Tensor | None = None) -> None:
        assert self._tree is not None
        self.prefill(self._tree[path], experts)

    def close(self) -> None:
        self.closed = True
