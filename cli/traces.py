"""``ecospec traces verify|info|merge``: look after trace stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.errors import terminable

if TYPE_CHECKING:
    from ecospec.eval.tables import Table
    from ecospec.trace_collection.inspection import StoreInfo

__all__ = ["InfoConfig", "MergeConfig", "VerifyConfig", "info", "merge", "verify"]

DUPLICATES = ("refuse", "skip")


@dataclass(frozen=True)
class VerifyConfig:
    """Options of ``traces verify``."""

    store: Path
    """Folder of a store of routing traces or draft trees."""
    json: Path | None = None
    """File for the list of problems as JSON; an earlier one is replaced."""
    allow_incomplete: bool = False
    """Accept a store whose collection has not finished."""


@dataclass(frozen=True)
class InfoConfig:
    """Options of ``traces info``."""

    store: Path
    """Folder of a store of routing traces or draft trees."""
    json: Path | None = None
    """File for everything shown, as JSON; an earlier one is replaced."""


@dataclass(frozen=True)
class MergeConfig:
    """Options of ``traces merge``."""

    stores: str
    """Folders of the stores, separated by commas; rows keep this order."""
    out: Path
    """Folder of the merged store."""
    duplicates: str = "refuse"
    """A sequence that an earlier store has already: refuse the merge, or skip and count the sequence."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names the flag.
        """
        if self.duplicates not in DUPLICATES:
            raise ValueError(f"--duplicates must be one of {', '.join(DUPLICATES)}, got {self.duplicates!r}")
        if not all(part.strip() for part in self.stores.split(",")):
            raise ValueError(f"stores {self.stores!r} holds an empty entry; write A,B")


def verify(config: VerifyConfig) -> None:
    """Check a store; one line per problem.

    Raises:
        ValueError: There are problems.
    """
    from ecospec.trace_collection.manifest import StoreManifest  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.trace_collection.verification import store_problems  # noqa: PLC0415

    _require_outside_stores(config.json)
    problems = []
    for problem in store_problems(config.store, allow_incomplete=config.allow_incomplete):
        problems.append(problem)
        sys.stdout.write(problem + "\n")
    if config.json is not None:
        _write_json(config.json, {"store": str(config.store), "problems": problems})
    if problems:
        raise ValueError(f"{config.store} has {len(problems)} problem{'s' if len(problems) > 1 else ''}")
    manifest = StoreManifest.load(config.store)
    sys.stdout.write(
        f"{config.store} is sound: {manifest.rows:,} rows, {manifest.tokens:,} tokens with experts, "
        f"{len(manifest.shards)} shard{'' if len(manifest.shards) == 1 else 's'}\n"
    )


def info(config: InfoConfig) -> None:
    """Show what is in a store, and what looks wrong with it."""
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast
    from rich.markup import escape  # noqa: PLC0415

    from ecospec.cli.tables import show_table  # noqa: PLC0415
    from ecospec.trace_collection.inspection import inspect_store  # noqa: PLC0415

    _require_outside_stores(config.json)
    found = inspect_store(config.store)
    console = Console()
    for table in info_tables(found):
        show_table(console, table)
    for warning in found.warnings:
        console.print(f"warning: {escape(warning)}", style="yellow", soft_wrap=True)
    if config.json is not None:
        _write_json(config.json, found.to_dict())


def merge(config: MergeConfig) -> None:
    """Merge stores of one target."""
    from ecospec.cli.provenance import provenance  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.trace_collection.merge import merge_stores  # noqa: PLC0415

    with terminable():
        report = merge_stores(
            [Path(part.strip()) for part in config.stores.split(",")],
            config.out,
            duplicates="skip" if config.duplicates == "skip" else "refuse",
            provenance=provenance(),
        )
    left_out = "".join(
        f"; {count:,} duplicates of {path} left out" for path, count in report.duplicates.items() if count
    )
    sys.stdout.write(f"{report.rows:,} rows, {report.tokens:,} tokens with experts in {config.out}{left_out}\n")


def info_tables(found: StoreInfo) -> Iterator[Table]:
    """Tables of ``traces info``: the whole, its datasets, its layers.

    Args:
        found: From `ecospec.trace_collection.inspection.inspect_store`.
    """
    from ecospec.eval.tables import MISSING, Table  # noqa: PLC0415 - keeps `--help` fast

    spec = found.spec
    columns = sorted(found.bytes_by_column.items(), key=lambda column: -column[1])
    rows = [
        ("kind", found.kind + ("" if found.complete else ", incomplete")),
        ("target", f"{spec.target_id}: {spec.num_layers} MoE layers, {spec.top_k} of {spec.num_experts} experts"),
        ("rows", f"{found.rows:,}"),
        ("sequences", f"{found.sequences:,}"),
        ("groups", f"{found.groups:,}"),
        ("tokens with experts", f"{found.tokens:,}"),
        ("bytes per token", f"{found.bytes_per_token:.2f}"),
        *((f"  {name}", f"{size:.2f}") for name, size in columns if size >= 0.01),
        ("prompts left out", ", ".join(f"{count:,} {why}" for why, count in found.skipped.items()) or "0"),
    ]
    yield Table(str(found.path), ("", ""), rows)
    if found.datasets:
        yield Table(
            "Datasets",
            ("dataset", "sequences", "groups", "tokens", "share", "teacher-forced"),
            [
                (
                    name,
                    f"{one.sequences:,}",
                    f"{one.groups:,}",
                    f"{one.tokens:,}",
                    f"{one.tokens / max(found.tokens, 1):.1%}",
                    f"{one.teacher_forced / max(one.tokens, 1):.0%}",
                )
                for name, one in found.datasets.items()
            ],
        )
    yield Table(
        "Experts per MoE layer",
        ("layer", "entropy, bits", "effective experts", "dead experts", "same token"),
        [
            (
                str(one.layer),
                f"{one.entropy_bits:.2f}",
                f"{one.effective_experts:.1f}",
                str(len(one.dead)),
                MISSING if one.same_token is None else f"{one.same_token:.2f}",
            )
            for one in found.layers
        ],
        notes=("same token: how far two occurrences of a token share experts beyond chance (0), up to always (1)",),
    )


def _require_outside_stores(path: Path | None) -> None:
    """Refuse a ``--json`` file in a store, whose own files it would replace.

    Raises:
        ValueError: The file lies in a store.
    """
    from ecospec.trace_collection.manifest import MANIFEST_NAME  # noqa: PLC0415 - keeps `--help` fast

    if path is not None and (path.resolve().parent / MANIFEST_NAME).exists():
        raise ValueError(f"--json {path} lies in a trace store; name a file outside")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    from ecospec.trace_collection.manifest import write_durably  # noqa: PLC0415 - keeps `--help` fast

    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())
