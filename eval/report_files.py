"""What all reports share: file names, reading and writing, and the section that says where numbers come from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecospec.eval import html_page

FORMAT_VERSION = 1
JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"


def read_report(path: Path, kind: str) -> dict[str, Any]:
    """Read a report's JSON object.

    Args:
        path: The file.
        kind: ``overlap`` or ``decoding``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON, or of another kind or version.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a JSON file ({error}); write the report again") from error
    found = (report.get("kind"), report.get("format_version")) if isinstance(report, dict) else (None, None)
    if found != (kind, FORMAT_VERSION):
        raise ValueError(
            f"{path}: kind and format_version are {found}, expected {(kind, FORMAT_VERSION)}; write it again"
        )
    checked: dict[str, Any] = report
    return checked


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def provenance_section(*reports: dict[str, Any]) -> html_page.Section:
    """Where the numbers of one or more reports come from, as a section of a page."""
    body = ""
    for report in reports:
        lines = {key: _flat(value) for key, value in (report["inputs"] | report["provenance"]).items()}
        title = "" if len(reports) == 1 else html_page.heading(report["kind"].capitalize())
        body += title + html_page.definitions(lines)
    return html_page.Section("provenance", "Where this comes from", body)


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(_flat(one) for one in value)
    return str(value)
