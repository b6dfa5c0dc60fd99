"""Tiny predictors and specs for the tests of `ecospec.predictor`."""

from __future__ import annotations

import dataclasses

import torch

from ecospec.predictor.bundle import ExpertPredictor
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.routing_spec import RoutingSpec

EMBEDDING_SIZE = 12

SPEC = RoutingSpec(
    num_layers=3,
    layer_indices=(1, 2, 4),
    num_experts=8,
    top_k=2,
    vocab_size=40,
    tokenizer_fingerprint="0" * 64,
    target_id="tiny",
    target_fingerprint="1" * 64,
)
OTHER_SPEC = dataclasses.replace(SPEC, target_fingerprint="2" * 64, target_id="other")

BACKBONE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
}


def embedding_table(seed: int = 5) -> torch.Tensor:
    """The target's embedding, with the small rows of a freshly trained one."""
    return torch.randn(SPEC.vocab_size, EMBEDDING_SIZE, generator=torch.Generator().manual_seed(seed)) * 0.02


def tiny_model(backbone=BACKBONE, seed: int = 0) -> RoutingPredictorModel:
    """Network whose weights are large enough that a wrong mask or position shows."""
    torch.manual_seed(seed)
    model = RoutingPredictorModel(
        SPEC, backbone=backbone, embedding_size=EMBEDDING_SIZE, target_embedding=embedding_table()
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def tiny_predictor(backbone=BACKBONE, **fields) -> ExpertPredictor:
    """Neural predictor around `tiny_model`."""
    return ExpertPredictor.from_model(tiny_model(backbone), **fields)


def random_parents(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """A random tree: every node hangs below an earlier one."""
    parents = [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, nodes)]
    return torch.tensor(parents)


def path_to(node: int, parents: torch.Tensor) -> list[int]:
    """Nodes from the root down to ``node``, by following parents."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path
