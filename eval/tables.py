"""Tables and numbers of every report, defined once and rendered as Markdown and HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from ecospec.eval.bootstrap import Interval

MISSING = "–"


@dataclasses.dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        caption: What it shows, with units; stands above the table.
        headers: One per column. The first column holds names, the others numbers.
        rows: Cells as text, as many as headers.
        strong: Indices of rows that stand out.
        notes: Lines below the table.
    """

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: Sequence[int] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check that the table is rectangular."""
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(
                    f"table {self.caption!r}: {len(row)} cells in a row of {len(self.headers)} columns"
                )

    def markdown(self) -> str:
        """Return the table as GitHub-flavoured Markdown, caption first."""

        def line(cells: Sequence[str], *, strong: bool = False) -> str:
            escaped = (cell.replace("|", "\\|") for cell in cells)
            return "| " + " | ".join(f"**{cell}**" if strong else cell for cell in escaped) + " |"

        rule = "|" + "|".join([":---", *["---:"] * (len(self.headers) - 1)]) + "|"
        body = [line(row, strong=index in self.strong) for index, row in enumerate(self.rows)]
        notes = ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join([f"{self.caption}", "", line(self.headers), rule, *body, *notes]) + "\n"

    def html(self) -> str:
        """Return the table as HTML, everything escaped."""

        def cells(row: Sequence[str], tag: str) -> str:
            first = '<th scope="row">' if tag == "td" else '<th scope="col">'
            rest = f"<{tag}>" if tag == "td" else '<th scope="col">'
            end = "</td>" if tag == "td" else "</th>"
            others = "".join(f"{rest}{html.escape(cell)}{end}" for cell in row[1:])
            return f"{first}{html.escape(row[0])}</th>{others}"

        body = "\n".join(
            f"<tr{' class=strong' if index in self.strong else ''}>{cells(row, 'td')}</tr>"
            for index, row in enumerate(self.rows)
        )
        notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<div class=scroll><table>\n<caption>{html.escape(self.caption)}</caption>\n"
            f"<thead><tr>{cells(self.headers, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
            f"</table></div>{notes}\n"
        )


def percent(value: float | None, digits: int = 1) -> str:
    """A share as per cent without the sign.

    >>> percent(0.8765)
    '87.7'
    """
    return MISSING if value is None or value != value else f"{100 * value:.{digits}f}"  # noqa: PLR0124 - NaN


def percent_interval(interval: Interval, *, signed: bool = False) -> str:
    """A share with its interval, in per cent.

    >>> percent_interval(Interval(0.8765, 0.87, 0.88, 5))
    '87.7 [87.0, 88.0]'
    """
    sign = "+" if signed else ""
    mean = f"{100 * interval.mean:{sign}.1f}"
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} [{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where it is missing."""
    return MISSING if value is None or value != value else f"{value:.{digits}f}"  # noqa: PLR0124 - NaN


def number_interval(value: float, low: float | None, high: float | None, digits: int = 2) -> str:
    """A number with its interval.

    >>> number_interval(1.234, 1.2, 1.26)
    '1.23 [1.20, 1.26]'
    """
    mean = f"{value:.{digits}f}"
    return mean if low is None or high is None else f"{mean} [{low:.{digits}f}, {high:.{digits}f}]"


def thousands(value: float) -> str:
    """An integer with thin separators.

    >>> thousands(1234567)
    '1,234,567'
    """
    return f"{int(value):,}"


def interval_of(data: dict[str, Any]) -> Interval:
    """Read what `Interval.to_dict` wrote."""
    return Interval(data["mean"], data["low"], data["high"], data["groups"])
