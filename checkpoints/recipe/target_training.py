"""Training of the target: next-token loss and the load balance of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.recipe.language_training import LanguageModule, TrainingConfig


def load_balancing_loss(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the Switch load-balancing loss of one layer (K at perfect balance) and the load of every expert.

    Args:
        router_logits: [N, E].
        top_k: K.

    Returns:
        The loss, and the load [E]: share of tokens that chose the expert, sum K.
    """
    num_tokens, num_experts = router_logits.shape
    probs = F.softmax(router_logits, dim=-1)
    chosen = probs.detach().topk(top_k, dim=-1).indices.reshape(-1)
    load = torch.bincount(chosen, minlength=num_experts).to(probs.dtype) / num_tokens
    return num_experts * (load * probs.mean(dim=0)).sum(), load


class TargetModule(LanguageModule):
    """Next-token training of a Qwen3-MoE with a per-layer load-balancing loss.

    Args:
        model: ``Qwen3MoeForCausalLM`` with tied embeddings.
        config: Numbers of the run.
    """

    def __init__(self, model: Any, config: TrainingConfig) -> None:
        super().__init__(model, config)
        self._router_logits: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(self._keep_router_logits)

    def _keep_router_logits(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        self._router_logits.append(output[0])

    def _forward(self, windows: Tensor) -> tuple[Tensor, Tensor, float]:
        """Take windows [B, T + 1]; return loss, balance loss and the smallest relative expert load of any layer."""
        self._router_logits.clear()
        loss = self.text_loss(windows)
        top_k = self.model.config.num_experts_per_tok
        layers = [load_balancing_loss(logits, top_k) for logits in self._router_logits]
        balance = torch.stack([loss for loss, _ in layers]).mean()
        smallest = min(float(load.min()) * len(load) / top_k for _, load in layers)
        self._router_logits.clear()
        return loss, balance, smallest

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002
        """Return the loss of windows [B, T + 1]."""
        loss, balance, smallest = self._forward(batch)
        self.log_dict({"loss": loss, "balance": balance, "smallest_load": smallest})
        return loss + self.config.router_aux_loss * balance

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the held-out loss in nats per token."""
        super().validation_step(batch, batch_idx)
        self._router_logits.clear()
