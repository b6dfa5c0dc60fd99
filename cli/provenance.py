"""What produced an artefact: code version, library versions and the command line."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_LIBRARIES = ("ecospec", "torch", "transformers", "lightning", "numpy", "pyarrow")


def git_sha(folder: Path | None = None) -> str:
    """Commit of the checkout that runs, with ``-dirty`` if tracked files differ; ``"unknown"`` outside of one.

    Args:
        folder: Where to ask; default: this package's checkout.
    """
    command = ["git", "-C", str(folder or Path(__file__).resolve().parent), "describe", "--always", "--abbrev=40"]
    try:
        return subprocess.run(  # noqa: S603 - fixed command
            [*command, "--match=", "--dirty"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def provenance() -> dict[str, Any]:
    """Plain values: ``git_sha``, ``versions`` of Python and libraries, ``argv`` (the program without its path)."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"git_sha": git_sha(), "versions": versions, "argv": [Path(sys.argv[0]).name, *sys.argv[1:]]}
