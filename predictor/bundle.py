"""The exported neural predictor, and opening a bundle of any kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ecospec.predictor.bundle_files import WEIGHTS_NAME, PredictorBundle, bundle_folder, require_tensors
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec
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
            ValueError: ``store_embedding`` and the embedding is not given, or has no plain table.
        """
        tensors = {name: value.detach() for name, value in self.model.state_dict().items()}
        if store_embedding:
            embedding = self.model.require_embedding()
            table = embedding if isinstance(embedding, Tensor) else getattr(embedding, "weight", None)
            if not isinstance(table, Tensor) or table.is_meta or hasattr(table, "device_mesh"):
                raise ValueError("store_embedding needs the whole embedding table; pass it as a tensor")
            tensors[_EMBEDDING_NAME] = table.detach()
        return tensors

    def _stored_config(self, *, store_embedding: bool) -> PredictorConfig:
        """The config as written."""
        return dataclasses.replace(self.config, embedding_stored=store_embedding)

    @classmethod
    def from_tensors(
        cls,
        config: PredictorConfig,
        tensors: dict[str, Tensor],
        *,
        target_embedding: nn.Module | Tensor | None = None,
        dtype: torch.dtype | None = None,
        source: str = WEIGHTS_NAME,
    ) -> Self:
        """See `PredictorBundle.from_tensors`."""
        assert config.backbone is not None
        assert config.input_mode is not None
        assert config.embedding_size is not None
        stored = dict(tensors)
        embedding = stored.pop(_EMBEDDING_NAME, None)
        if config.embedding_stored != (embedding is not None):
            raise ValueError(
                f"{source}: {_EMBEDDING_NAME!r} and embedding_stored of config.json disagree; export it again"
            )
        model = RoutingPredictorModel(
            config.spec,
            backbone=config.backbone,
            embedding_size=config.embedding_size,
            input_mode=config.input_mode,
        )
        # The full configuration as stored: a newer transformers may add keys, which is no disagreement.
        model.backbone_config = dict(config.backbone)
        require_tensors(stored, {name: tuple(value.shape) for name, value in model.state_dict().items()}, source)
        model.to(dtype or stored["head.weight"].dtype)
        model.load_state_dict(stored)
        predictor = cls(config, model)
        if target_embedding is not None:
            predictor.set_target_embedding(target_embedding)
        elif embedding is not None:
            model.own_target_embedding(embedding)
        return predictor


def load_predictor(
    path: str | Path,
    *,
    target_embedding: nn.Module | Tensor | None = None,
    require_spec: RoutingSpec | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **hub_options: Any,
) -> PredictorBundle:
    """Open a bundle of any kind; arguments and errors as `PredictorBundle.from_pretrained`.

    Args:
        path: Folder, or hub id.
        target_embedding: The target's embedding; only neural predictors look at it.
        require_spec: Spec of the target it will serve.
        device: Where to compute.
        dtype: Parameter type of a neural predictor.
        hub_options: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``force_download``.
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
    kind = PredictorConfig.read(bundle_folder(path, **hub_options)).kind
    chosen = next(found for found in classes if found.kind == kind)
    return chosen.from_pretrained(
        path,
        target_embedding=target_embedding,
        require_spec=require_spec,
        device=device,
        dtype=dtype,
        **hub_options,
    )
