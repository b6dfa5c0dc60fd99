"""Output folders: never overwritten, only resumed."""

from __future__ import annotations

from pathlib import Path


def prepare_output(out: Path, *, resume: bool) -> Path:
    """Create an output folder, or refuse one that holds something.

    Args:
        out: The folder.
        resume: Accept a folder with content, to go on with it.

    Returns:
        ``out``, which now exists.

    Raises:
        ValueError: ``out`` is a file, or has content and ``resume`` is false.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not resume:
        raise ValueError(f"--out {out} is not empty; name a new folder, or add --resume to go on with it")
    out.mkdir(parents=True, exist_ok=True)
    return out
