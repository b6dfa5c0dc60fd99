"""Codecs and levels of a store's files; no Parquet library is loaded here, so options are checked at once."""

from __future__ import annotations

import re

#: Default: brotli-10 for targets of few ids a token, `FAST_COMPRESSION` for the others.
AUTO = "auto"
#: Smallest of those measured but one, and slow: 0.8 million ids a second (``docs/results/trace_size.md``).
SMALL_COMPRESSION = "brotli-10"
#: More than ten million ids a second: a target of hundreds of ids a token does not wait for its store.
FAST_COMPRESSION = "zstd-9"
#: Ids a token, L * K, up to which `SMALL_COMPRESSION` keeps up with a target: 12,000 tokens a second.
SMALL_UP_TO_IDS = 64
#: Levels each codec knows.
LEVELS = {"zstd": range(1, 23), "brotli": range(12)}
NO_COMPRESSION = "none"


def resolve_compression(compression: str, ids_per_token: int) -> str:
    """Replace `AUTO` by the codec and level it stands for.

    Args:
        compression: `AUTO`, or what `codec_and_level` takes.
        ids_per_token: Expert ids of a token, L * K.

    Returns:
        What `codec_and_level` takes.

    Raises:
        ValueError: The codec or its level is unknown.

    >>> resolve_compression("auto", 24), resolve_compression("auto", 752), resolve_compression("zstd-3", 24)
    ('brotli-10', 'zstd-9', 'zstd-3')
    """
    if compression == AUTO:
        return SMALL_COMPRESSION if ids_per_token <= SMALL_UP_TO_IDS else FAST_COMPRESSION
    codec_and_level(compression)
    return compression


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
        raise ValueError(f"compression must be {AUTO}, {allowed} or {NO_COMPRESSION}, got {compression!r}")
    return found[1], int(found[2])
