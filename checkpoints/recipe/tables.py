"""Stage ``tables``: tables and perceptron, fitted on the very traces that the shipped predictor is trained on.

``make demo`` reports the shipped predictor beside them. Tables fitted on the demo's own, much smaller traces would
flatter it.
"""

from __future__ import annotations

import dataclasses

import torch
from rich.console import Console

from checkpoints.recipe.predictor import training_config
from checkpoints.recipe.settings import Settings
from ecospec.cli.provenance import provenance
from ecospec.predictor.bundle_files import BUNDLE_FILES
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.train.arrays import open_stores, read_arrays
from ecospec.train.baselines import SAVED, fit_baselines, save_baselines, training_facts
from ecospec.train.mlp import fit_mlp
from ecospec.train.mlp_config import MlpTraining
from ecospec.train.splits import CALIBRATION, TRAINING, VALIDATION, SplitConfig, split_arrays

#: Bundles of the stage.


NAMES = (*SAVED, "mlp")


def tables_complete(settings: Settings) -> bool:
    """Return whether every bundle exists."""
    return all((settings.tables / name / file).is_file() for name in NAMES for file in BUNDLE_FILES)


def make_tables(settings: Settings) -> None:
    """Fit them on the predictor's training split and write ``checkpoints/tables``."""
    torch.set_num_threads(settings.threads)
    config = training_config(settings)
    spec = routing_spec_of(settings.target)
    arrays = read_arrays(open_stores(config.trace_paths(), spec, f"target {settings.target}"))
    splits = split_arrays(arrays, SplitConfig.from_options(dataclasses.asdict(config)))
    training, validation, calibration = (
        arrays.subset(splits == code) for code in (TRAINING, VALIDATION, CALIBRATION)
    )
    del arrays
    fitted = fit_baselines(training)
    fitted["mlp"] = fit_mlp(
        training,
        load_target_embedding(settings.target, dtype=torch.float32),
        MlpTraining(),
        calibration=calibration,
        training_data=training_facts(training),
    )
    overlaps = save_baselines(fitted, settings.tables, names=NAMES, validation=validation, provenance=provenance())
    console = Console()
    for name, overlap in overlaps.items():
        size = sum(file.stat().st_size for file in (settings.tables / name).iterdir())
        line = f"{settings.tables / name}: {size / 1e6:.2f} MB, validation overlap {overlap:.4f}"
        console.print(line, soft_wrap=True)
