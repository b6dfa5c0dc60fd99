"""The neural predictor: target embedding -> projection -> causal backbone -> one fused head for all layers.

Shapes: B batch, T tokens, H target embedding size, d backbone hidden size, L MoE layers, E experts.

The backbone is any decoder-only transformers model with rotary positions and full attention; it is built from its
configuration alone and its own token embedding is dropped, because the input is the *target's* token embedding, so
target and backbone need not share a tokenizer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec.predictor.backbones import backbone_config, build_backbone, load_backbone
from ecospec.predictor.routing_spec import RoutingSpec

HEAD_INIT_STD = 0.02

# Squared RMS below which a row counts as zero. Embedding entries of 1e-3 are common in small targets, so the usual
# 1e-6 of model norms would visibly shrink their rows.
_RMS_EPSILON = 1e-12


class InputMode(enum.StrEnum):
    """What the backbone reads.

    ``TARGET_EMBEDDING``: the target's token embedding, projected. ``BACKBONE_EMBEDDING``: the backbone's own token
    embedding; reserved, refused by this version.
    """

    TARGET_EMBEDDING = "target_embedding"
    BACKBONE_EMBEDDING = "backbone_embedding"


def require_input_mode(value: str, source: str = "input_mode") -> InputMode:
    """Parse an input mode and refuse the reserved one.

    Args:
        value: The mode's name.
        source: Field or flag named in the message.

    Raises:
        ValueError: The mode is unknown or not supported by this version.
    """
    if value not in list(InputMode):
        raise ValueError(f"{source} is {value!r}; allowed: {InputMode.TARGET_EMBEDDING.value!r}")
    mode = InputMode(value)
    if mode is not InputMode.TARGET_EMBEDDING:
        raise ValueError(f"{source} {value!r} is not supported yet; use {InputMode.TARGET_EMBEDDING.value!r}")
    return mode


class RoutingPredictorModel(nn.Module):
    """Scores every expert of every MoE layer for each token of a sequence.

    The target's embedding rows are brought to unit RMS before the projection. Their scale says nothing the
    predictor needs (trained tables range from 0.02 to above 1, some families multiply them by a constant after
    the look-up, and rows of rare tokens stay near zero), while the residual stream of the backbone depends on it.
    The projection starts so that its output has the RMS that the backbone's own embedding had, or 1 for a
    backbone trained from scratch.

    The target's embedding is a *reference*: neither a parameter nor part of the state dict, not moved by ``.to()``.

    Args:
        spec: The target.
        backbone: Preset name or transformers configuration with ``model_type``.
        embedding_size: Width of the target's embedding, H.
        input_mode: See `InputMode`.
        target_embedding: The target's embedding module, or its table ``[V, H]``; may be set later.

    Raises:
        ValueError: Unknown preset, family, input mode; an embedding of another shape.
    """

    owned_embedding: Tensor | None

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        backbone: str | Mapping[str, Any] = "tiny",
        embedding_size: int,
        input_mode: str = InputMode.TARGET_EMBEDDING,
        target_embedding: nn.Module | Tensor | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(embedding_size, int) or embedding_size < 1:
            raise ValueError(f"embedding_size must be a positive integer, got {embedding_size!r}")
        self.spec = spec
        self.input_mode = require_input_mode(input_mode)
        self.embedding_size = embedding_size
        self.backbone_config = backbone_config(backbone)
        hidden_size = self.backbone_config["hidden_size"]
        self.projection = nn.Linear(embedding_size, hidden_size, bias=False)
        self.backbone = build_backbone(self.backbone_config)
        self.head = nn.Linear(hidden_size, spec.num_layers * spec.num_experts)
        # In a list, so that nn.Module does not register the target's embedding as a part of this model.
        self._target_embedding: list[nn.Module | Tensor] = []
        self.register_buffer("owned_embedding", None, persistent=False)
        self._initialise(embedding_rms=1.0)
        if target_embedding is not None:
            self.set_target_embedding(target_embedding)

    @classmethod
    def from_pretrained_backbone(
        cls,
        spec: RoutingSpec,
        backbone_path: str | Path,
        *,
        embedding_size: int,
        target_embedding: nn.Module | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> RoutingPredictorModel:
        """Start from a pretrained causal LM; projection and head are new.

        Args:
            spec: The target.
            backbone_path: Folder or hub id that transformers can load.
            embedding_size: Width of the target's embedding, H.
            target_embedding: See the class.
            dtype: Parameter type.

        Raises:
            FileNotFoundError: Nothing that transformers can load at this path.
            ValueError: The family cannot score trees.
        """
        pretrained, config, embedding_rms = load_backbone(backbone_path, dtype)
        small = {**config, "num_hidden_layers": 1, "layer_types": None}  # its random weights are thrown away
        model = cls(spec, backbone=small, embedding_size=embedding_size, target_embedding=target_embedding)
        model.backbone_config = config
        model.backbone = pretrained
        model._initialise(embedding_rms=embedding_rms)
        return model.to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's
        """Move or cast; floating-point buffers move but keep their type.

        They are the rotary frequencies: rounded to bfloat16 they move every position and, with it, the logits.
        """
        before = {name: value for name, value in self.named_buffers() if value.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in list(self.named_buffers()):
            if name in before and value.dtype != before[name].dtype:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, before[name].to(value.device))
        return self

    def _initialise(self, *, embedding_rms: float) -> None:
        """Fresh projection and head."""
        nn.init.normal_(self.projection.weight, std=embedding_rms / math.sqrt(self.embedding_size))
        nn.init.normal_(self.head.weight, std=HEAD_INIT_STD)
        nn.init.zeros_(self.head.bias)

    @property
    def target_embedding(self) -> nn.Module | Tensor | None:
        """The target's embedding, if there is one."""
        return self._target_embedding[0] if self._target_embedding else self.owned_embedding

    def require_embedding(self) -> nn.Module | Tensor:
        """The target's embedding.

        Raises:
            ValueError: It was not given.
        """
        embedding = self.target_embedding
        if embedding is None:
            raise ValueError(
                "this predictor needs the target's token embedding; pass target_embedding="
                "model.get_input_embeddings() or load_target_embedding(path)"
            )
        return embedding

    def set_target_embedding(self, embedding: nn.Module | Tensor) -> None:
        """Use the target's embedding, by reference.

        Args:
            embedding: The target's embedding module (called as a module, so that sharded and offloaded ones
                work), or its table ``[V, H]``.

        Raises:
            ValueError: The table is not ``[spec.vocab_size, embedding_size]``.
        """
        weight = embedding if isinstance(embedding, Tensor) else getattr(embedding, "weight", None)
        expected = (self.spec.vocab_size, self.embedding_size)
        if weight is not None and tuple(weight.shape) != expected:
            raise ValueError(
                f"the target embedding is {tuple(weight.shape)}, this predictor was made for {expected}; "
                "pass the embedding of the target named in its config"
            )
        self._target_embedding = [embedding]

    def own_target_embedding(self, table: Tensor) -> None:
        """Keep an embedding table ``[V, H]`` of one's own, which moves with the model; for bundles that store it.

        Raises:
            ValueError: See `set_target_embedding`.
        """
        self.set_target_embedding(table)
        self._target_embedding = []
        self.owned_embedding = table

    def embed(self, ids: Tensor) -> Tensor:
        """Target embeddings of token ids.

        Args:
            ids: int64 ``[B, T]``.

        Returns:
            ``[B, T, H]`` in the embedding's own type.

        Raises:
            ValueError: No target embedding was given.
        """
        embedding = self.require_embedding()
        if isinstance(embedding, Tensor):
            return F.embedding(ids.to(embedding.device), embedding)
        weight = getattr(embedding, "weight", None)
        if weight is not None and not weight.is_meta:  # an offloaded module's hooks move its inputs themselves
            ids = ids.to(weight.device)
        embedded: Tensor = embedding(ids)
        return embedded

    def project(self, embeddings: Tensor) -> Tensor:
        """Target embeddings ``[B, T, H]`` to backbone inputs ``[B, T, d]``: unit RMS, then the projection."""
        weight = self.projection.weight
        rows = embeddings.to(device=weight.device, dtype=torch.promote_types(embeddings.dtype, torch.float32))
        rows = rows.to(torch.promote_types(rows.dtype, weight.dtype))
        rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + _RMS_EPSILON)
        projected: Tensor = self.projection(rows.to(weight.dtype))
        return projected

    def hidden_states(
        self,
        ids: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Final backbone states ``[B, T, d]``; arguments as in `forward`."""
        if (ids is None) == (embeddings is None):
            raise ValueError("give either token ids or target embeddings, not both")
        if embeddings is None:
            assert ids is not None
            embeddings = self.embed(ids)
        output = self.backbone(
            inputs_embeds=self.project(embeddings),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
        )
        states: Tensor = output.last_hidden_state
        return states

    def heads(self, states: Tensor) -> Tensor:
        """Backbone states ``[..., d]`` to logits ``[..., L, E]``, one matrix for all layers."""
        logits: Tensor = self.head(states)
        return logits.view(*states.shape[:-1], self.spec.num_layers, self.spec.num_experts)

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Uncalibrated expert logits of every token.

        Args:
            ids: int64 ``[B, T]`` target token ids; needs the target embedding. Padding on the right needs no
                mask: under the causal mask no token sees what follows it.
            embeddings: ``[B, T, H]`` target embeddings, instead of ``ids``.
            attention_mask: ``[B, T]`` with 1 at tokens (left padding), or an additive ``[B, 1, T, S]`` mask.
            position_ids: int64 ``[B, T]``, where they are not consecutive.
            cache: A transformers cache to continue.

        Returns:
            ``[B, T, L, E]`` logits in the parameter type; row t uses tokens up to and including t.
        """
        states = self.hidden_states(
            ids, embeddings=embeddings, attention_mask=attention_mask, position_ids=position_ids, cache=cache
        )
        return self.heads(states)

    # nn.Module.__call__ is untyped; this gives callers a Tensor.
    __call__: Callable[..., Tensor]
