"""What every stage of the recipe is told, and the names of the files the stages hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Settings:
    """Options of one run of the recipe.

    Attributes:
        out: Folder of the finished files, by default ``checkpoints``.
        work: Scratch folder for training checkpoints and logs, by default ``runs/recipe``.
        threads: CPU threads, at least 1.
        seed: Seed of initialisation and data order, not of the splits (those are part of the corpus).
    """

    out: Path
    work: Path
    threads: int
    seed: int

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")
        if self.seed < 0:
            raise ValueError(f"--seed must be at least 0, got {self.seed}")

    @property
    def manifest(self) -> Path:
        """The corpus manifest: groups and their splits."""
        return self.out / "groups.json"

    @property
    def target(self) -> Path:
        """The target model, its tokenizer and its card."""
        return self.out / "target"

    @property
    def drafter(self) -> Path:
        """The EAGLE-3 head of the target and its card."""
        return self.out / "drafter"

    @property
    def predictor(self) -> Path:
        """The predictor's bundle."""
        return self.out / "predictor"

    @property
    def tables(self) -> Path:
        """The table baselines' bundles, fitted on the predictor's training traces."""
        return self.out / "tables"
