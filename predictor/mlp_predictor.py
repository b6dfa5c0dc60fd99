"""The shallow baseline: a multi-layer perceptron on the target's embeddings of a node's last n tokens.

What a network without attention can know: a backbone that does not beat it is not worth its time.

Shapes: N nodes or tokens, n window tokens (the token itself included), C = n - 1, H target embedding size, d hidden
size, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ecospec.predictor.network_bundle import NetworkPredictor
from ecospec.predictor.predictor_config import InputMode, PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.target_embedding import ReadsTargetEmbedding, unit_rows
from ecospec.predictor.window_predictor import WindowPredictor, WindowSession, tokens_before

_HEAD_INIT_STD = 0.02


class MlpModel(ReadsTargetEmbedding):
    """Scores from a window of tokens: n embeddings -> one or two hidden layers -> one matrix for all MoE layers.

    The embeddings are brought to unit RMS, as for the neural predictor; where a sequence has not begun they are
    zeros.

    Args:
        spec: The target.
        embedding_size: Width of the target's embedding, H.
        window_tokens: n.
        hidden_size: d.
        hidden_layers: 1 or 2.
        target_embedding: The target's embedding module, or its table ``[V, H]``; may be set later.

    Raises:
        ValueError: An embedding of another shape.
    """

    embedding_size: int

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        embedding_size: int,
        window_tokens: int = 4,
        hidden_size: int = 512,
        hidden_layers: int = 1,
        target_embedding: nn.Module | Tensor | None = None,
    ) -> None:
        super().__init__(spec, embedding_size)
        self.window_tokens = window_tokens
        sizes = [window_tokens * embedding_size] + [hidden_size] * hidden_layers
        layers = [nn.Linear(size, hidden_size) for size in sizes[:-1]]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(hidden_size, spec.num_layers * spec.num_experts)
        for layer in layers:
            # Inputs of unit RMS give outputs of unit RMS, of which GELU passes on 0.65.
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.weight.shape[1]))
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.head.weight, std=_HEAD_INIT_STD)
        nn.init.zeros_(self.head.bias)
        if target_embedding is not None:
            self.set_target_embedding(target_embedding)

    def options(self) -> dict[str, int]:
        """What the config of a bundle says of the network."""
        return {
            "window_tokens": self.window_tokens,
            "hidden_size": self.head.in_features,
            "hidden_layers": len(self.layers),
        }

    def windows(self, ids: Tensor) -> Tensor:
        """The last n tokens at every token of sequences, for `forward`: int64 ``[..., T]`` to ``[..., T, n]``."""
        return torch.cat([ids.unsqueeze(-1), tokens_before(ids, self.window_tokens - 1)], dim=-1)

    def forward(self, windows: Tensor) -> Tensor:
        """Uncalibrated expert logits.

        Args:
            windows: int64 ``[..., n]``, the last tokens, the latest first, -1 where there is none.

        Returns:
            ``[..., L, E]`` logits in the parameter type.

        Raises:
            ValueError: The target embedding was not given.
        """
        weight = self.head.weight
        windows = windows.to(weight.device)
        rows = unit_rows(self.target_rows()(windows.clamp(min=0)), weight)
        states = rows.masked_fill((windows < 0).unsqueeze(-1), 0.0).flatten(-2)
        for layer in self.layers:
            states = functional.gelu(layer(states))
        logits: Tensor = self.head(states)
        return logits.view(*logits.shape[:-1], self.spec.num_layers, self.spec.num_experts)

    # nn.Module.__call__ is untyped; this gives callers a Tensor.
    __call__: Callable[..., Tensor]


class MlpPredictor(NetworkPredictor, WindowPredictor):
    """The perceptron as a bundle.

    Args:
        config: Its config; see `from_model`.
        model: The network.

    Raises:
        ValueError: Config and network disagree.
    """

    kind = "mlp"
    model: MlpModel

    def __init__(self, config: PredictorConfig, model: MlpModel) -> None:
        super().__init__(config, model)
        sizes = {name: config.options[name] for name in model.options()}
        if model.spec.differences(config.spec) or sizes != model.options():
            raise ValueError("the predictor's config and network disagree; make the config with from_model")

    @classmethod
    def from_model(
        cls,
        model: MlpModel,
        *,
        temperature: tuple[float, ...] = (),
        options: Mapping[str, Any] | None = None,
        training_data: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> MlpPredictor:
        """Wrap a trained network, by reference.

        Args:
            model: The network.
            temperature: One per MoE layer; ones by default.
            options: Further settings worth keeping, e.g. of the training.
            training_data: Fingerprint of the traces.
            metrics: Measured quality.
        """
        config = PredictorConfig(
            kind=cls.kind,
            spec=model.spec,
            input_mode=InputMode.TARGET_EMBEDDING.value,
            embedding_size=model.embedding_size,
            temperature=temperature,
            options={**(options or {}), **model.options()},
            training_data=training_data or {},
            metrics=metrics or {},
        )
        return cls(config, model)

    @classmethod
    def empty_model(cls, config: PredictorConfig) -> MlpModel:
        """See `NetworkPredictor.empty_model`."""
        assert config.embedding_size is not None
        sizes = {name: config.options[name] for name in ("window_tokens", "hidden_size", "hidden_layers")}
        return MlpModel(config.spec, embedding_size=config.embedding_size, **sizes)

    @property
    def context_size(self) -> int:
        """See `WindowPredictor.context_size`."""
        return self.model.window_tokens - 1

    def session(self) -> WindowSession:
        """See `WindowPredictor.session`."""
        self.model.target_rows()
        return super().session()

    def node_scores(
        self, tokens: Tensor, context: Tensor, positions: Tensor, last_experts: Tensor | None
    ) -> Tensor:
        """See `WindowPredictor.node_scores`."""
        del positions, last_experts
        return self.model(torch.cat([tokens.unsqueeze(-1), context], dim=-1))
