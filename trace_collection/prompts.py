"""Prompts: what a target is asked to continue, and what text it is shown.

Sources:

- ``stdlib:<split>`` or ``stdlib:<split>/<dataset>``: documents of the demo corpus (`stdlib_corpus`);
- a ``.jsonl`` file, one object per line, with one of these layouts: ``messages`` (chat), ``turns`` (MT-Bench: the
  first turn), ``question``, ``problem``, ``prompt`` (one user turn each), ``text`` (a document). Optional keys:
  ``dataset``, ``category`` (or ``subject``), ``group_id``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ecospec.trace_collection.stdlib_corpus import GroupsManifest, documents_of

STDLIB_PREFIX = "stdlib:"
#: Layouts in the order they are looked for; the first key that is present decides.
LAYOUTS = ("messages", "turns", "question", "problem", "prompt", "text")
DEFAULT_GROUPS = Path("checkpoints/groups.json")


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

    Raises:
        ValueError: A field is wrong; the message names it.
    """

    dataset: str
    group_id: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    category: str = ""
    document: bool = False

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

    @property
    def identity(self) -> str:
        """Text that stands for the prompt in hashes."""
        return self.text if self.text is not None else json.dumps(self.messages, ensure_ascii=False)


def load_prompts(source: str, *, groups: Path = DEFAULT_GROUPS) -> list[Prompt]:
    """Return the prompts of `iter_prompts` as a list."""
    return list(iter_prompts(source, groups=groups))


def iter_prompts(source: str, *, groups: Path = DEFAULT_GROUPS) -> Iterator[Prompt]:
    """Read the prompts of one or several sources, one at a time and in a fixed order.

    Sources are checked for their form and existence at once; their records are read, and checked, as they come.

    Args:
        source: One source, or several separated by commas; see the top of this file.
        groups: Manifest of the demo corpus, for ``stdlib:`` sources.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A source or a line of a file is not understood; the message names both.
    """
    parts = [piece.strip() for piece in source.split(",")]
    if not all(parts):
        raise ValueError(f"prompts {source!r} holds an empty source; give stdlib:<split> or a .jsonl file")
    return itertools.chain.from_iterable([_open(part, groups) for part in parts])


def _open(part: str, groups: Path) -> Iterator[Prompt]:
    """Check one source and return its prompts."""
    if part.startswith(STDLIB_PREFIX):
        return _stdlib_prompts(part.removeprefix(STDLIB_PREFIX), groups)
    path = Path(part)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path} is no prompt source; give stdlib:<split> or a file that ends in .jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give an existing .jsonl file or stdlib:<split>")
    return _jsonl_prompts(path)


def _stdlib_prompts(name: str, groups: Path) -> Iterator[Prompt]:
    split, _, dataset = name.partition("/")
    if not groups.is_file():
        raise FileNotFoundError(f"{groups} does not exist; name the manifest of the demo corpus with --groups")
    documents = documents_of(GroupsManifest.load(groups), split, [dataset] if dataset else None)
    return (Prompt(d.dataset, d.group_id, text=d.text, category=d.name, document=True) for d in documents)


def _jsonl_prompts(path: Path) -> Iterator[Prompt]:
    number_of_prompts = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                number_of_prompts += 1
                yield _parse(_text(line, f"{path}:{number}"), f"{path}:{number}", path.stem)
    if not number_of_prompts:
        raise ValueError(f"{path} holds no prompts")


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason}); write one JSON object per line") from error


def _parse(line: str, where: str, stem: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); write one object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character, which no tokenizer takes
        raise ValueError(f"{where}: holds a lone surrogate such as \\ud800; remove it") from error
    layout = next((key for key in LAYOUTS if record.get(key)), None)
    if layout is None:
        raise ValueError(f"{where}: none of the keys {', '.join(LAYOUTS)} is there and filled")
    content = _content(record[layout], layout, where)
    identity = next(iter(content.values()))
    group = hashlib.sha256(json.dumps(identity, ensure_ascii=False).encode()).hexdigest()[:16]
    return Prompt(
        dataset=str(record.get("dataset") or stem),
        group_id=str(record.get("group_id") or group),
        category=str(record.get("category") or record.get("subject") or ""),
        document=layout == "text",
        **content,
    )


def _content(value: object, layout: str, where: str) -> dict[str, Any]:
    """The ``text`` or ``messages`` argument of a Prompt."""
    if layout == "messages":
        if not isinstance(value, list) or not all(_is_turn(turn) for turn in value):
            raise ValueError(f"{where}: messages must be a list of objects with the strings role and content")
        return {"messages": tuple((turn["role"], turn["content"]) for turn in value)}
    if layout == "turns":
        value = value[0] if isinstance(value, list) else value
    if not isinstance(value, str):
        raise ValueError(f"{where}: {layout} must be text, got {type(value).__name__}")
    return {"text": value} if layout == "text" else {"messages": (("user", value),)}


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))


def prompt_ids(prompt: Prompt, tokenizer: Any, *, generate: bool) -> list[int]:
    """Token ids of a prompt.

    Chats go through the tokenizer's chat template; without one, the contents are joined by empty lines. A document
    gets no special tokens here: its windows get them (`leading_ids`).

    Args:
        prompt: The prompt.
        tokenizer: The target's transformers tokenizer.
        generate: Whether the target will continue it (a chat ends with the assistant's header) or only reads it.
    """
    if prompt.document:
        return [int(i) for i in tokenizer(prompt.text, add_special_tokens=False, verbose=False)["input_ids"]]
    if prompt.messages is None:
        return [int(i) for i in tokenizer(prompt.text, verbose=False)["input_ids"]]
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": content} for role, content in prompt.messages]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)
        return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    text = "\n\n".join(content for _, content in prompt.messages)
    return [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]


def leading_ids(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before every text (a beginning-of-sequence token, or nothing)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return [bos] if bos is not None and list(first) == [bos] else []


def datasets_of(prompts: Iterable[Prompt]) -> list[str]:
    """Names of the datasets, sorted."""
    return sorted({prompt.dataset for prompt in prompts})
