"""The exported neural predictor, and opening a bundle of any kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from ecospec.predictor.bundle_files import (
    HUB_OPTIONS,
    LoadOptions,
    PredictorBundle,
    StoredBundle,
    bundle_folder,
    require_tensors,
)
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.tree_session import TreeSession

_EMBEDDING_NAME = "target_embedding.weight"


class ExpertPredictor(PredictorBundle):
    """The neural predictor as other people's processes use it: load, open sessions, score trees.

    Args:
        config: Its config; see `from_model`.
        model: The network.

    Raises:
        ValueError: Config and network disagree.
    """

    kind = "neural"

    def __init__(self, config: PredictorConfig, model: RoutingPredictorModel) -> None:
        super().__init__(config)
        if model.spec.differences(config.spec) or dict(config.backbone or {}) != model.backbone_config:
            raise ValueError("the predictor's config and network disagree; make the config with from_model")
        self.model = model

    @classmethod
    def from_model(
        cls,
        model: RoutingPredictorModel,
        *,
        temperature: tuple[float, ...] = (),
        options: Mapping[str, Any] | None = None,
        training_data: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> ExpertPredictor:
        """Wrap a trained network, by reference.

        Args:
            model: The network.
            temperature: One per MoE layer; ones by default.
            options: Settings worth keeping, e.g. the loss.
            training_data: Fingerprint of the traces.
            metrics: Measured quality.
            provenance: Versions, command, seeds.
        """
        config = PredictorConfig(
            kind="neural",
            spec=model.spec,
            backbone=model.backbone_config,
            input_mode=model.input_mode.value,
            embedding_size=model.embedding_size,
            head_rank=model.head_rank,
            temperature=temperature,
            options=options or {},
            training_data=training_data or {},
            metrics=metrics or {},
            provenance=provenance or {},
        )
        return cls(config, model)

    def set_target_embedding(self, embedding: nn.Module | Tensor) -> None:
        """Use the target's embedding, by reference; see `RoutingPredictorModel.set_target_embedding`."""
        self.model.set_target_embedding(embedding)

    def session(self) -> TreeSession:
        """Open a session for one sequence, with a KV cache of its own.

        Raises:
            ValueError: No target embedding was given.
        """
        self.model.require_embedding()
        return TreeSession(self.model, self.calibrated)

    @torch.no_grad()
    def score_batch(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Scores of every token of a batch of sequences.

        Args:
            ids: int64 ``[B, T]``; padding on the right needs no mask.
            attention_mask: ``[B, T]``, 1 at tokens; for padding on the left.

        Returns:
            ``[B, T, L, E]`` calibrated logits, float32 (float64 for a float64 predictor).
        """
        ids = ids.to(self.device)
        return self.calibrated(self.model(ids, attention_mask=attention_mask))

    def score_sequence(self, ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """See `PredictorBundle.score_sequence`; ``experts`` are not looked at."""
        del experts
        return self.score_batch(ids.unsqueeze(0)).squeeze(0)

    def bundle_tensors(self, *, store_embedding: bool = False) -> dict[str, Tensor]:
        """Tensors of ``model.safetensors``.

        Raises:
            ValueError: ``store_embedding`` and the embedding is missing, has no plain table, or is the backbone's.
        """
        tensors = {name: value.detach() for name, value in self.model.state_dict().items()}
        if store_embedding:
            embedding = self.model.require_embedding()
            if embedding is None:
                raise ValueError("this predictor reads its own embedding, which is always stored")
            tensors[_EMBEDDING_NAME] = embedding.table()
        return tensors

    def _stored_config(self, *, store_embedding: bool) -> PredictorConfig:
        """The config as written."""
        return dataclasses.replace(self.config, embedding_stored=store_embedding)

    @classmethod
    def from_stored(
        cls, stored: StoredBundle, embedding: nn.Module | Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """See `PredictorBundle.from_stored`."""
        config, tensors = stored.config, dict(stored.tensors)
        assert config.backbone is not None
        assert config.input_mode is not None
        table = tensors.pop(_EMBEDDING_NAME, None)
        if config.embedding_stored != (table is not None):
            raise ValueError(
                f"{stored.source}: {_EMBEDDING_NAME!r} and embedding_stored of config.json disagree; export again"
            )
        model = RoutingPredictorModel(
            config.spec,
            backbone=config.backbone,
            embedding_size=config.embedding_size,
            input_mode=config.input_mode,
            head_rank=config.head_rank,
        )
        # The full configuration as stored: a newer transformers may add keys, which is no disagreement.
        model.backbone_config = dict(config.backbone)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        require_tensors(tensors, shapes, stored.source)
        model.to(dtype or tensors["head.weight"].dtype)
        model.load_state_dict(tensors)
        predictor = cls(config, model)
        if embedding is not None:
            predictor.set_target_embedding(embedding)
        elif table is not None:
            model.own_target_embedding(table)
        return predictor


def load_predictor(path: str | Path, **options: Unpack[LoadOptions]) -> PredictorBundle:
    """Open a bundle of any kind.

    Args:
        path: Folder, or hub id.
        options: Options of `PredictorBundle.from_pretrained`, with the same meaning, defaults and errors.
    """
    from ecospec.predictor.baselines import FrequencyPredictor, LastTokenPredictor, RandomPredictor  # noqa: PLC0415
    from ecospec.predictor.table_predictors import BigramTablePredictor, TokenTablePredictor  # noqa: PLC0415
    from ecospec.predictor.table_rankings import BigramRankingPredictor, TokenRankingPredictor  # noqa: PLC0415

    classes: tuple[type[PredictorBundle], ...] = (
        ExpertPredictor,
        RandomPredictor,
        FrequencyPredictor,
        LastTokenPredictor,
        TokenTablePredictor,
        BigramTablePredictor,
        TokenRankingPredictor,
        BigramRankingPredictor,
    )
    hub_options = {name: value for name, value in options.items() if name in HUB_OPTIONS}
    kind = PredictorConfig.read(bundle_folder(path, **hub_options)).kind
    chosen = next(found for found in classes if found.kind == kind)
    return chosen.from_pretrained(path, **options)
