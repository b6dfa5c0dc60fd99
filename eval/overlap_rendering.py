"""An overlap report for reading: Markdown, and a section of a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ecospec.eval import figures, html_page
from ecospec.eval.overlap_counts import POSITION_LABELS
from ecospec.eval.overlap_summary import BASELINES, used_shares
from ecospec.eval.tables import MISSING, Table, interval_of, number, percent, percent_interval, thousands

DEFINITION = (
    "Top-K overlap = |predicted top-K ∩ experts used| / K, mean over all processed tokens and MoE layers. "
    "Intervals: 95 %, 2,000 bootstrap resamples of groups (a group is one source document or prompt)."
)
EXPLANATIONS = {
    "random": "K experts at random (exact expectation)",
    "frequency": "the K most used experts of each layer",
    "token_table": "most used experts per token, with back-off",
    "bigram_table": "most used experts per token pair, with back-off",
    "last_token": "the experts of the previous token",
    "mlp": "a perceptron on the embeddings of the last few tokens",
}


def ordered(report: dict[str, Any]) -> list[str]:
    """Names of a report's predictors: trained ones first, then baselines from strong to weak."""
    predictors = report["predictors"]
    trained = [name for name in predictors if name not in BASELINES]
    trivial = [name for name in predictors if name in BASELINES]
    return trained + sorted(trivial, key=lambda name: -predictors[name]["overlap"]["mean"])


def _trained(names: Sequence[str]) -> list[int]:
    return [index for index, name in enumerate(names) if name not in BASELINES]


def main_table(report: dict[str, Any]) -> Table:
    """All predictors, all metrics over all tokens."""
    names = ordered(report)
    ranks = [rank for rank in report["predictors"]["random"]["recall"] if int(rank) != report["spec"]["top_k"]]
    windows = [entry["window"] for entry in report["routing"]["unions"] if entry["experts"] is not None]
    headers = [
        "predictor",
        "overlap, % [95 %]",
        *(f"recall@{rank}, %" for rank in ranks),
        "exact sets, %",
        *(f"union of {window}: size error, %" for window in windows),
        "calibration error, %",
    ]
    rows = []
    for name in names:
        one = report["predictors"][name]
        errors = {entry["window"]: entry["relative_error"] for entry in one["unions"]}
        rows.append(
            [
                name,
                percent_interval(interval_of(one["overlap"])),
                *(percent(one["recall"][rank]) for rank in ranks),
                percent(one["set_exact"]),
                *(number(None if errors[w] is None else 100 * errors[w], 1) for w in windows),
                percent(one["calibration_error"]),
            ]
        )
    notes = [f"{name}: {text}." for name, text in EXPLANATIONS.items() if name in report["predictors"]]
    if any(one["calibration_error"] is None for one in report["predictors"].values()):
        notes.append(f"{MISSING}: the table is stored as a ranking of K experts, without probabilities.")
    size = f"{thousands(report['tokens'])} processed tokens of {thousands(report['groups'])} groups"
    return Table(f"Prediction of experts on {size}", headers, rows, _trained(names), notes)


def summary_table(report: dict[str, Any]) -> Table:
    """The essentials, narrow enough for a terminal."""
    names = ordered(report)
    rows = []
    for name in names:
        one = report["predictors"][name]
        gain = report["gain_over_best_table"].get(name)
        rows.append(
            [
                name,
                percent_interval(interval_of(one["overlap"])),
                "" if gain is None else percent_interval(interval_of(gain), signed=True),
                percent(one["set_exact"]),
            ]
        )
    headers = ["predictor", "overlap, %", "gain, points", "exact, %"]
    size = f"{thousands(report['tokens'])} tokens of {thousands(report['groups'])} groups"
    return Table(
        f"Top-K overlap on {size}, with 95 % intervals",
        headers,
        rows,
        _trained(names),
        [f"Gain: over the best table, paired. {note}" for note in [_best_table(report)] if note],
    )


def _best_table(report: dict[str, Any]) -> str:
    tables = {gain["best_table"] for gain in report["gain_over_best_table"].values()}
    return f"Best table: {', '.join(sorted(tables))}." if tables else ""


def gain_table(report: dict[str, Any]) -> Table | None:
    """Paired gain of every trained predictor over the best table baseline."""
    gains = report["gain_over_best_table"]
    if not gains:
        return None
    rows = [
        [name, gain["best_table"], percent_interval(interval_of(gain), signed=True)] for name, gain in gains.items()
    ]
    return Table(
        "Gain over the best table baseline, in points of overlap, both on the same resamples",
        ["predictor", "best table", "gain, points [95 %]"],
        rows,
    )


def cut_table(report: dict[str, Any], key: str, caption: str, tokens: dict[str, int] | None = None) -> Table:
    """Overlap per dataset, segment or position range.

    Args:
        report: The report.
        key: ``per_dataset``, ``per_segment`` or ``per_position``.
        caption: Of the table.
        tokens: Tokens of each cut, if they are to be shown.
    """
    names = ordered(report)
    cuts = list(report["predictors"][names[0]][key])
    rows = [
        [name, *(percent_interval(interval_of(report["predictors"][name][key][cut])) for cut in cuts)]
        for name in names
    ]
    headers = [cut if tokens is None else f"{cut} ({thousands(tokens[cut])})" for cut in cuts]
    return Table(caption, ["overlap, %", *headers], rows, _trained(names))


def layer_table(report: dict[str, Any]) -> Table:
    """Overlap per layer, one row a layer, with how evenly the target uses its experts."""
    names = ordered(report)
    routing = report["routing"]
    rows = [
        [
            str(layer),
            *(percent_interval(interval_of(report["predictors"][name]["per_layer"][index])) for name in names),
            number(routing["entropy"][index]),
            str(routing["unused_experts"][index]),
        ]
        for index, layer in enumerate(routing["layer_indices"])
    ]
    return Table(
        "Overlap per layer, %, with the normalised entropy of the target's expert usage and its unused experts",
        ["decoder layer", *names, "entropy", "unused experts"],
        rows,
    )


def scatter_table(report: dict[str, Any]) -> Table:
    """How many distinct experts a few consecutive tokens touch."""
    rows = [
        [str(entry["window"]), number(entry["experts"]), number(entry["independent"])]
        for entry in report["routing"]["unions"]
    ]
    return Table(
        "Expert scattering: distinct experts per layer that consecutive tokens touch",
        ["tokens", "measured", "if routing were independent and uniform"],
        rows,
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """Every table of a report in reading order."""
    found = [main_table(report), gain_table(report)]
    found.append(cut_table(report, "per_dataset", "Overlap per dataset (tokens)", report["datasets"]))
    segments = "Overlap in prompt, generated and fixed text (tokens)"
    found.append(cut_table(report, "per_segment", segments, report["segments"]))
    found.append(cut_table(report, "per_position", "Overlap against the position in the sequence, in tokens"))
    found += [layer_table(report), scatter_table(report)]
    return [table for table in found if table is not None]


def markdown(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    spec = report["spec"]
    lead = (
        f"# Expert prediction: top-K overlap\n\nTarget `{spec['target_id']}`: {spec['num_layers']} MoE layers, "
        f"{spec['num_experts']} experts, top-{spec['top_k']}. {DEFINITION}\n"
    )
    notes = "".join(f"\n> {note}\n" for note in report["notes"])
    return lead + notes + "\n" + "\n".join(table.markdown() for table in tables(report))


def charts(report: dict[str, Any]) -> dict[str, str]:
    """SVG text by name: ``activation``, ``layers``, ``positions``."""
    names = ordered(report)
    routing, tokens = report["routing"], report["tokens"]
    panels = {"Target: experts used": used_shares(routing, tokens).numpy()}
    first = names[0]
    if report["predictors"][first]["predicted"] is not None:
        shares = np.asarray(report["predictors"][first]["predicted"], dtype=np.float64) / tokens
        panels[f"{first}: experts predicted"] = shares
    labels = [label for label in POSITION_LABELS if label in report["predictors"][first]["per_position"]]
    return {
        "activation": figures.activation_map(panels, routing["layer_indices"], report["spec"]["top_k"]),
        "layers": figures.layer_bars([_layers(report, name) for name in names], routing["layer_indices"]),
        "positions": figures.overlap_curves([_positions(report, name, labels) for name in names], labels),
    }


def _series(label: str, entries: Sequence[dict[str, Any]]) -> figures.Series:
    nan = float("nan")
    low = [nan if entry["low"] is None else float(entry["low"]) for entry in entries]
    high = [nan if entry["high"] is None else float(entry["high"]) for entry in entries]
    return figures.Series(label, [float(entry["mean"]) for entry in entries], low, high)


def _layers(report: dict[str, Any], name: str) -> figures.Series:
    return _series(name, report["predictors"][name]["per_layer"])


def _positions(report: dict[str, Any], name: str, labels: Sequence[str]) -> figures.Series:
    cuts = report["predictors"][name]["per_position"]
    return _series(name, [cuts[label] for label in labels])


def headline(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers on top of the page: (number, what it is)."""
    names = ordered(report)
    best = names[0]
    overlap = interval_of(report["predictors"][best]["overlap"])
    found = [(f"{percent(overlap.mean)} %", f"top-K overlap of {best}")]
    if gain := report["gain_over_best_table"].get(best):
        found.append(
            (
                f"{percent_interval(interval_of(gain), signed=True)}",
                f"points over the best table ({gain['best_table'].replace('_', ' ')}), 95 % interval",
            )
        )
    found.append((thousands(report["tokens"]), f"processed tokens, {thousands(report['groups'])} groups"))
    return found


def section(report: dict[str, Any]) -> html_page.Section:
    """The report as a section of a page."""
    drawn = charts(report)
    spec = report["spec"]
    found = tables(report)
    first = found[:2] if report["gain_over_best_table"] else found[:1]
    body = [
        html_page.paragraph(
            f"Which experts will the target touch? Target {spec['target_id']}: {spec['num_layers']} MoE layers, "
            f"{spec['num_experts']} experts, top-{spec['top_k']}. {DEFINITION}"
        ),
        *(html_page.paragraph(note, "note") for note in report["notes"]),
        html_page.cards(headline(report)),
        *(table.html() for table in first),
        html_page.figure(
            drawn["activation"],
            alt="Heat map of layers by experts: share of tokens that use each expert",
            caption="Expert activation, layer by expert (Figure 1 of the paper): share of tokens that use each "
            "expert, as the target routes and as predicted. A row with few bright cells leans on few experts.",
        ),
        html_page.figure(
            drawn["layers"],
            alt="Bars: top-K overlap of every predictor in every layer",
            caption="Top-K overlap per layer with 95 % intervals over groups.",
        ),
        html_page.figure(
            drawn["positions"],
            alt="Lines: top-K overlap of every predictor against the position in the sequence",
            caption="Top-K overlap against the position of the token: what context adds.",
        ),
        *(table.html() for table in found[len(first) :]),
    ]
    return html_page.Section("overlap", "Expert prediction", "".join(body))
