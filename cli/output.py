"""Output folders: never overwritten, only resumed."""

from __future__ import annotations

from pathlib import Path


def check_output(out: Path, *, resume: bool | None) -> None:
    """Refuse an output folder as `prepare_output` does, and make nothing.

    Args:
        out: The folder.
        resume: Accept a folder with content, to go on with it; None for a command that cannot.

    Raises:
        ValueError: ``out`` is a file, or has content and ``resume`` is not true.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not resume:
        hint = "" if resume is None else ", or add --resume to go on with it"
        raise ValueError(f"--out {out} is not empty; name a new folder{hint}")


def prepare_output(out: Path, *, resume: bool | None) -> Path:
    """Create an output folder, or refuse one that holds something.

    Args:
        out: The folder.
        resume: Accept a folder with content, to go on with it; None for a command that cannot.

    Returns:
        ``out``, which now exists.

    Raises:
        ValueError: ``out`` is a file, or has content and ``resume`` is not true.
    """
    check_output(out, resume=resume)
    out.mkdir(parents=True, exist_ok=True)
    return out
