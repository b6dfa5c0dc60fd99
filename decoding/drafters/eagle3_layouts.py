"""The file layouts in which EAGLE-3 heads are published: which one a folder has, and how it becomes ours.

Ours is SpecForge's. Another layout is one more entry of `LAYOUTS`: how it is recognised, how its ``config.json``
becomes an `Eagle3Config` (with auxiliary layers as layer *outputs*), and how its tensors are called here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ecospec.decoding.drafters.eagle3_config import ARCHITECTURE, Eagle3Config


@dataclass(frozen=True)
class Layout:
    """One published layout.

    Attributes:
        name: Who writes it.
        architectures: Values of ``architectures[0]`` in ``config.json`` by which it is recognised.
        read_config: Maps the JSON object and the file's name (for messages) to a configuration.
        rename: Maps the file's tensors to those of `Eagle3Head`.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], str], Eagle3Config]
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def _unprefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the ``model.`` prefix that some exports carry."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


LAYOUTS: tuple[Layout, ...] = (Layout("SpecForge", (ARCHITECTURE,), Eagle3Config.from_dict, _unprefixed),)


def layout_of(raw: Mapping[str, Any], source: str) -> Layout:
    """Return the layout of a head's ``config.json``.

    Args:
        raw: The JSON object.
        source: What it was read from, for the message.

    Raises:
        ValueError: No known layout has this architecture.
    """
    listed = raw.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else None
    for layout in LAYOUTS:
        if architecture in layout.architectures:
            return layout
    known = ", ".join(f"{name} ({layout.name})" for layout in LAYOUTS for name in layout.architectures)
    raise ValueError(
        f"{source}: architecture {architecture!r} is no EAGLE-3 head this version reads; allowed: {known}"
    )
