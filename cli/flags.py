"""Flags as people type them: ``--allow-load`` as well as ``--allow_load true``."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

#: What a flag of each type takes.
_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    dict: "a JSON object",
}
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
    >>> normalise_flags(["--print-config"], Config)
    ['--print_config']
    """
    hints = typing.get_type_hints(config_class)
    booleans = {name for name, kind in hints.items() if kind is bool}
    result: list[str] = []
    for position, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == "--print-config":  # jsonargparse's own, no field
            result.append(f"--print_config{equals}{value}")
            continue
        if not argument.startswith("--") or (field := name[2:].replace("-", "_")) not in hints:
            result.append(argument)
            continue
        result.append(f"--{field}{equals}{value}")
        following = argv[position + 1] if position + 1 < len(argv) else ""
        if field in booleans and not equals and following.lower() not in _TRUTH:
            result.append("true")
    return result


def readable_error(message: str, config_class: type) -> str:
    r"""Say in the words of the command line what jsonargparse says in those of Python.

    Args:
        message: Of jsonargparse's ``ArgumentError``.
        config_class: The config dataclass whose fields are the flags.

    Returns:
        One line that names the flag, what it takes and what was given; other messages as they are.

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Config:
    ...     limit: int | None = None
    >>> readable_error("Parser key \"limit\":\n  Expected a <class 'int'>. Got value: 1000.0", Config)
    '--limit must be a whole number, got 1000.0'
    >>> readable_error("unrecognized arguments: --limits 3", Config)
    'unknown option --limits; did you mean --limit? (--help lists all)'
    >>> readable_error("unrecognized arguments: runs/b", Config)
    "unexpected argument 'runs/b'; several values of one option are joined by commas: A,B"
    """
    if extra := re.fullmatch(r"[Uu]nrecognized arguments: (\S+).*", message, re.DOTALL):
        return _unexpected(extra[1], config_class)
    found = re.fullmatch(r'Parser key "(\w+)":.*(?:Got|Given) value: (.*)', message, re.DOTALL)
    kind = None if found is None else typing.get_type_hints(config_class).get(found[1])
    if found is None or kind is None:
        return message
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    words = [_KINDS.get(typing.get_origin(one) or one, str(one)) for one in options if one is not types.NoneType]
    if typing.get_origin(options[0]) is typing.Literal:
        words = [f"one of {', '.join(map(str, typing.get_args(options[0])))}"]
    return f"--{found[1].replace('_', '-')} must be {' or '.join(words)}, got {found[2]}"


def _unexpected(argument: str, config_class: type) -> str:
    """Say of an argument that no option takes what was probably meant."""
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; several values of one option are joined by commas: A,B"
    name = argument.partition("=")[0]
    fields = [*typing.get_type_hints(config_class), "config", "print_config"]
    wanted = name.lstrip("-").replace("-", "_")
    if name.startswith("--") and wanted in fields:  # a positional argument
        return f"{name} is given without its name, as the first argument"
    near = get_close_matches(wanted, fields, n=1) or [field for field in fields if wanted in field.split("_")]
    hint = f"did you mean --{near[0].replace('_', '-')}? (--help lists all)" if near else "--help lists all"
    return f"unknown option {name}; {hint}"


def check_config_files(arguments: Sequence[str], config_class: type) -> None:
    """Refuse a ``--config`` file that holds no options, or one the command does not have.

    Args:
        arguments: Arguments of the command.
        config_class: The config dataclass whose fields are the options.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not YAML, empty, or names an unknown option; the message lists those allowed.
    """
    allowed = list(typing.get_type_hints(config_class))
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--config" and (equals or position + 1 < len(arguments)):
            _check_config_file(Path(value if equals else arguments[position + 1]), allowed)


def _check_config_file(path: Path, allowed: Sequence[str]) -> None:
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - keeps `--help` fast

    if not path.is_file():
        raise FileNotFoundError(f"--config {path} does not exist; give a YAML file with lines of option: value")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML ({error}); write lines of option: value") from error
    if not found or not isinstance(found, dict):
        what = "is empty" if not found else f"holds a {type(found).__name__}, not options"
        raise ValueError(f"--config {path} {what}; write lines of option: value (options: {', '.join(allowed)})")
    for key in found:
        if key not in allowed:
            near = get_close_matches(str(key).replace("-", "_"), allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"--config {path} names unknown option {key!r}; {hint}allowed: {', '.join(allowed)}")
