"""A decoding report for reading: Markdown, and a section of a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecospec.eval import figures, html_page
from ecospec.eval.decoding_benchmark import GENERATE
from ecospec.eval.tables import Table, interval_of, number, number_interval, thousands

STAGES = ("predict", "draft", "select", "verify", "other")
NOT_ACHIEVABLE = "not achievable"
DEFINITIONS = (
    (
        "Speed-up: summed decoding time (first to last token) of the reference over that of the policy, on the "
        "same prompts; the reference is the faster of our autoregressive loop and transformers' generate. Above 1 "
        "is faster."
    ),
    "Accepted: tokens per step, bonus token included (autoregressive: 1).",
    "Experts: distinct routed experts per MoE layer that the verified nodes of a step touch.",
    "Intervals: 95 %, 2,000 bootstrap resamples of prompt groups, paired.",
)


def names_in_order(level: dict[str, Any]) -> list[str]:
    """References first, then policies as run; what cannot be had comes last."""
    policies = level["policies"]
    first = [name for name in ("autoregressive", GENERATE) if name in policies]
    rest = sorted((name for name in policies if name not in first), key=_rank)
    return first + sorted(rest, key=lambda name: not policies[name]["achievable"])


def _rank(name: str) -> tuple[int, str]:
    known = ("probability", "random", "ecospec_static", "ecospec", "evict")
    return (known.index(name) if name in known else len(known), name)


def label(level: dict[str, Any], name: str) -> str:
    """Name in tables: the reference and what cannot be had are marked."""
    if not level["policies"][name]["achievable"]:
        return f"{name} ({NOT_ACHIEVABLE})"
    return f"{name} (reference)" if level["reference"] == name else name


def speed_table(report: dict[str, Any], level_name: str) -> Table:
    """Speed-up, accepted tokens and experts of every policy at one cost level."""
    level = report["levels"][level_name]
    names = names_in_order(level)
    rows = []
    for name in names:
        one = level["policies"][name]
        rows.append(
            [
                label(level, name),
                number_interval(one["speedup"], one["speedup_low"], one["speedup_high"], 3),
                number_interval(one["accepted"], one["accepted_low"], one["accepted_high"]),
                number(one["experts"]),
                number(one["nodes"]),
                number(one["tokens_per_second"], 1),
                number(one["first_token_ms"]["p50"], 0),
                number(one["speedup_with_prefill"], 3),
            ]
        )
    strong = [i for i, n in enumerate(names) if level["policies"][n]["speedup"] == _best(level) > 1.0]
    headers = [
        "policy",
        "speed-up, × [95 %]",
        "accepted per step, bonus included [95 %]",
        "experts per layer and step",
        "verified nodes",
        "tokens per second",
        "first token, ms (p50)",
        "speed-up with prompt, ×",
    ]
    return Table(f"Cost level {level_name}: {describe(level['cost'])}", headers, rows, strong)


def summary_table(report: dict[str, Any]) -> Table:
    """The essentials of all cost levels, narrow enough for a terminal."""
    levels = report["levels"]
    names = names_in_order(next(iter(levels.values())))
    rows = []
    for name in names:
        found = [level["policies"][name] for level in levels.values()]
        speeds = [number_interval(one["speedup"], one["speedup_low"], one["speedup_high"]) for one in found]
        mark = "" if found[0]["achievable"] else " *"
        rows.append([name + mark, *speeds, number(found[0]["accepted"]), number(found[0]["experts"])])
    headers = ["policy", *(f"{name}, ×" for name in levels), "accepted", "experts"]
    notes = [
        "Speed-up: over the faster autoregressive reference. Accepted: tokens per step, bonus included.",
        "Experts: distinct routed experts per MoE layer and step.",
    ]
    if any(row[0].endswith("*") for row in rows):
        notes.append(f"* {NOT_ACHIEVABLE}: knows the true experts in advance, at no cost.")
    return Table("Decoding: speed-up at each cost level, with 95 % intervals", headers, rows, notes=notes)


def _best(level: dict[str, Any]) -> float:
    return max(float(one["speedup"]) for one in level["policies"].values() if one["achievable"])


def describe(cost: dict[str, Any]) -> str:
    """A cost level in words."""
    words = []
    if factor := cost.get("widening_factor"):
        words.append(f"experts widened {factor}-fold, function unchanged")
    if ballast := cost.get("ballast_bytes_per_layer"):
        words.append(f"with {ballast / 2**20:.0f} MiB of ballast per MoE layer (dense weights read at every step)")
    return ", ".join(words) or "the target as it is"


def step_table(report: dict[str, Any], level_name: str) -> Table:
    """Time of a step split into its stages."""
    level = report["levels"][level_name]
    rows = []
    for name in names_in_order(level):
        times = level["policies"][name]["step_ms"]
        cells = [number(times[stage]["mean"]) for stage in STAGES]
        total = times["total"]
        rows.append([label(level, name), *cells, number(total["mean"]), number(total["p50"]), number(total["p95"])])
    headers = ["policy", *STAGES, "total, mean", "total, p50", "total, p95"]
    notes = ["The oracle's own work (an extra forward of the target) is left out of every time."]
    return Table(
        f"Milliseconds of a step at cost level {level_name} (means unless said)", headers, rows, notes=notes
    )


def comparison_table(report: dict[str, Any]) -> Table | None:
    """Paired differences between policies at the same budget."""
    rows = []
    for level_name, level in report["levels"].items():
        for name, entry in level["comparisons"].items():
            first, second = name.split("_over_")
            speedup = interval_of(entry["speedup"])
            rows.append(
                [
                    f"{level_name}: {first} against {second}",
                    _signed(entry["experts"]),
                    _signed(entry["accepted"]),
                    number_interval(speedup.mean, speedup.low, speedup.high, 3),
                ]
            )
    if not rows:
        return None
    headers = ["comparison", "experts per layer and step [95 %]", "accepted per step [95 %]", "times faster [95 %]"]
    return Table("Paired differences on the same prompts, same budget", headers, rows)


def _signed(entry: dict[str, Any]) -> str:
    interval = interval_of(entry)
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.2f}"
    return f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def lossless_line(report: dict[str, Any]) -> str:
    """The check of all outputs in one sentence."""
    counts = report["lossless"]
    return (
        f"Lossless: {thousands(counts['runs'])} outputs with {thousands(counts['tokens'])} tokens compared with "
        "plain "
        f"decoding, {counts['mismatches']} mismatches, {counts['ties']} numerical ties (logits within 1e-4 or "
        "router "
        "margins below 1e-5)."
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """Every table of a report in reading order."""
    found: list[Table | None] = [speed_table(report, name) for name in report["levels"]]
    found.append(comparison_table(report))
    found += [step_table(report, name) for name in report["levels"]]
    return [table for table in found if table is not None]


def setting_line(report: dict[str, Any]) -> str:
    """What was run, in one sentence."""
    settings, prompts = report["settings"], report["prompts"]
    return (
        f"{prompts['number']} prompts of {prompts['groups']} groups (mean {prompts['mean_tokens']:.0f} tokens), "
        f"{settings['max_new_tokens']} tokens generated, greedy, budget {settings['budget']} (with root), trees of "
        f"{settings['depth']} × top-{settings['top_k']}; policies interleaved in random order on one machine."
    )


def markdown(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    spec = report["spec"]
    shape = f"{spec['num_layers']} MoE layers, {spec['num_experts']} experts, top-{spec['top_k']}"
    lead = [
        "# Decoding: policies side by side",
        f"Target `{spec['target_id']}`: {shape}. {setting_line(report)}",
        lossless_line(report),
        *(f"> {note}" for note in report["notes"]),
        "\n".join(f"- {line}" for line in DEFINITIONS),
    ]
    return "\n\n".join(lead) + "\n\n" + "\n".join(table.markdown() for table in tables(report))


def charts(report: dict[str, Any]) -> dict[str, str]:
    """SVG text by name: ``speedups``, ``steps``."""
    levels = report["levels"]
    names = names_in_order(next(iter(levels.values())))
    hatched = [n for n in names if any(not level["policies"][n]["achievable"] for level in levels.values())]
    speeds = {name: _speeds(name, level, names) for name, level in levels.items()}
    steps = {
        name: {stage: [level["policies"][n]["step_ms"][stage]["mean"] for n in names] for stage in STAGES}
        for name, level in levels.items()
    }
    return {
        "speedups": figures.speedup_bars(speeds, names, hatched),
        "steps": figures.step_time_bars(steps, names),
    }


def _speeds(level_name: str, level: dict[str, Any], names: Sequence[str]) -> figures.Series:
    nan = float("nan")
    policies = [level["policies"][name] for name in names]
    low = [nan if p["speedup_low"] is None else float(p["speedup_low"]) for p in policies]
    high = [nan if p["speedup_high"] is None else float(p["speedup_high"]) for p in policies]
    return figures.Series(level_name, [float(p["speedup"]) for p in policies], low, high)


def headline(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers on top of the section: (number, what it is)."""
    found = []
    for level_name, level in report["levels"].items():
        policies = {n: p for n, p in level["policies"].items() if p["achievable"] and n != GENERATE}
        name = max(policies, key=lambda n: float(policies[n]["speedup"]))
        best = policies[name]
        text = number_interval(best["speedup"], best["speedup_low"], best["speedup_high"]) + " ×"
        found.append((text, f"{level_name}: fastest policy, {name}"))
        if fewer := level["comparisons"].get("ecospec_over_probability"):
            change = interval_of(fewer["experts"])
            found.append((f"{change.mean:+.2f}", f"{level_name}: experts per layer, ecospec against probability"))
    counts = report["lossless"]
    found.append(
        (str(counts["mismatches"]), f"mismatches in {thousands(counts['runs'])} outputs ({counts['ties']} ties)")
    )
    return found


def section(report: dict[str, Any]) -> html_page.Section:
    """The report as a section of a page."""
    drawn = charts(report)
    found = tables(report)
    speed = found[: len(report["levels"])]
    body = [
        html_page.paragraph(f"Does it pay? {setting_line(report)}"),
        *(html_page.paragraph(note, "note") for note in report["notes"]),
        html_page.cards(headline(report)),
        html_page.figure(
            drawn["speedups"],
            alt="Bars: speed-up of every policy at every cost level",
            caption="Speed-up over the faster autoregressive reference, with 95 % intervals over prompt "
            "groups; the dashed "
            "line is plain decoding. Hatched: needs the true expert sets in advance, not achievable.",
        ),
        *(table.html() for table in speed),
        *(html_page.paragraph(line, "note") for line in DEFINITIONS),
        html_page.paragraph(lossless_line(report)),
        html_page.figure(
            drawn["steps"],
            alt="Stacked bars: milliseconds of a step by stage, per policy and cost level",
            caption="Mean time of a step by stage. A step of a speculating policy emits several tokens "
            "(accepted per step).",
        ),
        *(table.html() for table in found[len(speed) :]),
    ]
    return html_page.Section("decoding", "Decoding", "".join(body))
