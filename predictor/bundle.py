"""The exported neural predictor, and opening a bundle of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from ecospec.predictor.bundle_files import HUB_OPTIONS, LoadOptions, PredictorBundle, bundle_folder
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.network_bundle import NetworkPredictor
from ecospec.predictor.predictor_config import PredictorConfig
from ecospec.predictor.tree_session import TreeSession


class ExpertPredictor(NetworkPredictor):
    """The neural predictor as other people's processes use it: load, open sessions, score trees.

    Args:
        config: Its config; see `from_model`.
        model: The network.

    Raises:
        ValueError: Config and network disagree.
    """

    kind = "neural"
    model: RoutingPredictorModel

    def __init__(self, config: PredictorConfig, model: RoutingPredictorModel) -> None:
        super().__init__(config, model)
        if model.spec.differences(config.spec) or dict(config.backbone or {}) != model.backbone_config:
            raise ValueError("the predictor's config and network disagree; make the config with from_model")

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

    @classmethod
    def empty_model(cls, config: PredictorConfig) -> RoutingPredictorModel:
        """See `NetworkPredictor.empty_model`."""
        assert config.backbone is not None
        assert config.input_mode is not None
        model = RoutingPredictorModel(
            config.spec,
            backbone=config.backbone,
            embedding_size=config.embedding_size,
            input_mode=config.input_mode,
            head_rank=config.head_rank,
        )
        # The full configuration as stored: a newer transformers may add keys, which is no disagreement.
        model.backbone_config = dict(config.backbone)
        return model


def load_predictor(path: str | Path, **options: Unpack[LoadOptions]) -> PredictorBundle:
    """Open a bundle of any kind.

    Args:
        path: Folder, or hub id.
        options: Options of `PredictorBundle.from_pretrained`, with the same meaning, defaults and errors.
    """
    from ecospec.predictor.attached import DrafterAttachedPredictor  # noqa: PLC0415
    from ecospec.predictor.baselines import FrequencyPredictor, LastTokenPredictor, RandomPredictor  # noqa: PLC0415
    from ecospec.predictor.mlp_predictor import MlpPredictor  # noqa: PLC0415
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
        MlpPredictor,
        DrafterAttachedPredictor,
    )
    hub_options = {name: value for name, value in options.items() if name in HUB_OPTIONS}
    kind = PredictorConfig.read(bundle_folder(path, **hub_options)).kind
    chosen = next(found for found in classes if found.kind == kind)
    return chosen.from_pretrained(path, **options)
