"""A prompt, and how a record of a benchmark file becomes one.

A record is one JSON object of a JSONL file, one row of a Parquet file or one example of a `datasets` dataset. The
first of the keys in `LAYOUTS` that is there and filled decides what the target is asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

#: Layouts in the order they are looked for; the first key that is present and filled decides.
LAYOUTS = ("messages", "turns", "question", "problem", "prompt", "text")
#: Every key that is read: layouts, then labels.
RECORD_KEYS = (*LAYOUTS, "dataset", "category", "subject", "group_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt or document; exactly one of ``text`` and ``messages`` is given.

    Attributes:
        dataset: Name of the source.
        group_id: Source document or prompt; splits and bootstraps go by it.
        text: Plain text.
        messages: Chat turns as (role, content).
        category: Finer label inside the dataset, or ``""``.
        document: Whether ``text`` is a document, of which windows may be prompts, rather than a whole prompt.
        unused_turns: Later user turns of the record. They follow an answer that only the target can give, so they
            are no part of this prompt; collecting counts them.

    Raises:
        ValueError: A field is wrong; the message names it.
    """

    dataset: str
    group_id: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    category: str = ""
    document: bool = False
    unused_turns: int = 0

    def __post_init__(self) -> None:
        """Validate every field."""
        for name in ("dataset", "group_id"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"Prompt.{name} must be a non-empty string, got {getattr(self, name)!r}")
        if not isinstance(self.category, str):
            raise ValueError(f"Prompt.category must be a string, got {self.category!r}")
        if (self.text is None) == (self.messages is None):
            raise ValueError("a Prompt needs exactly one of text and messages")
        if self.document and self.text is None:
            raise ValueError("a document needs text")
        if self.unused_turns < 0:
            raise ValueError(f"Prompt.unused_turns must be at least 0, got {self.unused_turns}")

    @property
    def identity(self) -> str:
        """Text that stands for the prompt in hashes."""
        return self.text if self.text is not None else json.dumps(self.messages, ensure_ascii=False)

    @property
    def asked(self) -> tuple[tuple[str, str], ...]:
        """The chat without the assistant's last turns: these are for the target to write. Empty for plain text."""
        turns = self.messages or ()
        while turns and turns[-1][0] == "assistant":
            turns = turns[:-1]
        return turns


def prompt_of(record: Mapping[str, Any], where: str, dataset: str, column: str | None = None) -> Prompt:
    """Make the prompt of one record.

    ``text`` is a document. In the other layouts a string is one user turn, a list of strings is a conversation of
    which the first turn is asked, and a list of objects with ``role`` and ``content`` is a chat.

    Args:
        record: Keys and values. Beside the prompt, the labels ``dataset``, ``category`` (or ``subject``) and
            ``group_id`` are read.
        where: File and line, or source and row, for messages.
        dataset: Name of the dataset where the record has none.
        column: Key to read instead of the first of `LAYOUTS`.

    Returns:
        The prompt. Unless the record names its group, the group is the hash of what is asked, without the answers
        that the record may hold.

    Raises:
        ValueError: The record holds no prompt; the message says what is allowed.
    """
    layout = column or next((key for key in LAYOUTS if record.get(key)), None)
    if layout is None:
        raise ValueError(
            f"{where}: none of the keys {', '.join(LAYOUTS)} is there and filled; add one, or name another with "
            "#key after the source"
        )
    value = record.get(layout)
    if not value:
        raise ValueError(f"{where}: {layout} is absent or empty; fill it, or remove the record")
    labels = {name: _label(record, name, where) for name in ("dataset", "group_id", "category", "subject")}
    prompt = Prompt(
        dataset=labels["dataset"] or dataset,
        group_id=labels["group_id"] or "-",
        category=labels["category"] or labels["subject"],
        document=layout == "text",
        **_content(value, layout, where),
    )
    return prompt if labels["group_id"] else dataclasses.replace(prompt, group_id=_group_of(prompt))


def _label(record: Mapping[str, Any], name: str, where: str) -> str:
    """A label as text, ``""`` where there is none; the number 0 is one, NaN is pandas' way to write none."""
    value = record.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list | dict) and name in ("dataset", "group_id"):
        raise ValueError(f"{where}: {name} must be text or a number, got {type(value).__name__}")
    return str(value)


def _group_of(prompt: Prompt) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the document or of what is asked."""
    asked = prompt.text if prompt.text is not None else prompt.asked or prompt.messages
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode()).hexdigest()[:16]


def _content(value: object, layout: str, where: str) -> dict[str, Any]:
    """The ``text`` or ``messages`` argument of a Prompt, and its unused turns."""
    if layout == "text":
        return {"text": _filled(value, layout, where)}
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        if not all(isinstance(turn.get(key), str) for turn in value for key in ("role", "content")):
            raise ValueError(f"{where}: {layout} must be a list of objects with the strings role and content")
        return {"messages": tuple((turn["role"], turn["content"]) for turn in value)}
    if layout == "messages":
        raise ValueError(f"{where}: messages must be a list of objects with the strings role and content")
    turns = value if isinstance(value, list) else [value]
    return {"messages": (("user", _filled(turns[0], layout, where)),), "unused_turns": len(turns) - 1}


def _filled(value: object, layout: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {layout} must be text, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where}: {layout} holds white space only; fill it or remove the record")
    return value
