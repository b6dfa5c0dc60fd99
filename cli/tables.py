"""Tables of reports on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.eval.tables import Table


def show_line(console: Console, text: str) -> None:
    """Print a line as it is: a path may hold what rich takes for markup."""
    console.print(text, markup=False, soft_wrap=True)


def show_table(console: Console, table: Table) -> None:
    """Print a table, numbers aligned to the right, notes below.

    Args:
        console: Where to.
        table: The table.
    """
    import rich.box  # noqa: PLC0415 - keeps `--help` fast
    import rich.console  # noqa: PLC0415
    import rich.table  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415

    shown = rich.table.Table(
        title=escape(table.caption),
        title_justify="left",
        title_style="bold",
        box=rich.box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for index, header in enumerate(table.headers):
        shown.add_column(escape(header), justify="left" if index == 0 else "right", overflow="fold")
    for index, row in enumerate(table.rows):
        shown.add_row(*(escape(cell) for cell in row), style="bold" if index in table.strong else None)
    if not console.is_terminal:  # a log or a pipe has no width to fit into; a narrow terminal wraps cells
        needed = console.measure(shown, options=console.options.update(max_width=10_000)).maximum
        rich.console.Console(file=console.file, width=max(console.width, needed)).print(shown)
    else:
        console.print(shown)
    for note in table.notes:
        console.print(escape(note), style="dim", soft_wrap=True)
