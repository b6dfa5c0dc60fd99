"""From a training checkpoint to a predictor bundle, with proof that both give the same scores."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecospec.predictor.bundle import ExpertPredictor
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.checkpoints import read_checkpoint
from ecospec.train.config import Finetune
from ecospec.train.lora import merge_lora
from ecospec.train.network import rebuilt_model
from ecospec.train.trainer import BEST

#: Largest difference between scores of the trained and the exported predictor.
TOLERANCE = 1e-5

#: Largest difference between scores before and after LoRA is merged, in units of their spread; float32 makes 1e-6.
MERGE_TOLERANCE = 1e-4

_PREFIX = "model."


@dataclass(frozen=True)
class ExportResult:
    """What was exported.

    Attributes:
        out: The bundle.
        overlap: Validation overlap of the checkpoint.
        difference: Largest difference between the scores of the trained network, its weights rounded to the stored
            type, and of the bundle.
        rounding: The same without rounding the trained weights: the price of the stored type.
        size_bytes: Size of the bundle.
    """

    out: Path
    overlap: float
    difference: float
    rounding: float
    size_bytes: int


def export_predictor(
    checkpoint: Path,
    target: Path,
    out: Path,
    *,
    dtype: str = "float32",
    store_embedding: bool = False,
    overwrite: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Write the bundle of a training checkpoint.

    Args:
        checkpoint: Folder of a training run (its best checkpoint is taken) or a ``.ckpt`` file.
        target: Folder of the target it was trained for.
        out: Folder of the bundle.
        dtype: Type of the stored weights: float32 or bfloat16.
        store_embedding: Store the target's embedding too.
        overwrite: Replace a bundle that is already there.
        provenance: Plain values beside those of the training run.

    Raises:
        FileNotFoundError: No checkpoint or no target there.
        FileExistsError: ``out`` holds something.
        ValueError: The checkpoint is none of ours, was trained for another target, or was never validated.
        RuntimeError: Trained and exported predictor disagree (nothing is written then).
    """
    path = find_checkpoint(checkpoint)
    model, saved = load_trained(path, target)
    run, metrics = saved["run"], dict(saved["metrics"])
    if "val_overlap" not in metrics:
        raise ValueError(
            f"{path} was written before the first validation; train on (--resume) to the end of an epoch"
        )
    metrics |= {f"val_overlap_{name}": value for name, value in run["baseline_overlaps"].items()}
    stored = getattr(torch, dtype)
    exact = _probe_scores(model)
    _merge(model, run, exact)
    rounded = {name: value.to(stored).to(torch.float32) for name, value in model.state_dict().items()}
    model.load_state_dict(rounded)
    trained = _probe_scores(model)
    predictor = ExpertPredictor.from_model(
        model,
        temperature=tuple(saved.get("temperature", ())),
        options=run["options"],
        training_data=run["training_data"],
        metrics=metrics,
        provenance={"training": run["provenance"], "export": dict(provenance or {})},
    )
    difference = _check_round_trip(predictor, trained, stored, store_embedding=store_embedding)
    predictor.save_pretrained(out, overwrite=overwrite, store_embedding=store_embedding, dtype=stored)
    return ExportResult(
        out=out,
        overlap=float(metrics["val_overlap"]),
        difference=difference,
        rounding=float((exact - trained).abs().max()),
        size_bytes=sum(file.stat().st_size for file in out.iterdir()),
    )


def find_checkpoint(path: Path) -> Path:
    """The ``.ckpt`` file meant by a path: the file itself, or the best one of a training run's folder.

    Raises:
        FileNotFoundError: There is none.
    """
    candidate = path / "checkpoints" / BEST if path.is_dir() else path
    if not candidate.is_file():
        raise FileNotFoundError(
            f"no checkpoint at {candidate}; give the --out folder of train-predictor or a .ckpt file"
        )
    return candidate


def load_trained(path: Path, target: Path) -> tuple[RoutingPredictorModel, dict[str, Any]]:
    """Rebuild the trained network from a checkpoint.

    Args:
        path: A ``.ckpt`` file.
        target: Folder of the target it was trained for.

    Returns:
        The network as it was trained, in float32 and evaluation mode, and the checkpoint's ``"ecospec"`` values.

    Raises:
        ValueError: The file is no checkpoint of ours, is truncated, or was trained for another target.
    """
    content = read_checkpoint(path)
    saved: dict[str, Any] = content["ecospec"]
    run, weights = saved["run"], content["state_dict"]
    spec = RoutingSpec.from_dict(run["spec"], str(path))
    routing_spec_of(target).require_same(spec, mine=f"target {target}", theirs=f"checkpoint {path}")
    own = {name.removeprefix(_PREFIX): value for name, value in weights.items() if name.startswith(_PREFIX)}
    return rebuilt_model(spec, run, own, target), saved


def _merge(model: RoutingPredictorModel, run: Mapping[str, Any], exact: Tensor) -> None:
    """Fold LoRA matrices into the backbone, if there are any, and check that its scores stay the same."""
    if run["options"].get("finetune") != Finetune.LORA:
        return
    merge_lora(model)
    difference = float((_probe_scores(model) - exact).abs().max() / exact.std())
    if not difference <= MERGE_TOLERANCE:
        raise RuntimeError(
            f"merging LoRA moved scores by {difference:.1e} of their spread, allowed {MERGE_TOLERANCE:.0e}"
        )


def _probe_scores(model: RoutingPredictorModel) -> Tensor:
    """Scores of a fixed sequence of random tokens, ``[1, T, L, E]``."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.spec.vocab_size, (1, 64), generator=generator)
    with torch.no_grad():
        return model(ids)


def _check_round_trip(
    predictor: ExpertPredictor, trained: Tensor, stored: torch.dtype, *, store_embedding: bool
) -> float:
    """Save to a scratch folder, load, compare; return the largest difference."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        predictor.save_pretrained(folder, store_embedding=store_embedding, dtype=stored)
        embedding = None if store_embedding else predictor.model.target_embedding
        loaded = ExpertPredictor.from_pretrained(folder, target_embedding=embedding, dtype=torch.float32)
        difference = float((_probe_scores(loaded.model) - trained).abs().max())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"trained and exported predictor differ by {difference:.1e}, allowed {TOLERANCE:.0e}")
    return difference
