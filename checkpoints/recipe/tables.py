"""Stage ``tables``: the table baselines, fitted on the very traces that the shipped predictor is trained on.

``make demo`` reports the shipped predictor beside them. Tables fitted on the demo's own, much smaller traces would
flatter it.
"""

from __future__ import annotations

import dataclasses

from rich.console import Console

from checkpoints.recipe.predictor import training_config
from checkpoints.recipe.settings import Settings
from ecospec.cli.provenance import provenance
from ecospec.predictor.bundle_files import BUNDLE_FILES
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.train.arrays import open_stores, read_arrays
from ecospec.train.baselines import SAVED, fit_baselines, save_baselines
from ecospec.train.splits import TRAINING, VALIDATION, SplitConfig, split_arrays


def tables_complete(settings: Settings) -> bool:
    """Return whether every bundle exists."""
    return all((settings.tables / name / file).is_file() for name in SAVED for file in BUNDLE_FILES)


def make_tables(settings: Settings) -> None:
    """Fit the tables on the predictor's training split and write ``checkpoints/tables``."""
    config = training_config(settings)
    spec = routing_spec_of(settings.target)
    arrays = read_arrays(open_stores(config.trace_paths(), spec, f"target {settings.target}"))
    splits = split_arrays(arrays, SplitConfig.from_options(dataclasses.asdict(config)))
    training, validation = (arrays.subset(splits == code) for code in (TRAINING, VALIDATION))
    del arrays
    overlaps = save_baselines(
        fit_baselines(training), settings.tables, validation=validation, provenance=provenance()
    )
    console = Console(soft_wrap=True)
    for name, overlap in overlaps.items():
        size = sum(file.stat().st_size for file in (settings.tables / name).iterdir())
        console.print(f"{settings.tables / name}: {size / 1e6:.2f} MB, validation overlap {overlap:.4f}")
