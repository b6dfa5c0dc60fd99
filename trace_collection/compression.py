"""Codecs and levels of a store's files; no Parquet library is loaded here, so options are checked at once."""

from __future__ import annotations

import re

DEFAULT_COMPRESSION = "brotli-9"
#: Levels each codec knows.
LEVELS = {"zstd": range(1, 23), "brotli": range(12)}
NO_COMPRESSION = "none"


def codec_and_level(compression: str) -> tuple[str, int | None]:
    """Read the name of a codec and its level.

    Args:
        compression: ``zstd-<level>``, ``brotli-<level>`` or ``none``. A level has one spelling: names are compared
            when a collection is resumed.

    Returns:
        Codec and level as ``pyarrow.parquet.write_table`` takes them.

    Raises:
        ValueError: The codec or its level is unknown.

    >>> codec_and_level("zstd-3"), codec_and_level("none")
    (('zstd', 3), ('none', None))
    """
    if compression == NO_COMPRESSION:
        return NO_COMPRESSION, None
    found = re.fullmatch(r"([a-z]+)-(0|[1-9][0-9]?)", compression)
    if found is None or found[1] not in LEVELS or int(found[2]) not in LEVELS[found[1]]:
        allowed = ", ".join(f"{codec}-{span[0]} to {codec}-{span[-1]}" for codec, span in LEVELS.items())
        raise ValueError(
            f"compression must be {allowed} or {NO_COMPRESSION}, got {compression!r}; leave it out for the default"
        )
    return found[1], int(found[2])
