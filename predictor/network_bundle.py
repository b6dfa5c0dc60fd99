"""Base of the bundles whose predictor is a network, which may read the target's token embedding."""

from __future__ import annotations

import abc
import dataclasses
from typing import Self

import torch
from torch import Tensor, nn

from ecospec.predictor.bundle_files import PredictorBundle, StoredBundle, require_tensors
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.target_embedding import ReadsTargetEmbedding

_EMBEDDING_NAME = "target_embedding.weight"


class NetworkPredictor(PredictorBundle):
    """A predictor around a network, whose state is what the bundle stores.

    Args:
        config: Its config.
        model: The network, held by reference.
    """

    has_network = True
    model: ReadsTargetEmbedding

    def __init__(self, config: PredictorConfig, model: ReadsTargetEmbedding) -> None:
        super().__init__(config)
        self.model = model

    @classmethod
    @abc.abstractmethod
    def empty_model(cls, config: PredictorConfig) -> ReadsTargetEmbedding:
        """The network that a config describes, with weights that `from_stored` replaces."""

    def set_target_embedding(self, embedding: nn.Module | Tensor) -> None:
        """Use the target's embedding, by reference; see `ReadsTargetEmbedding.set_target_embedding`."""
        self.model.set_target_embedding(embedding)

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
        table = tensors.pop(_EMBEDDING_NAME, None)
        if config.embedding_stored != (table is not None):
            raise ValueError(
                f"{stored.source}: {_EMBEDDING_NAME!r} and embedding_stored of config.json disagree; export again"
            )
        model = cls.empty_model(config)
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
