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
import json
import os
import pydoc_data.topics
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

FORMAT_VERSION = 1
Split = Literal["target_train", "predictor_train", "tuning", "report"]
Kind = Literal["file", "topic"]
SPLITS: tuple[Split, ...] = get_args(Split)
KINDS: tuple[Kind, ...] = get_args(Kind)
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
_GROUP_ID = re.compile(r"[0-9a-f]{16}")


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
class Group:
    """One entry of the manifest: a source text and what it may be used for."""

    id: str
    kind: Kind
    name: str
    split: Split
    num_bytes: int


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


@dataclass(frozen=True)
class GroupsManifest:
    """The groups of the corpus and their disjoint splits; the contract behind ``checkpoints/groups.json``.

    The file is one JSON object::

        {"format_version": 1, "python_version": "3.11.7", "split_seed": 322,
         "groups": [{"id": "0123456789abcdef", "kind": "file", "name": "ast.py",
                     "split": "report", "num_bytes": 61444}, ...]}

    Attributes:
        python_version: The Python whose library was listed, for information.
        split_seed: Seed with which `split_of` fixed the splits.
        groups: Entries in ascending order of their id.
        format_version: Version of this layout.

    Raises:
        ValueError: If a field holds something else than described.
    """

    python_version: str
    split_seed: int
    groups: tuple[Group, ...]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _validate(self, "groups manifest")

    def save(self, path: str | Path) -> None:
        """Write the manifest as JSON, atomically (temporary name, fsync, rename)."""
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        payload = {
            "format_version": self.format_version,
            "python_version": self.python_version,
            "split_seed": self.split_seed,
        }
        lines = ",\n".join("  " + json.dumps(asdict(group)) for group in self.groups)
        head = json.dumps(payload, indent=1)[:-2]
        with temporary.open("w", encoding="utf-8", newline="\n") as handle:
            handle.write(f'{head},\n "groups": [\n{lines}\n ]\n}}\n')
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> GroupsManifest:
        """Read and validate a manifest.

        Raises:
            ValueError: If the file is not JSON, or a field is missing, unknown or wrong; the message names the
                field and the file.
        """
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: not a JSON file ({error}); restore it or rebuild it with the recipe"
            ) from error
        found = _checked_fields(cls, raw, str(path))
        if found["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{path}: format_version is {found['format_version']!r}, this version reads {FORMAT_VERSION}; "
                "rebuild the manifest or install the version that wrote it"
            )
        if not isinstance(found["groups"], list):
            raise ValueError(f"{path}: groups must be a list of objects, got {type(found['groups']).__name__}")
        found["groups"] = tuple(
            Group(**_checked_fields(Group, entry, f"{path}: groups[{index}]"))
            for index, entry in enumerate(found["groups"])
        )
        try:
            return cls(**found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def splits(self) -> dict[str, Split]:
        """Return the split of every group id."""
        return {group.id: group.split for group in self.groups}

    def digest(self) -> str:
        """Return the first 16 hexadecimal digits of the SHA-256 over all (id, split) pairs."""
        text = "\n".join(f"{group.id} {group.split}" for group in self.groups)
        return group_id_of(text)


def _checked_fields(owner: type, raw: object, where: str) -> dict[str, Any]:
    """Return `raw` as a dictionary with exactly the fields of the dataclass `owner`, or say which one is off."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    allowed = [field.name for field in fields(owner)]
    for name in raw:
        if name not in allowed:
            raise ValueError(f"{where}: unknown field {name!r}; allowed fields: {', '.join(allowed)}")
    for name in allowed:
        if name not in raw:
            raise ValueError(f"{where}: missing field {name!r}; required fields: {', '.join(allowed)}")
    return dict(raw)


def _validate(manifest: GroupsManifest, where: str) -> None:
    """Check every field of a manifest; raise ValueError with field and entry otherwise."""
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"{where}: format_version must be {FORMAT_VERSION}, got {manifest.format_version!r}")
    if not isinstance(manifest.split_seed, int) or isinstance(manifest.split_seed, bool) or manifest.split_seed < 0:
        raise ValueError(f"{where}: split_seed must be an integer >= 0, got {manifest.split_seed!r}")
    if not isinstance(manifest.python_version, str) or not manifest.python_version:
        raise ValueError(f"{where}: python_version must be a non-empty string, got {manifest.python_version!r}")
    if not manifest.groups:
        raise ValueError(f"{where}: groups is empty; list at least one group")
    previous = ""
    for index, group in enumerate(manifest.groups):
        at = f"{where}: groups[{index}]"
        if not isinstance(group.id, str) or not _GROUP_ID.fullmatch(group.id):
            raise ValueError(f"{at}: id must be 16 hexadecimal digits, got {group.id!r}")
        if group.id <= previous:
            problem = "appears twice" if group.id == previous else "is out of order"
            raise ValueError(f"{at}: id {group.id!r} {problem}; ids must be unique and ascending")
        previous = group.id
        if group.kind not in KINDS:
            raise ValueError(f"{at}: kind must be one of {', '.join(KINDS)}, got {group.kind!r}")
        if group.split not in SPLITS:
            raise ValueError(f"{at}: split must be one of {', '.join(SPLITS)}, got {group.split!r}")
        if not isinstance(group.name, str) or not group.name:
            raise ValueError(f"{at}: name must be a non-empty string, got {group.name!r}")
        if not isinstance(group.num_bytes, int) or isinstance(group.num_bytes, bool) or group.num_bytes <= 0:
            raise ValueError(f"{at}: num_bytes must be a positive integer, got {group.num_bytes!r}")


def group_id_of(text: str) -> str:
    r"""Return the group id of a text: the first 16 hexadecimal digits of the SHA-256 of its UTF-8 bytes.

    >>> group_id_of("import this\n")
    '56fbe8052c13c429'
    """
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


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
