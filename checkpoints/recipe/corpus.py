"""Stage ``manifest``: list the groups of the standard library and fix their splits."""

from __future__ import annotations

import platform

from checkpoints.recipe.settings import Settings
from ecospec.trace_collection.groups_manifest import SPLITS, GroupsManifest
from ecospec.trace_collection.stdlib_corpus import build_manifest, coverage, find_documents


def manifest_complete(settings: Settings) -> bool:
    """Return whether the manifest exists."""
    return settings.manifest.is_file()


def make_manifest(settings: Settings) -> None:
    """Write ``groups.json`` from the running Python's library."""
    documents = find_documents()
    manifest = build_manifest(documents, platform.python_version())
    settings.out.mkdir(parents=True, exist_ok=True)
    manifest.save(settings.manifest)
    for split in SPLITS:
        cover = coverage(manifest, documents)[split]
        print(f"{split:16s} {cover.groups_listed:5d} groups  {cover.bytes_listed / 1e6:6.2f} MB")


def load_manifest(settings: Settings) -> GroupsManifest:
    """Read the manifest.

    Raises:
        ValueError: If it is invalid, or absent (run stage ``manifest`` first).
    """
    if not settings.manifest.is_file():
        raise ValueError(f"{settings.manifest} does not exist; run stage `manifest` first")
    return GroupsManifest.load(settings.manifest)
