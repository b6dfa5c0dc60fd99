"""Manifest of a sharded store, and the writes that survive a killed process.

``manifest.json`` lies beside the shards it lists and is replaced atomically after each of them::

    runs/traces/
      shard-00000.parquet
      shard-00001.parquet
      manifest.json
        {
          "format_version": 1,
          "kind": "routing_trace",           # or "draft_tree_trace": the schema of the rows
          "complete": false,                 # true once everything planned is listed
          "spec": {...},                     # RoutingSpec
          "collection": {...},               # how the rows came about: source, mode, seeds, ...
          "plan_hash": "<64 hex>",           # of the batch plan; "" where rows come unplanned
          "provenance": {"versions": {"python": "3.11.7", "torch": "2.13.0", ...}, ...},
          "shards": [{"file": "shard-00000.parquet", "rows": 512, "tokens": 98304, "units": 2,
                      "num_bytes": 2944321, "sha256": "<64 hex>"}, ...]
        }
      skipped.jsonl            # the prompts that were left out, where there are any (`plan.SkippedPrompt`)
      .writer.lock             # only while something writes, and after kill -9 (`store_lock`)
      *.tmp                    # torn files, likewise; a resumed run removes them

A shard that is not listed does not exist: it is the torn end of a killed run, and a resumed run writes it again.
A merged store (`merge`) has the collection and provenance of each source under ``"merged"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ecospec.predictor.routing_spec import RoutingSpec

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
ROUTING_TRACE = "routing_trace"
DRAFT_TREE_TRACE = "draft_tree_trace"
KINDS = (ROUTING_TRACE, DRAFT_TREE_TRACE)

#: Default size of a shard. A killed run loses those not yet written: one, or two in the background.
TOKENS_PER_SHARD = 98_304

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RECORDED_PACKAGES = ("ecospec", "torch", "transformers", "tokenizers", "pyarrow", "numpy")


def _is_count(value: object) -> bool:
    """Whether a value of a JSON file is an integer from 0 to the largest that Arrow counts to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


@dataclasses.dataclass(frozen=True, slots=True)
class ShardEntry:
    """One finished shard.

    Attributes:
        file: File name inside the store.
        rows: Rows (sequences, or speculation steps).
        tokens: Tokens (or tree nodes) with experts.
        units: Batches of the plan it covers.
        num_bytes: File size.
        sha256: Checksum of the file, 64 lower-case hex digits.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    file: str
    rows: int
    tokens: int
    units: int
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Validate every field."""
        if not isinstance(self.file, str) or not re.fullmatch(r"shard-\d{5,}\.parquet", self.file):
            raise ValueError(f"file must look like 'shard-00000.parquet', got {self.file!r}")
        for name in ("rows", "tokens", "units", "num_bytes"):
            value = getattr(self, name)
            if not _is_count(value) or value < 1:
                raise ValueError(f"{name} of {self.file} must be a positive integer, got {value!r}")
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 of {self.file} must be 64 lower-case hex digits, got {self.sha256!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class StoreManifest:
    """Contents of a store; drawn at the top of this file.

    Attributes:
        kind: Schema of the rows, one of `KINDS`.
        spec: The target's RoutingSpec.
        collection: How the rows came about; JSON values only.
        plan_hash: Hash of the batch plan, or ``""``.
        provenance: Software versions, and what else its writer recorded (command line, code version).
        shards: Finished shards in order.
        complete: Whether everything planned is listed.
        format_version: Version of this contract.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    kind: str
    spec: RoutingSpec
    collection: Mapping[str, Any]
    plan_hash: str
    provenance: Mapping[str, Any]
    shards: tuple[ShardEntry, ...] = ()
    complete: bool = False
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Validate every field."""
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {self.format_version!r}, this version reads {FORMAT_VERSION}; "
                "use the EcoSpec release that wrote the store"
            )
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("collection", "provenance"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} must be a JSON object, got {getattr(self, name)!r}")
        skipped = self.collection.get("skipped", {})
        if not isinstance(skipped, Mapping) or not all(map(_is_count, skipped.values())):
            raise ValueError(f"collection.skipped must hold a number of prompts by reason, got {skipped!r}")
        if not isinstance(self.plan_hash, str) or (self.plan_hash and not _SHA256.fullmatch(self.plan_hash)):
            raise ValueError(f"plan_hash must be empty or 64 lower-case hex digits, got {self.plan_hash!r}")
        if not isinstance(self.complete, bool):
            raise ValueError(f"complete must be true or false, got {self.complete!r}")
        for number, shard in enumerate(self.shards):
            if shard.file != shard_name(number):
                raise ValueError(f"shards[{number}] must be {shard_name(number)!r}, got {shard.file!r}")

    @property
    def rows(self) -> int:
        """Rows in all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens (or tree nodes) with experts in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def units(self) -> int:
        """Batches of the plan that are finished."""
        return sum(shard.units for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "format_version": self.format_version,
            "kind": self.kind,
            "complete": self.complete,
            "spec": self.spec.to_dict(),
            "collection": dict(self.collection),
            "plan_hash": self.plan_hash,
            "provenance": dict(self.provenance),
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
        }

    @classmethod
    def from_dict(cls, data: object, source: str) -> StoreManifest:
        """Read the JSON form.

        Args:
            data: The JSON object.
            source: File named in error messages.

        Raises:
            ValueError: A field is unknown, missing or out of range.
        """
        values = _exact_fields(cls, data, source)
        if not isinstance(values["shards"], list):
            raise ValueError(f"{source}: shards must be a list, got {values['shards']!r}")
        values["spec"] = RoutingSpec.from_dict(values["spec"], source)
        try:
            values["shards"] = tuple(
                ShardEntry(**_exact_fields(ShardEntry, shard, f"{source}: shards[{number}]"))
                for number, shard in enumerate(values["shards"])
            )
            return cls(**values)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(source) else f"{source}: {text}") from error

    def save(self, folder: Path) -> None:
        """Replace ``manifest.json`` atomically and durably."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        write_durably(folder / MANIFEST_NAME, text.encode())

    @classmethod
    def load(cls, folder: Path) -> StoreManifest:
        """Read ``manifest.json`` of a store.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: It is no store, or its manifest is damaged.
        """
        path = folder / MANIFEST_NAME
        if not folder.exists():
            raise FileNotFoundError(f"{folder} does not exist; give the folder of a trace store")
        if not path.is_file():
            raise ValueError(f"{folder} is not a trace store: it has no {MANIFEST_NAME}; give {_stores_in(folder)}")
        try:
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:  # also bytes that are no text, and endless nesting
            raise ValueError(f"{path} is not JSON ({error}); collect the traces again") from error
        return cls.from_dict(data, str(path))


def _stores_in(folder: Path) -> str:
    """What to give instead of a folder without manifest: the stores in it, where it holds some."""
    stores = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if not stores:
        return "a folder that collect-traces, collect-trees or traces merge wrote"
    more = f" (and {len(stores) - 3} more)" if len(stores) > 3 else ""
    return f"one of the stores in it: {', '.join(map(str, stores[:3]))}{more}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")  # and equals nothing, so that no run could be the same


def _exact_fields(owner: type, data: object, source: str) -> dict[str, Any]:
    """`data` as a dictionary with exactly the fields of a dataclass."""
    names = [field.name for field in dataclasses.fields(owner)]
    if not isinstance(data, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(data).__name__}")
    if unknown := [name for name in data if name not in names]:
        raise ValueError(f"{source}: unknown field {unknown[0]!r}; allowed: {', '.join(names)}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{source}: field {missing[0]!r} is missing")
    return dict(data)


def shard_name(number: int) -> str:
    """File name of a shard.

    >>> shard_name(3)
    'shard-00003.parquet'
    """
    return f"shard-{number:05d}.parquet"


def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a trace, as far as installed."""
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@contextlib.contextmanager
def written_or_removed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is on disk when the context is left; after an error it is removed, to free a full disk.

    Raises:
        OSError: It could not be written; the error names the file.
    """
    try:
        with path.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new one, never a mixture."""
    temporary = path.with_name(path.name + ".tmp")
    with written_or_removed(temporary) as handle:
        handle.write(content)
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished, fsynced file to its name, and make the rename durable."""
    temporary.replace(path)
    if os.name == "posix":  # folders cannot be opened elsewhere
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 lower-case hex digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
