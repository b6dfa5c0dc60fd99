"""The charts of the reports, as SVG text.

Colours are those of Okabe and Ito, which readers with any colour vision tell apart; the heat maps use ``cividis``,
whose lightness rises monotonically. Drawn with matplotlib's object interface: no global figure state, no display
needed.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: Colours of what is always in the tables; others take the next of ``_SPARE``.
COLOURS = {
    "random": "#c9ced4",
    "frequency": "#8a929b",
    "token_table": "#f0c46a",
    "bigram_table": "#e69f00",
    "last_token": "#cc79a7",
    "mlp": "#8c564b",
    "predict": "#56b4e9",
    "draft": "#009e73",
    "select": "#cc79a7",
    "verify": "#0072b2",
    "other": "#c9ced4",
}
_SPARE = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#000000")
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#57606a",
    "axes.labelcolor": "#1b1f24",
    "grid.color": "#e4e8ec",
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "legend.frameon": False,
    "svg.hashsalt": "ecospec",
    "figure.dpi": 100,
}
#: More bars than this in one axis cannot be told apart: one axis per predictor then.
_MAX_GROUPED_BARS = 120

Matrix = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Series:
    """Values with intervals along an axis; ``low`` and ``high`` hold NaN where there is no interval."""

    label: str
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def colours_for(names: Sequence[str]) -> dict[str, str]:
    """A colour per name: the fixed ones where the name has one, otherwise the next spare one."""
    spare = [name for name in names if name not in COLOURS]
    return {n: COLOURS.get(n, _SPARE[spare.index(n) % len(_SPARE)] if n in spare else "") for n in names}


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _errors(series: Series) -> Matrix:
    values = np.asarray(series.values, dtype=np.float64)
    low, high = np.asarray(series.low, dtype=np.float64), np.asarray(series.high, dtype=np.float64)
    return np.nan_to_num(np.stack([values - low, high - values])).clip(min=0.0)


def activation_map(panels: Mapping[str, Matrix], layer_indices: Sequence[int], top_k: int) -> str:
    """Layer × expert heat maps: the share of tokens that use each expert (Figure 1 of the paper).

    Args:
        panels: Title → float64 ``[L, E]``, shares 0 … 1; all on one colour scale.
        layer_indices: Decoder layer number of each row.
        top_k: K, for the uniform share K/E named in the colour bar.

    Returns:
        SVG text.
    """
    layers, experts = next(iter(panels.values())).shape
    # The scale ends at the 98th percentile: one hot expert must not wash out all others.
    top = max(float(np.quantile(np.stack(list(panels.values())), 0.98)), top_k / experts)
    height = float(np.clip(0.24 * layers, 1.3, 7.0))
    with mpl.rc_context(_STYLE):
        figure = _figure(10.0, (height + 0.75) * len(panels))
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (title, shares) in zip(axes, panels.items(), strict=True):
            image = axis.imshow(
                100 * shares, aspect="auto", cmap="cividis", vmin=0.0, vmax=100 * top, interpolation="nearest"
            )
            axis.set_title(title, pad=8)
            axis.set_ylabel("decoder layer")
            step = max(1, layers // 12)
            axis.set_yticks(range(0, layers, step), [str(i) for i in layer_indices[::step]])
            for side in ("left", "bottom"):
                axis.spines[side].set_visible(False)
        axes[-1].set_xlabel("expert")
        axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        bar = figure.colorbar(image, ax=list(axes), extend="max", fraction=0.035, pad=0.015)
        bar.set_label("tokens using the expert, %")
        bar.ax.axhline(100 * top_k / experts, color="white", linewidth=1.6)
        bar.ax.annotate(
            "uniform",
            (0.0, 100 * top_k / experts),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7.5,
            color="#57606a",
        )
        return _svg(figure)


def layer_bars(series: Sequence[Series], layer_indices: Sequence[int]) -> str:
    """Top-K overlap per layer and predictor, with intervals.

    Args:
        series: One per predictor, each of length L, shares 0 … 1.
        layer_indices: Decoder layer numbers.

    Returns:
        SVG text.
    """
    colours = colours_for([one.label for one in series])
    positions = np.arange(len(layer_indices), dtype=np.float64)
    with mpl.rc_context(_STYLE):
        if len(series) * len(layer_indices) > _MAX_GROUPED_BARS:
            return _svg(_small_multiples(series, layer_indices, colours))
        figure = _figure(10.0, 3.8)
        axis = figure.subplots()
        width = 0.86 / len(series)
        for index, one in enumerate(series):
            axis.bar(
                positions + (index - (len(series) - 1) / 2) * width,
                100 * np.asarray(one.values),
                width * 0.92,
                yerr=100 * _errors(one),
                color=colours[one.label],
                label=one.label.replace("_", " "),
                error_kw={"elinewidth": 1.0, "ecolor": "#1b1f24"},
            )
        axis.set_xticks(positions, [str(i) for i in layer_indices])
        axis.set_xlabel("decoder layer")
        _overlap_axis(axis)
        figure.legend(loc="outside upper center", ncols=min(7, len(series)), fontsize=9)
        return _svg(figure)


def _overlap_axis(axis: Axes) -> None:
    axis.set_ylabel("top-K overlap, %")
    axis.set_ylim(0, 100)
    axis.grid(visible=True, axis="y")
    axis.set_axisbelow(True)


def _small_multiples(series: Sequence[Series], layer_indices: Sequence[int], colours: Mapping[str, str]) -> Figure:
    figure = _figure(10.0, 1.35 * len(series) + 0.5)
    axes = figure.subplots(len(series), 1, squeeze=False, sharex=True)[:, 0]
    positions = np.arange(len(layer_indices))
    for axis, one in zip(axes, series, strict=True):
        axis.bar(
            positions,
            100 * np.asarray(one.values),
            0.85,
            yerr=100 * _errors(one),
            color=colours[one.label],
            error_kw={"elinewidth": 0.8, "ecolor": "#1b1f24"},
        )
        _overlap_axis(axis)
        axis.set_ylabel("")
        axis.set_title(one.label.replace("_", " "))
    step = max(1, len(layer_indices) // 24)
    axes[-1].set_xticks(positions[::step], [str(i) for i in layer_indices[::step]])
    axes[-1].set_xlabel("decoder layer")
    figure.supylabel("top-K overlap, %", fontsize=10)
    return figure


def overlap_curves(series: Sequence[Series], labels: Sequence[str]) -> str:
    """Top-K overlap against the position in the sequence.

    Args:
        series: One per predictor, one value per position range; NaN where a range is empty.
        labels: The position ranges.

    Returns:
        SVG text.
    """
    colours = colours_for([one.label for one in series])
    positions = np.arange(len(labels), dtype=np.float64)
    with mpl.rc_context(_STYLE):
        figure = _figure(10.0, 3.4)
        axis = figure.subplots()
        for one in series:
            axis.plot(
                positions,
                100 * np.asarray(one.values),
                color=colours[one.label],
                marker="o",
                markersize=5,
                linewidth=2,
                label=one.label.replace("_", " "),
            )
            axis.fill_between(
                positions,
                100 * np.asarray(one.low),
                100 * np.asarray(one.high),
                color=colours[one.label],
                alpha=0.18,
            )
        axis.set_xticks(positions, labels)
        axis.set_xlabel("position in the sequence, tokens")
        _overlap_axis(axis)
        figure.legend(loc="outside upper center", ncols=min(7, len(series)), fontsize=9)
        return _svg(figure)


def speedup_bars(levels: Mapping[str, Series], policies: Sequence[str], hatched: Sequence[str]) -> str:
    """Speed-up of every policy at every cost level, with intervals and a line at 1.

    Args:
        levels: Cost level → one value per policy.
        policies: Names along the axis.
        hatched: Policies that cannot be had in practice (oracles): hatched bars.

    Returns:
        SVG text.
    """
    shades = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
    positions = np.arange(len(policies), dtype=np.float64)
    with mpl.rc_context(_STYLE):
        figure = _figure(10.0, 3.8)
        axis = figure.subplots()
        width = 0.8 / len(levels)
        for index, (level, one) in enumerate(levels.items()):
            offset = (index - (len(levels) - 1) / 2) * width
            bars = axis.bar(
                positions + offset,
                one.values,
                width * 0.94,
                yerr=_errors(one),
                color=shades[index % len(shades)],
                label=level,
                error_kw={"elinewidth": 1.1, "ecolor": "#1b1f24"},
            )
            highs = np.where(np.isnan(one.high), one.values, one.high)
            for bar, policy, value, high in zip(bars, policies, one.values, highs, strict=True):
                if policy in hatched:
                    bar.set(hatch="///", edgecolor="white", linewidth=0.0)
                axis.annotate(
                    f"{value:.2f}",
                    (bar.get_x() + bar.get_width() / 2, max(value, high)),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color="#1b1f24",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                )
        axis.axhline(1.0, color="#d55e00", linewidth=1.4, linestyle="--", zorder=0.5)
        names = [p.replace("_", " ") + ("\n(not achievable)" if p in hatched else "") for p in policies]
        axis.set_xticks(positions, names)
        axis.set_ylabel("speed-up over autoregressive, ×")
        axis.grid(visible=True, axis="y")
        axis.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=len(levels), title="cost level", fontsize=9)
        return _svg(figure)


def step_time_bars(levels: Mapping[str, Mapping[str, Sequence[float]]], policies: Sequence[str]) -> str:
    """Mean time of a step, split into its stages, one panel per cost level.

    Args:
        levels: Cost level → stage → milliseconds per policy.
        policies: Names along the axis.

    Returns:
        SVG text.
    """
    with mpl.rc_context(_STYLE):
        figure = _figure(10.0, 0.42 * len(policies) + 1.5)
        axes = figure.subplots(1, len(levels), squeeze=False, sharey=True)[0]
        positions = np.arange(len(policies), dtype=np.float64)
        for axis, (level, stages) in zip(axes, levels.items(), strict=True):
            left = np.zeros(len(policies))
            for stage, values in stages.items():
                axis.barh(positions, values, 0.66, left=left, color=COLOURS[stage], label=stage)
                left += np.asarray(values)
            axis.set_title(level)
            axis.set_xlabel("milliseconds a step")
            axis.grid(visible=True, axis="x")
            axis.set_axisbelow(True)
        axes[0].set_yticks(positions, [p.replace("_", " ") for p in policies])
        axes[0].invert_yaxis()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
        return _svg(figure)
