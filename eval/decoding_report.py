"""The decoding report: what every policy does to wall-clock time, with intervals, at every cost level.

On disk::

    OUT/
      report.json   # every number; keys in the docstring of `decoding_report`
      report.md     # the tables
      report.html   # the page, self-contained
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecospec.eval import decoding_rendering, html_page
from ecospec.eval.decoding_benchmark import BenchmarkPrompt, BenchmarkResult, BenchmarkSettings
from ecospec.eval.decoding_summary import summarise_runs
from ecospec.eval.report_files import (
    FORMAT_VERSION,
    HTML_NAME,
    JSON_NAME,
    MARKDOWN_NAME,
    provenance_section,
    write_text,
)
from ecospec.predictor.routing_spec import RoutingSpec


def decoding_report(
    result: BenchmarkResult,
    prompts: Sequence[BenchmarkPrompt],
    settings: BenchmarkSettings,
    spec: RoutingSpec,
    *,
    levels: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Any],
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Make the report's JSON object.

    Args:
        result: From `run_benchmark`.
        prompts: The prompts it ran on.
        settings: Its settings.
        spec: Routing of the target.
        levels: What each cost level is (widening factor, ballast bytes, ...), by name, in the order of tables.
        inputs: What was read: target, drafter, predictor, cost tables, with paths.
        provenance: Versions, command, commit, hardware, threads.
        notes: Caveats shown on top.

    Returns:
        ``format_version``, ``kind``, ``spec``, ``settings``, ``prompts`` (number, groups, tokens), ``inputs``,
        ``notes``, ``provenance``, ``load`` (first, mean and highest load average), ``levels`` (by name: ``cost``
        and the keys of `summarise_runs`), ``lossless`` (counts and failures) and ``runs`` (one per prompt, level
        and policy, without tokens).
    """
    found = summarise_runs(result.runs, prompts, top_k=spec.top_k)
    given, notes, prompts = len(prompts), list(notes), prompts[: result.prompts]
    if result.prompts < given:
        notes.append(f"The time limit was reached after {result.prompts} of {given} prompts.")
    return {
        "format_version": FORMAT_VERSION,
        "kind": "decoding",
        "spec": spec.to_dict(),
        "settings": dataclasses.asdict(settings) | {"eos": list(settings.eos)},
        "prompts": {
            "number": len(prompts),
            "groups": len({prompt.group_id for prompt in prompts}),
            "datasets": sorted({prompt.dataset for prompt in prompts}),
            "mean_tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
        },
        "inputs": dict(inputs),
        "notes": notes,
        "provenance": dict(provenance),
        "load": _loads(result.loads),
        "levels": {name: {"cost": dict(cost)} | found[name] for name, cost in levels.items()},
        "lossless": result.lossless
        | {
            "failures": [
                {"level": level, "policy": policy, "prompt": prompt} | dataclasses.asdict(comparison)
                for level, policy, prompt, comparison in result.failures
            ]
        },
        "runs": [
            {
                "prompt": run.prompt,
                "group_id": prompts[run.prompt].group_id,
                "level": run.level,
                "policy": run.policy,
                "prefill": run.prefill,
                "seconds": run.seconds,
                "tokens": len(run.tokens),
                "steps": len(run.steps),
            }
            for run in result.runs
        ],
    }


def _loads(loads: Sequence[float]) -> dict[str, float | None]:
    known = [load for load in loads if not math.isnan(load)]
    if not known:
        return {"first": None, "mean": None, "highest": None}
    return {"first": known[0], "mean": sum(known) / len(known), "highest": max(known)}


def write_decoding_report(report: dict[str, Any], out: Path) -> None:
    """Write ``report.html``, ``report.md`` and, last, ``report.json``.

    Args:
        report: From `decoding_report`.
        out: An existing folder.
    """
    page = html_page.page(
        "EcoSpec: decoding",
        "What choosing candidates does to wall-clock time, policies side by side on the same prompts.",
        [decoding_rendering.section(report), provenance_section(report)],
    )
    write_text(out / HTML_NAME, page)
    write_text(out / MARKDOWN_NAME, decoding_rendering.markdown(report))
    write_text(out / JSON_NAME, json.dumps(report, indent=1, allow_nan=False) + "\n")
