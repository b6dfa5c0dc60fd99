"""Output folders: never overwritten, only resumed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def check_output(out: Path, *, resume: bool | None, derived: Collection[str] = ()) -> None:
    """Refuse an output folder as `prepare_output` does, and make nothing.

    Args:
        out: The folder.
        resume: Accept a folder with content, to go on with it; None for a command that cannot.
        derived: Names that do not count as content: what a refused command made from its inputs, to be used again.

    Raises:
        ValueError: ``out`` is a file, cannot be made, or has content and ``resume`` is not true.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if not out.exists():
        _require_possible(out)
    if out.is_dir() and any(entry.name not in derived for entry in out.iterdir()) and not resume:
        hint = "" if resume is None else ", or add --resume to go on with it"
        raise ValueError(f"--out {out} is not empty; name a new folder{hint}")


def _require_possible(out: Path) -> None:
    """Refuse a folder that cannot be made, before anything is loaded."""
    for place in (out, *out.absolute().parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(f"--out {out}: {place} is a link that leads nowhere; remove it or name another folder")
        if place.is_dir():
            return
        if place.exists():
            raise ValueError(f"--out {out}: {place} is a file, not a folder; name a folder in a folder")


def prepare_output(out: Path, *, resume: bool | None, derived: Collection[str] = ()) -> Path:
    """Create an output folder, or refuse one that holds something.

    Args:
        out: The folder.
        resume: Accept a folder with content, to go on with it; None for a command that cannot.
        derived: See `check_output`.

    Returns:
        ``out``, which now exists.

    Raises:
        ValueError: ``out`` is a file, or has content and ``resume`` is not true.
    """
    check_output(out, resume=resume, derived=derived)
    out.mkdir(parents=True, exist_ok=True)
    return out
