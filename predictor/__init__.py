"""Expert predictors: what a target's routing looks like (`RoutingSpec`), and who predicts it.

Imported by serving processes, so nothing is loaded until it is asked for: not torch for the spec, not transformers
for the tables, not huggingface_hub for anything but bundles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecospec.predictor.attached import DrafterAttachedPredictor
    from ecospec.predictor.backbones import BACKBONE_PRESETS, backbone_config
    from ecospec.predictor.baselines import FrequencyPredictor, LastTokenPredictor, RandomPredictor
    from ecospec.predictor.bundle import ExpertPredictor, load_predictor
    from ecospec.predictor.bundle_files import PredictorBundle
    from ecospec.predictor.checkpoint_files import load_target_embedding
    from ecospec.predictor.fingerprint import (
        carry_routing_spec,
        fingerprint_of_state,
        routing_spec_of,
        routing_spec_of_model,
        target_fingerprint,
        tokenizer_fingerprint,
    )
    from ecospec.predictor.mlp_predictor import MlpModel, MlpPredictor
    from ecospec.predictor.model import RoutingPredictorModel
    from ecospec.predictor.predictor_config import InputMode, PredictorConfig
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.predictor.session import Predictor, PredictorSession, top_k_experts
    from ecospec.predictor.table_predictors import BigramTablePredictor, TokenTablePredictor
    from ecospec.predictor.table_rankings import BigramRankingPredictor, TokenRankingPredictor

_MODULE_OF = {
    "BACKBONE_PRESETS": "backbones",
    "BigramRankingPredictor": "table_rankings",
    "BigramTablePredictor": "table_predictors",
    "DrafterAttachedPredictor": "attached",
    "ExpertPredictor": "bundle",
    "FrequencyPredictor": "baselines",
    "InputMode": "predictor_config",
    "LastTokenPredictor": "baselines",
    "MlpModel": "mlp_predictor",
    "MlpPredictor": "mlp_predictor",
    "Predictor": "session",
    "PredictorBundle": "bundle_files",
    "PredictorConfig": "predictor_config",
    "PredictorSession": "session",
    "RandomPredictor": "baselines",
    "RoutingPredictorModel": "model",
    "RoutingSpec": "routing_spec",
    "TokenRankingPredictor": "table_rankings",
    "TokenTablePredictor": "table_predictors",
    "backbone_config": "backbones",
    "carry_routing_spec": "fingerprint",
    "fingerprint_of_state": "fingerprint",
    "load_predictor": "bundle",
    "load_target_embedding": "checkpoint_files",
    "routing_spec_of": "fingerprint",
    "routing_spec_of_model": "fingerprint",
    "target_fingerprint": "fingerprint",
    "tokenizer_fingerprint": "fingerprint",
    "top_k_experts": "session",
}

__all__ = [
    "BACKBONE_PRESETS",
    "BigramRankingPredictor",
    "BigramTablePredictor",
    "DrafterAttachedPredictor",
    "ExpertPredictor",
    "FrequencyPredictor",
    "InputMode",
    "LastTokenPredictor",
    "MlpModel",
    "MlpPredictor",
    "Predictor",
    "PredictorBundle",
    "PredictorConfig",
    "PredictorSession",
    "RandomPredictor",
    "RoutingPredictorModel",
    "RoutingSpec",
    "TokenRankingPredictor",
    "TokenTablePredictor",
    "backbone_config",
    "carry_routing_spec",
    "fingerprint_of_state",
    "load_predictor",
    "load_target_embedding",
    "routing_spec_of",
    "routing_spec_of_model",
    "target_fingerprint",
    "tokenizer_fingerprint",
    "top_k_experts",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """Public names, for completion."""
    return __all__
