"""The one decoder layer of an EAGLE-3 head. Shapes: B batch, T rows, H hidden size, D head size, S cached rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecospec.decoding.drafters.eagle3_config import Eagle3Config


class RotaryTable:
    """Rotary angles of any position; not a module, so that casting the head never rounds the frequencies.

    Args:
        config: The head's configuration.
    """

    def __init__(self, config: Eagle3Config) -> None:
        self._frequencies, self._scale = _rotary_frequencies(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine.

        Args:
            positions: int64 ``[..., T]``.
            dtype: Type of the result.

        Returns:
            Two tensors ``[..., T, D]``.
        """
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def _rotary_frequencies(config: Eagle3Config) -> tuple[Tensor, float]:
    """Return the inverse frequencies, float32 ``[D / 2]``, and the factor on cosine and sine."""
    if config.rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415  (needed for scaled ones only)
    from transformers.models.llama.configuration_llama import LlamaConfig  # noqa: PLC0415

    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={
            **(config.rope_scaling or {}),
            "rope_type": config.rope_type,
            "rope_theta": config.rope_theta,
        },
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_type](llama, torch.device("cpu"))
    return frequencies.float(), float(scale)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary embedding (halves convention) to ``x [B, heads, T, D]`` with tables ``[T, D]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Eagle3Attention(nn.Module):
    """Attention whose queries, keys and values are read from embedding and feature side by side (width 2H)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values.

        Args:
            x: ``[B, T, 2H]``.
            cosine: ``[T, D]``.
            sine: ``[T, D]``.

        Returns:
            queries ``[B, heads, T, D]``, keys and values ``[B, kv_heads, T, D]``.
        """
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend and project back.

        Args:
            queries: ``[B, heads, T, D]``.
            keys: ``[B, kv_heads, S, D]``.
            values: ``[B, kv_heads, S, D]``.
            mask: bool ``[T, S]``, True where a query sees a key; None: causal, T = S.

        Returns:
            ``[B, T, H]``.
        """
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def attend_unrolled(self, queries: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend at step ``len(keys) - 1`` of a training-time unrolling.

        Row t of every step belongs to the same base position t. A drafted row sees the target-processed rows up to
        its base (step 0, causal) and the earlier drafted rows of its own base, itself included: exactly what the
        drafter's cache holds when it drafts below base t.

        Args:
            queries: ``[B, heads, T, D]``, of the last step.
            keys: One ``[B, kv_heads, T, D]`` per step so far.
            values: As keys.

        Returns:
            ``[B, T, H]``.
        """
        if len(keys) == 1:
            return self.attend(queries, keys[0], values[0], None)
        groups = self.num_heads // self.num_kv_heads
        batch, _, length, dim = queries.shape
        q = queries.reshape(batch, self.num_kv_heads, groups, length, dim) * dim**-0.5
        first = q @ keys[0].unsqueeze(2).transpose(-1, -2)  # [B, kv_heads, groups, T, T]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        first = first.masked_fill(hidden, float("-inf"))
        own = torch.stack(
            [(q * k.unsqueeze(2)).sum(-1) for k in keys[1:]], dim=-1
        )  # [B, kv_heads, groups, T, steps]
        weights = torch.cat((first, own), dim=-1).softmax(dim=-1)
        out = weights[..., :length] @ values[0].unsqueeze(2)
        for index, value in enumerate(values[1:]):
            out = out + weights[..., length + index, None] * value.unsqueeze(2)
        merged = out.reshape(batch, self.num_heads, length, dim).transpose(1, 2).flatten(2)
        projected: Tensor = self.o_proj(merged)
        return projected


class Eagle3MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., H]`` to ``[..., H]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Eagle3Layer(nn.Module):
    """Decoder layer over (embedding of the next token, feature of the position); the feature is the residual."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = Eagle3MLP(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attention_input(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Return ``[..., 2H]`` from two ``[..., H]``."""
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), dim=-1)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """Add attention and feed-forward to the residual; return the hidden state before the final norm."""
        hidden = features + attended
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result
