"""``ecospec export-predictor``: a training checkpoint becomes a predictor bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ecospec.cli.output import prepare_output

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ExportPredictorConfig:
    """Options of ``export-predictor``."""

    checkpoint: Path
    """Folder of a training run (its best checkpoint is taken) or a .ckpt file, e.g. of --keep-overlap."""
    target: Path
    """Folder of the target the predictor was trained for."""
    out: Path
    """Folder of the bundle."""
    dtype: str = "float32"
    """Type of the stored weights: float32 or bfloat16."""
    store_embedding: bool = False
    """Store the target's embedding table in the bundle, which then works without the target."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: The dtype is unknown.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def run(config: ExportPredictorConfig) -> None:
    """Export, check that trained and exported predictor agree, and say so."""
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.train.export import export_predictor  # noqa: PLC0415

    prepare_output(config.out, resume=None)
    result = export_predictor(
        config.checkpoint,
        config.target,
        config.out,
        dtype=config.dtype,
        store_embedding=config.store_embedding,
        provenance=provenance(),
    )
    Console().print(
        f"{config.out}: {result.size_bytes / 1e6:.2f} MB, validation overlap {result.overlap:.4f}; trained and "
        f"exported scores differ by at most {result.difference:.1e} (rounding to {config.dtype} moves them by "
        f"up to {result.rounding:.1e})",
        soft_wrap=True,
    )
