"""Checks of options and inputs, made before a command loads or measures anything; every message names the flag."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecospec.predictor.routing_spec import RoutingSpec


#: More than the cores of any machine; torch starts as many as it is told, until the system refuses.
MAX_THREADS = 1024


def flag(name: str) -> str:
    """Name of a field as it is typed.

    >>> flag("max_minutes")
    '--max-minutes'
    """
    return f"--{name.replace('_', '-')}"


def require_at_least(config: Any, least: int, *names: str) -> None:
    """Refuse fields below a bound.

    Args:
        config: The config dataclass.
        least: The bound.
        names: Its fields; None passes.

    Raises:
        ValueError: A field is smaller.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")


def require_above(config: Any, bound: float, *names: str) -> None:
    """Refuse fields that are not finite or not above a bound; arguments as `require_at_least`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > bound):
            raise ValueError(f"{flag(name)} must be above {bound:g} and finite, got {value}")


def require_threads(threads: int | None) -> None:
    """Refuse ``--threads`` that no machine has; None passes.

    Raises:
        ValueError: It is below 1 or above `MAX_THREADS`.
    """
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        bound = "at least 1" if threads < 1 else f"at most {MAX_THREADS}"
        raise ValueError(f"--threads must be {bound}, got {threads}")


def require_power_of_two(name: str, value: int | None) -> None:
    """Refuse a factor that is no power of two; None passes.

    Raises:
        ValueError: It is none.
    """
    if value is not None and (value < 1 or value & (value - 1)):
        raise ValueError(f"{flag(name)} must be a power of two (1, 2, 4, ...), got {value}")


def require_known(name: str, values: Sequence[str], allowed: Collection[str]) -> None:
    """Refuse names that do not exist.

    Args:
        name: The field.
        values: What was given.
        allowed: What there is.

    Raises:
        ValueError: One is unknown; the message says which, and the nearest that exists.
    """
    for value in values:
        if value not in allowed:
            near = get_close_matches(value, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{flag(name)} names unknown {value!r}; {hint}allowed: {', '.join(allowed)}")


def require_drafter(folder: Path) -> None:
    """Refuse a drafter that is not there.

    Raises:
        FileNotFoundError: The folder or one of its files does not exist.
    """
    for path in (folder, folder / "config.json", folder / "model.safetensors"):
        if not path.exists():
            raise FileNotFoundError(
                f"--drafter {folder}: {path} does not exist; give a folder with config.json and model.safetensors"
            )


def require_predictor(path: Path, spec: RoutingSpec, target: Path) -> None:
    """Refuse a predictor that is not there, or was made for another target, without reading its weights.

    Raises:
        FileNotFoundError: Neither a folder nor a hub id.
        ValueError: Its config is damaged, or of another target.
    """
    from ecospec.predictor.bundle_files import bundle_folder  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.predictor.predictor_config import PredictorConfig  # noqa: PLC0415

    config = PredictorConfig.read(bundle_folder(path))
    spec.require_same(config.spec, mine=f"target {target}", theirs=f"predictor {path}")


def require_new_file(out: Path) -> None:
    """Refuse an output file that exists, or that cannot be made.

    Raises:
        FileExistsError: It exists.
        ValueError: A folder on its way is a file.
    """
    if out.is_dir():
        raise FileExistsError(f"--out {out} is a folder; name a file in it, e.g. {out / 'cost.json'}")
    if out.exists():
        raise FileExistsError(f"--out {out} exists; remove it or name another file")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"--out {out}: {parent} is a file, not a folder; name a file in a folder")
