"""The text of the running Python's own standard library, as documents with fixed, disjoint splits.

Every Python installation carries a few megabytes of licensed, well-kept text, so a demonstration built from it
needs no download. Three kinds of text ("datasets") come out of it:

- ``stdlib_code``: whole ``.py`` source files,
- ``stdlib_docs``: the docstrings of one file, joined; they carry the ``group_id`` of the file they come from,
- ``stdlib_topics``: the language topics behind ``help("LAMBDA")``, one document each.

A document's group is the hash of its text, and a group's split is fixed by that hash and a seed, never by order or
by file name. `GroupsManifest` records the groups a checkpoint was built from, so that another machine uses the same
text for the same purpose; another Python patch version has some other files, which are left out (`documents_of`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import pydoc_data.topics
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ecospec.trace_collection.groups_manifest import SPLITS, Group, GroupsManifest, Split, group_id_of

DATASETS: tuple[str, ...] = ("stdlib_code", "stdlib_docs", "stdlib_topics")

#: Shares of the four splits, of groups and so (about) of bytes.
SPLIT_SHARES: dict[Split, float] = {"target_train": 0.62, "predictor_train": 0.21, "tuning": 0.05, "report": 0.12}

#: The one seed with which the shares also hold in bytes, for each kind of text (tried: 0 to 1999 on Python 3.11.7).
DEFAULT_SPLIT_SEED = 322

#: Shorter texts say nothing about routing and collide often (empty ``__init__.py`` files).
MIN_CHARACTERS = 200

# Folders that slim installations lack, or that are not part of the library.
_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload", "pydoc_data"}
)
# Character tables and machine-written files: thousands of near-identical lines.
_EXCLUDED_FILES = re.compile(
    r"(encodings/(cp\d+|mac_\w+|iso8859_\d+|koi8_\w+|hp_roman8|kz1048|palmos|ptcp154|tis_620|johab|hz|gbk?\w*|big5\w*"
    r"|euc_\w+|iso2022_\w+|shift_jis\w*|aliases)\.py"
    r"|html/entities\.py|_sysconfigdata\w*.*\.py|config-[^/]*/.*|lib2to3/pgen2/token\.py|stringprep\.py)"
)


@dataclass(frozen=True)
class Document:
    r"""One text of the corpus.

    Attributes:
        dataset: One of `DATASETS`.
        group_id: First 16 hexadecimal digits of the SHA-256 of the source text (the file or the topic).
        name: Path below the standard library with forward slashes, or the name of the topic.
        text: The document, newlines as ``\n``.
    """

    dataset: str
    group_id: str
    name: str
    text: str


@dataclass(frozen=True)
class SplitCoverage:
    """How much of one split the running Python has: groups and source bytes, found and listed."""

    groups_found: int
    groups_listed: int
    bytes_found: int
    bytes_listed: int

    @property
    def fraction(self) -> float:
        """Found bytes divided by listed bytes, between 0 and 1."""
        return self.bytes_found / self.bytes_listed if self.bytes_listed else 0.0


def split_of(group_id: str, seed: int, shares: Mapping[Split, float] = SPLIT_SHARES) -> Split:
    """Return the split of a group: a pure function of its id (a hash of its text) and the seed.

    Args:
        group_id: See `group_id_of`.
        seed: Non-negative integer.
        shares: Share of each split; they add up to 1.
    """
    digest = hashlib.sha256(f"{seed}:{group_id}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    for split, bound in zip(shares, itertools.accumulate(shares.values()), strict=True):
        if position < bound:
            return split
    return tuple(shares)[-1]  # the sum of the shares may round to just below 1


def docstrings_of(source: str) -> str:
    """Return the docstrings of a module in source order, joined by empty lines; empty if there are none.

    Each is preceded by the dotted name of its class or function. Source that this Python cannot parse gives "".
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    return "\n\n".join(_walk_docstrings(tree, ""))


# Only statements hold definitions; stepping over expressions makes the walk several times faster.
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _walk_docstrings(node: ast.AST, prefix: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, documented):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield f"{prefix}\n\n{text.strip()}" if prefix else text.strip()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _STATEMENTS):
            continue
        name = getattr(child, "name", "") if isinstance(child, documented) else ""
        yield from _walk_docstrings(child, ".".join(part for part in (prefix, name) if part))


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every source file that belongs to the corpus, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _EXCLUDED_FOLDERS.intersection(relative.parts) or _EXCLUDED_FILES.fullmatch(relative.as_posix()):
            continue
        try:
            with tokenize.open(path) as handle:  # honours the coding line, newlines become \n
                yield relative.as_posix(), handle.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # not readable as text here, so not part of this machine's corpus


def find_documents(root: str | Path | None = None) -> list[Document]:
    """Return every document of the running Python's standard library: files by path, then topics by name.

    Texts that occur twice (exact copies) are kept once, under the first name. The first call of a process reads and
    parses the library, which takes seconds; later calls return the same documents.

    Args:
        root: Folder of the library; default: the running Python's. The topics always come from the running Python.
    """
    return list(_documents(Path(root) if root is not None else Path(sysconfig.get_paths()["stdlib"])))


@functools.cache
def _documents(folder: Path) -> tuple[Document, ...]:
    documents: list[Document] = []
    seen: set[str] = set()
    for name, text in _sources(folder):
        group_id = group_id_of(text)
        if len(text) < MIN_CHARACTERS or group_id in seen:
            continue
        seen.add(group_id)
        documents.append(Document("stdlib_code", group_id, name, text))
        docs = docstrings_of(text)
        if len(docs) >= MIN_CHARACTERS:
            documents.append(Document("stdlib_docs", group_id, name, docs))
    for name, text in sorted(pydoc_data.topics.topics.items()):
        group_id = group_id_of(text)
        if len(text) < MIN_CHARACTERS or group_id in seen:
            continue
        seen.add(group_id)
        documents.append(Document("stdlib_topics", group_id, name, text))
    return tuple(documents)


def build_manifest(
    documents: Iterable[Document], python_version: str, seed: int = DEFAULT_SPLIT_SEED
) -> GroupsManifest:
    """Return the manifest of the given documents with splits fixed by `split_of`.

    Args:
        documents: From `find_documents`.
        python_version: For information, e.g. ``platform.python_version()``.
        seed: Seed of the splits.
    """
    groups = [
        Group(
            id=document.group_id,
            kind="topic" if document.dataset == "stdlib_topics" else "file",
            name=document.name,
            split=split_of(document.group_id, seed),
            num_bytes=len(document.text.encode("utf-8")),
        )
        for document in documents
        if document.dataset != "stdlib_docs"
    ]
    return GroupsManifest(python_version, seed, tuple(sorted(groups, key=lambda group: group.id)))


def coverage(manifest: GroupsManifest, documents: Iterable[Document] | None = None) -> dict[Split, SplitCoverage]:
    """Return, per split, how many of the manifest's groups the running Python has.

    Args:
        manifest: The groups looked for.
        documents: Documents to look in; default: `find_documents`.
    """
    present = {document.group_id for document in (find_documents() if documents is None else documents)}
    listed: Counter[Split] = Counter()
    listed_bytes: Counter[Split] = Counter()
    found: Counter[Split] = Counter()
    found_bytes: Counter[Split] = Counter()
    for group in manifest.groups:
        listed[group.split] += 1
        listed_bytes[group.split] += group.num_bytes
        if group.id in present:
            found[group.split] += 1
            found_bytes[group.split] += group.num_bytes
    return {s: SplitCoverage(found[s], listed[s], found_bytes[s], listed_bytes[s]) for s in SPLITS}


def documents_of(
    manifest: GroupsManifest,
    split: str,
    datasets: Iterable[str] | None = None,
    *,
    minimum_coverage: float = 0.02,
    documents: Iterable[Document] | None = None,
) -> list[Document]:
    """Return the local documents of one split: those whose hash the manifest lists there.

    Args:
        manifest: Usually ``GroupsManifest.load("checkpoints/groups.json")``.
        split: One of `SPLITS`.
        datasets: Kinds of text wanted, of `DATASETS`; default: all.
        minimum_coverage: Smallest share of the split's bytes that must exist locally, between 0 and 1. Measured for
            the manifest of Python 3.11.7, split ``report``: 3.11.2 has 42 %, 3.12.1 30 %, 3.13.0 10 %.
        documents: Documents to choose from; default: `find_documents`.

    Raises:
        ValueError: If the split or a dataset is unknown, or if too little of the split exists in this Python.
    """
    wanted = DATASETS if datasets is None else tuple(datasets)
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    for dataset in wanted:
        if dataset not in DATASETS:
            raise ValueError(f"unknown dataset {dataset!r}; allowed: {', '.join(DATASETS)}")
    local = list(find_documents() if documents is None else documents)
    splits = manifest.splits()
    chosen = [d for d in local if d.dataset in wanted and splits.get(d.group_id) == split]
    have = next(cover for name, cover in coverage(manifest, local).items() if name == split)
    if not chosen or have.fraction < minimum_coverage:
        raise ValueError(
            f"only {have.groups_found} of {have.groups_listed} groups ({have.fraction:.0%} of the bytes) of split "
            f"{split!r} exist in this Python's standard library, at least {minimum_coverage:.0%} are needed; use "
            f"Python {manifest.python_version}, which the manifest lists, or rebuild the manifest"
        )
    return chosen
