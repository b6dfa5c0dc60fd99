"""A self-contained HTML page: one file, no scripts, no fonts, no address outside itself."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence

_CSS = """
:root { color-scheme: light; --ink: #1b1f24; --muted: #57606a; --line: #d0d7de; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.35rem; margin: 2.6rem 0 .6rem; padding-top: .8rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p { max-width: 48rem; margin: .5rem 0; }
.lead { color: var(--muted); }
.note { color: var(--muted); font-size: .88rem; margin: .25rem 0; }
nav a { margin-right: 1.1rem; color: var(--accent); }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .7rem 1rem; min-width: 11rem; flex: 1 1 11rem;
} .card b { display: block; font-size: 1.5rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { color: var(--muted); font-size: .86rem; }
.scroll { overflow-x: auto; margin: 1rem 0 .3rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding: 0 0 .4rem; font-size: .88rem; }
th, td { padding: .32rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { border-bottom: 2px solid var(--muted); font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; font-weight: 500; }
tr.strong th, tr.strong td { font-weight: 700; background: #eef6fb; }
figure { margin: 1.2rem 0; }
figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--muted); font-size: .88rem; max-width: 48rem; margin-top: .3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .88rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
""".strip()


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of a page.

    Attributes:
        anchor: Identifier inside the page.
        title: Heading, plain text.
        body: HTML.
    """

    anchor: str
    title: str
    body: str


def paragraph(text: str, style: str = "") -> str:
    """Return plain text as one escaped paragraph, with an optional class of the style sheet."""
    return f"<p{f' class={style}' if style else ''}>{html.escape(text)}</p>\n"


def heading(text: str) -> str:
    """Return a heading below a section's title."""
    return f"<h3>{html.escape(text)}</h3>\n"


def figure(svg: str, *, alt: str, caption: str) -> str:
    """Return a chart as a figure.

    Args:
        svg: The drawing. It becomes a data address, so that identifiers of several drawings cannot clash.
        alt: What a reader who cannot see it should know.
        caption: Line below, plain text.
    """
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return (
        f'<figure><img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>\n"
    )


def cards(values: Sequence[tuple[str, str]]) -> str:
    """Return headline numbers: (number, what it is) each."""
    cells = (f"<b>{html.escape(value)}</b><span>{html.escape(meaning)}</span>" for value, meaning in values)
    items = "".join(f"<div class=card>{cell}</div>" for cell in cells)
    return f"<div class=cards>{items}</div>\n"


def definitions(values: Mapping[str, str]) -> str:
    """Return names and values as a definition list."""
    items = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in values.items())
    return f"<dl>{items}</dl>\n"


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return a complete page.

    Args:
        title: Heading and window title, plain text.
        lead: One or two sentences below the heading, plain text.
        sections: In reading order.
    """
    links = "".join(f'<a href="#{s.anchor}">{html.escape(s.title)}</a>' for s in sections)
    body = "".join(
        f'<section id="{s.anchor}"><h2>{html.escape(s.title)}</h2>\n{s.body}</section>\n' for s in sections
    )
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_CSS}\n</style>"
    )
    top = f"<h1>{html.escape(title)}</h1>\n{paragraph(lead, 'lead')}<nav>{links}</nav>"
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{top}\n{body}</body>\n</html>\n'
