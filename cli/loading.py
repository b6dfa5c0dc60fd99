"""Loading a target for a command: refused in one line where its config and its weights disagree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load_target(path: Path, dtype: str, device: str) -> Any:
    """Load a target in eval mode.

    Args:
        path: Folder or hub id.
        dtype: Name of a torch dtype, or ``auto`` for the stored one.
        device: ``cpu``, ``cuda``, ``cuda:<number>``, or ``auto`` (spread over all GPUs).

    Returns:
        The transformers causal language model.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: The weights lack a tensor of the model that the config describes, or have it in another shape.
    """
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    place = {"device_map": "auto"} if device == "auto" else {}
    advice = "config.json and weights do not belong together, or a download is incomplete; fetch the target again"
    with _quiet():
        try:
            # Mismatches are told by the loading info, all of them, instead of a report on the terminal.
            model, info = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **place
            )
        except (torch.OutOfMemoryError, OSError):
            raise
        except ImportError as error:  # quantised formats need packages of their own
            raise ValueError(f"target {path} needs what is not installed here: {error}") from error
        except Exception as error:  # what a config that makes no sense raises, from KeyError to ZeroDivisionError
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            reason = f"{type(error).__name__}: {first}".removeprefix("RuntimeError: ").removesuffix(": ")
            raise ValueError(f"target {path} cannot be loaded ({reason}): {advice}") from error
    if wrong := sorted(info["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"target {path}: {name}{more} stored as {list(stored)}, config.json asks for {list(wanted)}: {advice}"
        )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"target {path}: the weights lack {missing[0]}{more}: {advice}")
    return (model if device == "auto" else model.to(device)).eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers report nothing but through its return value."""
    from transformers.utils import logging  # noqa: PLC0415 - keeps `--help` fast

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
