"""Prompts: what a target is asked to continue, and what text it is shown.

Sources, of which several may be joined by commas (docs/prompts.md has examples):

- ``stdlib:<split>`` or ``stdlib:<split>/<dataset>``: documents of the demo corpus (`stdlib_corpus`);
- a file that ends in ``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst`` or ``.parquet``, or a folder of them
  (`prompt_files`), in one of the layouts of `prompt_layouts`;
- ``hf:<name or folder>[@config]:<split>``: a `datasets` dataset (`prompt_datasets`);
- ``preset:<name>`` or ``preset:<name>=<path>``: a dataset of the paper (`prompt_presets`).

``#column`` after a file, folder or ``hf:`` source reads that column instead of the first known layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ecospec.trace_collection.groups_manifest import GroupsManifest
from ecospec.trace_collection.prompt_datasets import DatasetSource, dataset_records
from ecospec.trace_collection.prompt_files import Records, dataset_name, file_records, prompt_files
from ecospec.trace_collection.prompt_layouts import RECORD_KEYS, Prompt, prompt_of
from ecospec.trace_collection.prompt_presets import preset_prompts
from ecospec.trace_collection.stdlib_corpus import documents_of

__all__ = ["DEFAULT_GROUPS", "Prompt", "datasets_of", "iter_prompts", "leading_ids", "load_prompts", "prompt_ids"]

STDLIB_PREFIX = "stdlib:"
DATASET_PREFIX = "hf:"
PRESET_PREFIX = "preset:"
DEFAULT_GROUPS = Path("checkpoints/groups.json")


def load_prompts(source: str, *, groups: Path = DEFAULT_GROUPS) -> list[Prompt]:
    """Return the prompts of `iter_prompts` as a list."""
    return list(iter_prompts(source, groups=groups))


def iter_prompts(source: str, *, groups: Path = DEFAULT_GROUPS) -> Iterator[Prompt]:
    """Read the prompts of one or several sources, one at a time and in a fixed order.

    Every source is opened at once, so a wrong name is an error before the first prompt; records are read, and
    checked, as they come. Memory does not grow with the length of a file or dataset.

    Args:
        source: One source, or several separated by commas; see the top of this file.
        groups: Manifest of the demo corpus, for ``stdlib:`` sources.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A source or a line of a file is not understood; the message names both.
    """
    parts = [piece.strip() for piece in source.split(",")]
    if not all(parts):
        raise ValueError(f"prompts {source!r} holds an empty source; give stdlib:<split>, a file or a folder")
    return itertools.chain.from_iterable([_open(part, groups) for part in parts])


def _open(part: str, groups: Path) -> Iterator[Prompt]:
    """Check one source and return its prompts."""
    if part.startswith(STDLIB_PREFIX):
        return _stdlib_prompts(part.removeprefix(STDLIB_PREFIX), groups)
    if part.startswith(PRESET_PREFIX):
        return preset_prompts(part.removeprefix(PRESET_PREFIX))
    place, mark, column = part.partition("#")
    if mark and not column:
        raise ValueError(f"{part} names no column after #; write {place}#<column> or {place}")
    columns = (column, *RECORD_KEYS) if column else RECORD_KEYS
    if place.startswith(DATASET_PREFIX):
        dataset = DatasetSource.parse(place.removeprefix(DATASET_PREFIX))
        return _prompts(dataset_records(dataset, columns), dataset.label, column)
    files = prompt_files(Path(place).expanduser())
    return itertools.chain.from_iterable(
        _prompts(file_records(file, columns), dataset_name(file), column) for file in files
    )


def _prompts(records: Records, dataset: str, column: str) -> Iterator[Prompt]:
    return (prompt_of(record, where, dataset, column or None) for where, record in records)


def _stdlib_prompts(name: str, groups: Path) -> Iterator[Prompt]:
    split, _, dataset = name.partition("/")
    if not groups.is_file():
        raise FileNotFoundError(f"{groups} does not exist; name the manifest of the demo corpus with --groups")
    documents = documents_of(GroupsManifest.load(groups), split, [dataset] if dataset else None)
    return (Prompt(d.dataset, d.group_id, text=d.text, category=d.name, document=True) for d in documents)


def prompt_ids(prompt: Prompt, tokenizer: Any, *, generate: bool) -> list[int]:
    """Token ids of a prompt.

    Chats go through the tokenizer's chat template; without one, the contents are joined by empty lines. Where the
    target will continue a chat, the assistant's turns at its end are left out: the target writes its own. A
    document gets no special tokens here: its windows get them (`leading_ids`).

    Args:
        prompt: The prompt.
        tokenizer: The target's transformers tokenizer.
        generate: Whether the target will continue it (a chat ends with the assistant's header) or only reads it.

    Raises:
        ValueError: The chat template does not take the chat; the message names dataset, group and roles.
    """
    if prompt.document:
        return [int(i) for i in tokenizer(prompt.text, add_special_tokens=False, verbose=False)["input_ids"]]
    if prompt.messages is None:
        return [int(i) for i in tokenizer(prompt.text, verbose=False)["input_ids"]]
    messages = prompt.asked if generate else prompt.messages
    if not messages:
        return []
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": content} for role, content in messages]
        text = _templated(tokenizer, turns, prompt, generate=generate)
        return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    text = "\n\n".join(content for _, content in messages)
    return [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]


def _templated(tokenizer: Any, turns: list[dict[str, str]], prompt: Prompt, *, generate: bool) -> str:
    """A chat as the tokenizer's template writes it; many templates refuse roles, or an order of them."""
    from jinja2 import TemplateError  # noqa: PLC0415 - importing prompts stays light

    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        roles = ", ".join(turn["role"] for turn in turns[:8])
        raise ValueError(
            f"dataset {prompt.dataset}, group {prompt.group_id}: the target's chat template takes no chat of the "
            f"roles {roles} ({' '.join(str(error).split())}); change or remove the record"
        ) from error


def leading_ids(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before every text (a beginning-of-sequence token, or nothing)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return [bos] if bos is not None and list(first) == [bos] else []


def datasets_of(prompts: Iterable[Prompt]) -> list[str]:
    """Names of the datasets, sorted."""
    return sorted({prompt.dataset for prompt in prompts})
