"""The groups manifest: which source texts a set of checkpoints was built from, and what each may be used for.

It is a contract on disk (``checkpoints/groups.json``), validated where it is written and where it is read; the
texts themselves are found by `stdlib_corpus`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

FORMAT_VERSION = 1
Split = Literal["target_train", "predictor_train", "tuning", "report"]
Kind = Literal["file", "topic"]
SPLITS: tuple[Split, ...] = get_args(Split)
KINDS: tuple[Kind, ...] = get_args(Kind)

_GROUP_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Group:
    """One entry of the manifest: a source text and what it may be used for."""

    id: str
    kind: Kind
    name: str
    split: Split
    num_bytes: int


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
