"""Opening a store of either kind."""

from __future__ import annotations

from pathlib import Path

from ecospec.trace_collection.manifest import ROUTING_TRACE, StoreManifest
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.tree_store import TreeStore


def open_store(path: str | Path, *, check_files: bool = True) -> TraceStore | TreeStore:
    """Open a store of routing traces or of draft trees, whichever its manifest says.

    Args:
        path: Folder of the store.
        check_files: Refuse a store of which a shard is missing or truncated.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It is no store, or a shard is missing or truncated.
    """
    kind = StoreManifest.load(Path(path)).kind
    return (TraceStore if kind == ROUTING_TRACE else TreeStore)(path, check_files=check_files)
