"""What a demo run ends in: one page, one table, and ``summary.json``.

``summary.json`` holds the essential numbers under fixed keys and nothing else::

    {
      "overlap": {
        "predictor": {"mean": 0.88, "low": 0.87, "high": 0.89},     # shares, 95 % intervals over groups
        "demo_run_predictor": {...}, "random": {...}, "frequency": {...},
        "token_table": {...}, "bigram_table": {...}, "last_token": {...},
        "gain_over_best_table": {"mean": 0.1, "low": 0.09, "high": 0.11},   # of "predictor", paired
        "tokens": 250000
      },
      "decoding": {
        "bare": {
          "<policy>": {"speedup": 0.9, "speedup_low": 0.88, "speedup_high": 0.92, "accepted": 2.2, "experts": 11.3,
                       "step_ms": {"predict": 2.0, "draft": 3.0, "select": 0.4, "verify": 45.0, "total": 51.0}},
          ...
        },
        "ballast": {...}
      },
      "lossless": {"runs": 160, "tokens": 7680, "mismatches": 0, "ties": 0}
    }

``low`` and ``high`` are null where fewer than two groups were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecospec.eval import decoding_rendering, html_page, overlap_rendering
from ecospec.eval.decoding_benchmark import GENERATE
from ecospec.eval.report_files import provenance_section, write_text
from ecospec.eval.tables import Table, interval_of, number, number_interval, percent_interval

PREDICTORS = (
    "predictor",
    "demo_run_predictor",
    "random",
    "frequency",
    "token_table",
    "bigram_table",
    "last_token",
)
INTERVAL = ("mean", "low", "high")
LEVELS = ("bare", "ballast")
POLICY = ("speedup", "speedup_low", "speedup_high", "accepted", "experts")
STAGES = ("predict", "draft", "select", "verify", "total")
LOSSLESS = ("runs", "tokens", "mismatches", "ties")
#: Numbers that are null where an interval needs more groups.
_NULLABLE = frozenset({"low", "high", "speedup_low", "speedup_high"})


def summary(overlap: Mapping[str, Any], decoding: Mapping[str, Any]) -> dict[str, Any]:
    """Take the essential numbers out of both reports.

    Args:
        overlap: Report on the predictors ``predictor`` and ``demo_run_predictor``.
        decoding: Report at the levels ``bare`` and ``ballast``.

    Returns:
        The object drawn at the top of this file, validated.

    Raises:
        ValueError: A report lacks something.
    """
    try:
        found = {
            "overlap": {
                **{name: _pick(overlap["predictors"][name]["overlap"], INTERVAL) for name in PREDICTORS},
                "gain_over_best_table": _pick(overlap["gain_over_best_table"]["predictor"], INTERVAL),
                "tokens": overlap["tokens"],
            },
            "decoding": {
                level: {
                    name: _policy(one)
                    for name, one in decoding["levels"][level]["policies"].items()
                    if name != GENERATE  # a reference, stored in the decoding report, not a policy
                }
                for level in LEVELS
            },
            "lossless": _pick(decoding["lossless"], LOSSLESS),
        }
    except KeyError as error:
        raise ValueError(f"the reports lack {error.args[0]!r}; make them with `ecospec demo`") from error
    validate_summary(found)
    return found


def _pick(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _policy(values: Mapping[str, Any]) -> dict[str, Any]:
    return _pick(values, POLICY) | {"step_ms": {stage: values["step_ms"][stage]["mean"] for stage in STAGES}}


def validate_summary(data: Any, source: str = "summary.json") -> None:
    """Check that a summary holds exactly the keys drawn at the top of this file, and numbers.

    Args:
        data: The JSON object.
        source: File named in messages.

    Raises:
        ValueError: A key is missing, unknown, or holds something else; the message names it.
    """
    _keys(data, ("overlap", "decoding", "lossless"), source)
    _keys(data["overlap"], (*PREDICTORS, "gain_over_best_table", "tokens"), f"{source}: overlap")
    for name in (*PREDICTORS, "gain_over_best_table"):
        _numbers(data["overlap"][name], INTERVAL, f"{source}: overlap.{name}")
    _count(data["overlap"]["tokens"], f"{source}: overlap.tokens")
    _keys(data["decoding"], LEVELS, f"{source}: decoding")
    for level in LEVELS:
        where = f"{source}: decoding.{level}"
        if not isinstance(data["decoding"][level], Mapping) or not data["decoding"][level]:
            raise ValueError(f"{where} must be an object with one entry per policy")
        for policy, values in data["decoding"][level].items():
            _keys(values, (*POLICY, "step_ms"), f"{where}.{policy}")
            _numbers({name: values[name] for name in POLICY}, POLICY, f"{where}.{policy}")
            _numbers(values["step_ms"], STAGES, f"{where}.{policy}.step_ms")
    _keys(data["lossless"], LOSSLESS, f"{source}: lossless")
    for name in LOSSLESS:
        _count(data["lossless"][name], f"{source}: lossless.{name}")


def _keys(data: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {type(data).__name__}")
    if unknown := sorted(set(data) - set(names)):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; allowed: {', '.join(names)}")
    if missing := sorted(set(names) - set(data)):
        raise ValueError(f"{where}: key {missing[0]!r} is missing")


def _numbers(data: Any, names: tuple[str, ...], where: str) -> None:
    _keys(data, names, where)
    for name in names:
        value = data[name]
        if value is None and name in _NULLABLE:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{where}.{name} must be a number, got {value!r}")


def _count(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where} must be an integer of at least 0, got {value!r}")


def result_table(overlap: Mapping[str, Any], decoding: Mapping[str, Any]) -> Table:
    """The one table a demo run ends in."""
    rows: list[list[str]] = []
    for name in overlap_rendering.ordered(dict(overlap)):
        value = percent_interval(interval_of(overlap["predictors"][name]["overlap"]))
        rows.append([f"overlap of {name}, %", value, "", ""])
    for name, gain in overlap["gain_over_best_table"].items():
        value = percent_interval(interval_of(gain), signed=True)
        rows.append([f"gain of {name}, points", value, "", ""])
    for level_name, level in decoding["levels"].items():
        for name in decoding_rendering.names_in_order(level):
            one = level["policies"][name]
            speed = number_interval(one["speedup"], one["speedup_low"], one["speedup_high"])
            mark = "" if one["achievable"] else " *"
            cells = [number(one["accepted"]), number(one["experts"])]
            rows.append([f"{level_name}: {name}{mark}, ×", speed, *cells])
    counts = decoding["lossless"]
    found = f"{counts['mismatches']} of {counts['runs']} ({counts['ties']} ties)"
    rows.append(["outputs unlike plain decoding", found, "", ""])
    best = sorted({gain["best_table"] for gain in overlap["gain_over_best_table"].values()})
    return Table(
        "EcoSpec demo",
        ["", "value [95 %]", "accepted", "experts"],
        rows,
        notes=[
            f"Overlap: top-K, mean over tokens and layers. Gain: over the best table ({', '.join(best)}), paired.",
            "×: speed-up over the faster autoregressive reference. Accepted: tokens per step, bonus included.",
            "Experts: distinct routed experts per MoE layer and step.",
            f"* {decoding_rendering.NOT_ACHIEVABLE}: knows the true experts in advance, at no cost.",
        ],
    )


def write_demo(overlap: dict[str, Any], decoding: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write ``report.html`` and ``summary.json``.

    Args:
        overlap: The overlap report.
        decoding: The decoding report.
        out: An existing folder.

    Returns:
        The summary.

    Raises:
        ValueError: A report lacks something.
    """
    numbers = summary(overlap, decoding)
    page = html_page.page(
        "EcoSpec demo",
        "Which experts will a mixture-of-experts target touch, and does knowing them make speculative decoding "
        "faster? One run of the whole pipeline on the shipped checkpoints: routing traces, a predictor, the "
        "overlap report, the exported bundle, and the decoding loop that uses it.",
        [
            overlap_rendering.section(overlap),
            decoding_rendering.section(decoding),
            provenance_section(overlap, decoding),
        ],
    )
    write_text(out / "report.html", page)
    write_text(out / "summary.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    return numbers
