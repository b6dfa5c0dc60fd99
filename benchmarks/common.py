"""What the benchmark scripts share: options from a dataclass, a quiet machine, one layout for JSON and Markdown.

A result is one JSON file with exactly these keys::

    {
      "benchmark": "step_time",
      "format_version": 1,
      "conditions": {"threads": 1, "load_average": 0.05, "allow_load": false, "hardware": "...", "date": "..."},
      "provenance": {"git_sha": "...", "versions": {...}, "argv": [...]},
      "options": {...},                 # the script's config
      "results": {...}                  # the script's own
    }

and a Markdown page of the same name, which says where and when it was measured.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime as dt
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from ecospec.cli.errors import exit_status
from ecospec.cli.flags import normalise_flags
from ecospec.cli.provenance import provenance
from ecospec.decoding.measurement import hardware_string, load_average, pin_threads, require_quiet

FORMAT_VERSION = 1
RESULTS = Path("docs/results")
#: Parameters of glibc's ``mallopt``, from ``malloc.h``.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

C = TypeVar("C")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """Under which conditions something was measured.

    Attributes:
        threads: CPU threads.
        load_average: Before the measurement; None where the system does not say.
        allow_load: Whether a busy machine was accepted.
        hardware: Processor or accelerator.
        date: UTC, to the minute.
    """

    threads: int
    load_average: float | None
    allow_load: bool
    hardware: str
    date: str

    @property
    def line(self) -> str:
        """One line for a page."""
        load = "unknown" if self.load_average is None else f"{self.load_average:.2f}"
        warning = " **Other work was running: not for quoting.**" if self.allow_load else ""
        return f"{self.hardware}, {self.threads} thread(s), load average {load} before, {self.date}.{warning}"


def prepare(*, threads: int = 1, allow_load: bool = False, device: str = "cpu") -> Conditions:
    """Pin the threads and refuse a busy machine.

    Raises:
        ValueError: The load average is above 0.3 and ``allow_load`` is false, or ``threads`` is below 1.
    """
    pin_threads(threads)
    require_quiet(allow_load=allow_load)
    load = load_average()
    return Conditions(
        threads=threads,
        load_average=load if load == load else None,  # noqa: PLR0124 - NaN where the system does not say
        allow_load=allow_load,
        hardware=hardware_string(torch.device(device)),
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def result(benchmark: str, conditions: Conditions, options: object, results: Mapping[str, Any]) -> dict[str, Any]:
    """Build the JSON object drawn at the top of this file.

    Args:
        benchmark: Name of the script.
        conditions: From `prepare`.
        options: The script's config, a dataclass.
        results: What it measured, plain values.
    """
    assert dataclasses.is_dataclass(options)
    assert not isinstance(options, type)
    return {
        "benchmark": benchmark,
        "format_version": FORMAT_VERSION,
        "conditions": dataclasses.asdict(conditions),
        "provenance": provenance(),
        "options": {name: _plain(value) for name, value in dataclasses.asdict(options).items()},
        "results": dict(results),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all; NaN and infinity are refused.

    Raises:
        ValueError: A value is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out a Markdown table; numbers are aligned to the right.

    >>> print(markdown_table(["policy", "ms"], [["a", 1.25], ["b", 10]]))
    | policy | ms |
    |---|--:|
    | a | 1.25 |
    | b | 10 |

    Raises:
        ValueError: A row has another number of cells than the header.
    """
    body = [list(row) for row in rows]
    if wrong := [row for row in body if len(row) != len(headers)]:
        raise ValueError(f"a table of {len(headers)} columns has a row of {len(wrong[0])}: {wrong[0]}")
    numeric = [bool(body) and all(isinstance(row[i], (int, float)) for row in body) for i in range(len(headers))]
    lines = [_row(headers), "|" + "|".join("--:" if number else "---" for number in numeric) + "|"]
    return "\n".join([*lines, *(_row(row) for row in body)])


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def write_page(path: Path, title: str, conditions: Conditions, parts: Iterable[str]) -> None:
    """Write a Markdown page: title, conditions, then paragraphs and tables separated by empty lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([f"# {title}", conditions.line, *parts])
    path.write_text(text + "\n", encoding="utf-8")


def peak_rss_bytes() -> int:
    """Most physical memory this process has used so far, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource  # noqa: PLC0415 - does not exist on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def keep_freed_memory() -> None:
    """Let glibc's heap keep what is freed in this process, so that no timing depends on page faults.

    Does nothing with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28)):
        mallopt(parameter, value)


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a module in a new Python process, so that its peak memory is its own.

    Args:
        function: Defined at the top of a module; what it returns must be picklable.
        arguments: Its arguments, picklable.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def run_script(config_class: type[C], run: Callable[[C], None], argv: Sequence[str] | None = None) -> None:
    """Parse a script's options from its config dataclass, run it, and exit with a status as `ecospec` does."""
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings  # noqa: PLC0415 - only for scripts

    def main() -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        parser: Any = ArgumentParser(description=config_class.__doc__, exit_on_error=False, allow_abbrev=False)
        parser.add_class_arguments(config_class, nested_key=None, as_group=False)
        try:
            arguments = normalise_flags(sys.argv[1:] if argv is None else argv, config_class)
            namespace = parser.parse_args(arguments)
            values = vars(parser.instantiate(namespace))
        except ArgumentError as error:
            raise ValueError(str(error)) from error
        run(config_class(**values))

    sys.exit(exit_status(Path(sys.argv[0]).name, main))
