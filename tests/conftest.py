"""Fixtures shared by all tests: where the demo checkpoints lie, and one thread for everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small models run fastest on one thread, and results do not depend on the number of cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Folder of the shipped demo checkpoints."""
    return ROOT / "checkpoints"
