"""Flags as people type them: ``--allow-load`` as well as ``--allow_load true``."""

from __future__ import annotations

import typing
from collections.abc import Sequence

_TRUTH = {"true", "false", "yes", "no"}


def normalise_flags(argv: Sequence[str], config_class: type) -> list[str]:
    """Translate arguments to what jsonargparse reads: underscores in flags, a value after every boolean flag.

    Args:
        argv: Arguments as typed.
        config_class: The config dataclass whose fields are the flags.

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Config:
    ...     allow_load: bool = False
    ...     dry_run_name: str = ""
    >>> normalise_flags(["--allow-load", "--dry-run-name=a-b"], Config)
    ['--allow_load', 'true', '--dry_run_name=a-b']
    >>> normalise_flags(["--allow-load", "false"], Config)
    ['--allow_load', 'false']
    """
    hints = typing.get_type_hints(config_class)
    booleans = {name for name, kind in hints.items() if kind is bool}
    result: list[str] = []
    for position, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if not argument.startswith("--") or (field := name[2:].replace("-", "_")) not in hints:
            result.append(argument)
            continue
        result.append(f"--{field}{equals}{value}")
        following = argv[position + 1] if position + 1 < len(argv) else ""
        if field in booleans and not equals and following.lower() not in _TRUTH:
            result.append("true")
    return result
