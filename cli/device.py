"""One check of ``--device``, made before a command does anything else."""

from __future__ import annotations


def require_device(name: str, *, auto: bool = False, devices: int = 1) -> None:
    """Refuse a device that this machine does not have.

    Args:
        name: As given to ``--device``: ``cpu``, ``cuda`` or ``cuda:<number>``.
        auto: Whether ``auto`` (spread over all GPUs) is allowed too.
        devices: Number of them, each for a process of its own; a CPU takes any.

    Raises:
        ValueError: The device is unknown, or not here; the message says what is.
    """
    if name == "cpu" or (auto and name == "auto"):
        return
    import torch  # noqa: PLC0415 - keeps `--help` fast

    kind, colon, number = name.partition(":")
    if kind != "cuda" or bool(colon) != (number.isascii() and number.isdigit()):
        allowed = "cpu, cuda, cuda:<number>" + ", auto" * auto
        raise ValueError(f"--device {name!r} is not supported; {_machine()}; give one of: {allowed}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        advice = "use --device cpu" if count == 0 else f"use --device cuda:0 to cuda:{count - 1}, or cpu"
        raise ValueError(f"--device {name!r} is not on this machine; {_machine()}; {advice}")
    if devices > count:
        raise ValueError(f"--devices {devices} are not on this machine; {_machine()}; use at most {count}")


def _machine() -> str:
    """What this machine can compute on."""
    import torch  # noqa: PLC0415 - keeps `--help` fast

    if torch.cuda.is_available():
        return f"this machine has cpu and {torch.cuda.device_count()} CUDA device(s)"
    reason = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
    return f"this machine has cpu only ({reason})"
