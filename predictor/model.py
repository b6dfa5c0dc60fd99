"""The neural predictor: token embedding -> causal backbone -> one fused head for all layers.

Shapes: B batch, T tokens, H target embedding size, d backbone hidden size, r rank of the head, L MoE layers, E
experts.

The backbone is any causal LM of transformers that can score draft trees (`ecospec.predictor.backbones`). What it
reads is one of two things (`InputMode`): the *target's* token embedding, projected, so that target and backbone
need not share a tokenizer; or its own, where the vocabularies are identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ecospec.predictor.backbones import (
    PretrainedBackbone,
    backbone_config,
    backbone_hidden_size,
    build_backbone,
    load_backbone,
)
from ecospec.predictor.choices import require_choice
from ecospec.predictor.fingerprint import checkpoint_tokenizer_fingerprint
from ecospec.predictor.predictor_config import InputMode
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.target_embedding import ReadsTargetEmbedding, unit_rows

HEAD_INIT_STD = 0.02


def require_same_vocabulary(spec: RoutingSpec, backbone_path: str | Path) -> None:
    """Refuse a backbone whose tokenizer is not the target's.

    Args:
        spec: The target.
        backbone_path: Folder or hub id of the backbone.

    Raises:
        ValueError: Another vocabulary, or no readable tokenizer.
    """
    if checkpoint_tokenizer_fingerprint(backbone_path) != spec.tokenizer_fingerprint:
        raise ValueError(
            f"input_mode {InputMode.BACKBONE_EMBEDDING.value!r} needs one vocabulary; the tokenizer of backbone "
            f"{backbone_path} is not that of target {spec.target_id}: the same ids would mean other tokens; use "
            f"{InputMode.TARGET_EMBEDDING.value!r}"
        )


class RoutingPredictorModel(ReadsTargetEmbedding):
    """Scores every expert of every MoE layer for each token of a sequence.

    With `InputMode.TARGET_EMBEDDING` the target's embedding rows are brought to unit RMS before the projection.
    Their scale says nothing the predictor needs (trained tables range from 0.02 to above 1, some families multiply
    them by a constant after the look-up, and rows of rare tokens stay near zero), while the residual stream of the
    backbone depends on it. The projection starts so that its output has the RMS that the backbone's own embedding
    had, or 1 for a backbone trained from scratch.

    Args:
        spec: The target.
        backbone: Preset name, transformers configuration with ``model_type``, or a loaded backbone.
        embedding_size: Width of the target's embedding, H; None with the backbone's own embedding.
        input_mode: See `InputMode`.
        head_rank: r of a low-rank head (d -> r -> L·E, for all layers together); None for a full one.
        target_embedding: The target's embedding module, or its table ``[V, H]``; may be set later.

    Raises:
        ValueError: Unknown preset, family, input mode; a size out of range; an embedding of another shape; a
            backbone with fewer tokens than the target.
    """

    backbone: Any  # a transformers model: its methods and config are not nn.Module's

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        backbone: str | Mapping[str, Any] | PretrainedBackbone = "tiny",
        embedding_size: int | None = None,
        input_mode: str = InputMode.TARGET_EMBEDDING,
        head_rank: int | None = None,
        target_embedding: nn.Module | Tensor | None = None,
    ) -> None:
        super().__init__(spec, embedding_size)
        require_choice("input_mode", input_mode, [mode.value for mode in InputMode])
        self.input_mode = InputMode(input_mode)
        self._require_embedding_size()
        loaded = backbone if isinstance(backbone, PretrainedBackbone) else None
        self.backbone_config = self._checked_config(backbone)
        hidden_size = backbone_hidden_size(self.backbone_config)
        # Projection, backbone, head: in this order they draw their weights, so one seed keeps giving one network.
        self.projection = None if embedding_size is None else nn.Linear(embedding_size, hidden_size, bias=False)
        vocabulary = self.backbone_config["vocab_size"] if embedding_size is None else None
        self.backbone = loaded.module if loaded else build_backbone(self.backbone_config, vocabulary=vocabulary)
        outputs = spec.num_layers * spec.num_experts
        if head_rank is not None and not 1 <= head_rank < min(hidden_size, outputs):
            raise ValueError(
                f"head_rank must lie between 1 and {min(hidden_size, outputs) - 1} for a head of {hidden_size} x "
                f"{outputs}, got {head_rank}"
            )
        self.head_rank = head_rank
        self.head_down = None if head_rank is None else nn.Linear(hidden_size, head_rank, bias=False)
        self.head = nn.Linear(head_rank or hidden_size, outputs)
        self._initialise(loaded.embedding_rms if loaded else 1.0)
        if target_embedding is not None:
            self.set_target_embedding(target_embedding)

    @classmethod
    def from_pretrained_backbone(
        cls,
        spec: RoutingSpec,
        backbone_path: str | Path,
        *,
        embedding_size: int | None = None,
        input_mode: str = InputMode.TARGET_EMBEDDING,
        head_rank: int | None = None,
        target_embedding: nn.Module | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> RoutingPredictorModel:
        """Start from a pretrained causal LM; projection and head are new.

        Args:
            spec: The target.
            backbone_path: Folder or hub id that transformers can load.
            embedding_size: See the class.
            input_mode: See the class.
            head_rank: See the class.
            target_embedding: See the class.
            dtype: Parameter type.

        Raises:
            FileNotFoundError: Nothing that transformers can load at this path.
            ValueError: The family cannot score trees, or has another vocabulary and reads its own embedding.
        """
        own_input = input_mode == InputMode.BACKBONE_EMBEDDING
        if own_input:
            require_same_vocabulary(spec, backbone_path)
        pretrained = load_backbone(backbone_path, dtype, keep_embedding=own_input)
        return cls(
            spec,
            backbone=pretrained,
            embedding_size=embedding_size,
            input_mode=input_mode,
            head_rank=head_rank,
            target_embedding=target_embedding,
        ).to(dtype)

    def _require_embedding_size(self) -> None:
        size, mode = self.embedding_size, self.input_mode
        if mode is InputMode.BACKBONE_EMBEDDING:
            if size is not None:
                raise ValueError(f"embedding_size must be None with input_mode {mode.value!r}, got {size!r}")
        elif not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"embedding_size must be a positive integer, got {size!r}")

    def _checked_config(self, backbone: str | Mapping[str, Any] | PretrainedBackbone) -> dict[str, Any]:
        """The backbone's configuration, with the target's vocabulary where a preset reads its own embedding."""
        config = backbone.config if isinstance(backbone, PretrainedBackbone) else backbone_config(backbone)
        if self.input_mode is InputMode.BACKBONE_EMBEDDING:
            if isinstance(backbone, str):
                config["vocab_size"] = self.spec.vocab_size
            if config["vocab_size"] < self.spec.vocab_size:
                raise ValueError(
                    f"the backbone's embedding has {config['vocab_size']} tokens, target {self.spec.target_id} has "
                    f"{self.spec.vocab_size}; use input_mode {InputMode.TARGET_EMBEDDING.value!r}"
                )
        return config

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

    def _initialise(self, embedding_rms: float) -> None:
        """Fresh projection and head."""
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=embedding_rms / math.sqrt(self.projection.in_features))
        if self.head_down is not None:
            nn.init.normal_(self.head_down.weight, std=1 / math.sqrt(self.head_down.in_features))
        nn.init.normal_(self.head.weight, std=HEAD_INIT_STD)
        nn.init.zeros_(self.head.bias)

    def embed(self, ids: Tensor) -> Tensor:
        """What the backbone reads of token ids, before the projection.

        Args:
            ids: int64 ``[B, T]``.

        Returns:
            ``[B, T, H]`` in the target embedding's own type, or ``[B, T, d]`` of the backbone's own embedding.

        Raises:
            ValueError: The target embedding is needed and was not given.
        """
        embedding = self.require_embedding()
        if embedding is not None:
            return embedding(ids)
        own: Tensor = self.backbone.get_input_embeddings()(ids.to(self.head.weight.device))
        return own

    def project(self, embeddings: Tensor) -> Tensor:
        """Embeddings of `embed` to backbone inputs ``[B, T, d]``: the target's to unit RMS, then projected."""
        if self.projection is None:
            return embeddings
        projected: Tensor = self.projection(unit_rows(embeddings, self.projection.weight))
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
        """Final backbone states.

        Args:
            ids: int64 ``[B, T]`` target token ids. Padding on the right needs no
                mask: under the causal mask no token sees what follows it.
            embeddings: As returned by `embed`, instead of ``ids``.
            attention_mask: ``[B, T]`` with 1 at tokens (left padding), or an additive ``[B, 1, T, S]`` mask.
            position_ids: int64 ``[B, T]``, where they are not consecutive.
            cache: A transformers cache to continue.

        Returns:
            ``[B, T, d]`` in the parameter type; row t uses tokens up to and including t.

        Raises:
            ValueError: Neither or both of ``ids`` and ``embeddings`` are given, or the target embedding is missing.
        """
        if (ids is None) == (embeddings is None):
            raise ValueError("give either token ids or embeddings, not both")
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
        """Backbone states ``[..., d]`` to logits ``[..., L, E]``, one matrix (or two, low rank) for all layers."""
        logits: Tensor = self.head(states if self.head_down is None else self.head_down(states))
        return logits.view(*states.shape[:-1], self.spec.num_layers, self.spec.num_experts)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Uncalibrated expert logits of every token.

        Args:
            args: As of `hidden_states`.
            kwargs: As of `hidden_states`.

        Returns:
            ``[B, T, L, E]`` logits in the parameter type; row t uses tokens up to and including t.
        """
        return self.heads(self.hidden_states(*args, **kwargs))

    # nn.Module.__call__ is untyped; this gives callers a Tensor.
    __call__: Callable[..., Tensor]
