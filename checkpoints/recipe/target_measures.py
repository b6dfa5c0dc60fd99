"""What the target's card states: loss by kind of text, and how evenly and how scattered the target routes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

#: Consecutive tokens whose experts are united: the verification budget of the paper, root included.
UNION_TOKENS = 4


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one layer over a text.

    Attributes:
        entropy_bits: Entropy of the experts' load shares; log2 E at perfect balance.
        effective_experts: 2 to the power of the entropy.
        dead_experts: Experts that no token chose.
        union: Mean number of distinct experts of `UNION_TOKENS` consecutive tokens.
    """

    entropy_bits: float
    effective_experts: float
    dead_experts: int
    union: float


@dataclass(frozen=True)
class TextMeasures:
    """Loss and routing over one kind of text.

    Attributes:
        tokens: Predicted tokens.
        loss: Mean cross-entropy in nats per token.
        bits_per_byte: The same in bits per UTF-8 byte of text.
        layers: Routing per MoE layer.
    """

    tokens: int
    loss: float
    bits_per_byte: float
    layers: tuple[LayerRouting, ...]


def independent_union(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return the expected distinct experts if every token chose K of E uniformly and independently.

    >>> round(independent_union(64, 4, 4), 2)
    14.56
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def layer_routing(ids: NDArray[np.int64], num_experts: int) -> LayerRouting:
    """Summarise the routing of one layer.

    Args:
        ids: Chosen experts [S, T, K] of S sequences of T tokens.
        num_experts: E.
    """
    load = np.bincount(ids.reshape(-1), minlength=num_experts)
    share = load[load > 0] / load.sum()
    entropy = float(-(share * np.log2(share)).sum())
    chosen = np.zeros((*ids.shape[:2], num_experts), dtype=bool)
    np.put_along_axis(chosen, ids, values=True, axis=-1)
    last = chosen.shape[1] - UNION_TOKENS + 1
    together = chosen[:, :last].copy()
    for offset in range(1, UNION_TOKENS):
        together |= chosen[:, offset : offset + last]
    return LayerRouting(entropy, 2**entropy, int((load == 0).sum()), float(together.sum(-1).mean()))


@contextmanager
def recorded_experts(model: Any) -> Iterator[list[list[Tensor]]]:
    """Record the experts every layer chooses: one list per layer, one tensor [tokens, K] per forward."""
    rows: list[list[Tensor]] = [[] for _ in model.model.layers]
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output, row=row: row.append(output[2].detach()))
        for layer, row in zip(model.model.layers, rows, strict=True)
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def measure_text(
    model: Any, texts: Sequence[NDArray[np.int32]], num_bytes: int, length: int = 512, batch: int = 8
) -> TextMeasures:
    """Measure loss and routing on texts joined into windows of `length` tokens.

    Args:
        model: ``Qwen3MoeForCausalLM`` in evaluation mode.
        texts: Token ids per document, each led by the separator.
        num_bytes: UTF-8 bytes of the texts, for bits per byte.
        length: Context in tokens; the last, incomplete window is left out.
        batch: Windows per forward.
    """
    stream = torch.from_numpy(np.concatenate(texts).astype(np.int64))
    count = (len(stream) - 1) // length
    windows = stream[torch.arange(count)[:, None] * length + torch.arange(length + 1)]
    total = 0.0
    with recorded_experts(model) as rows:
        for part in torch.split(windows, batch):
            logits = model(part[:, :-1], use_cache=False).logits
            total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].reshape(-1), reduction="sum"))
    experts = model.config.num_experts
    layers = tuple(layer_routing(torch.cat(row).view(count, length, -1).numpy(), experts) for row in rows)
    loss = total / (count * length)
    return TextMeasures(count * length, loss, loss / math.log(2) * len(stream) / num_bytes, layers)
