"""Killing a collection at random moments, in forks: importing torch takes longer than the collection."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

from ecospec.trace_collection.store import TraceStore
from tests.store_rows import same_rows

#: Forks that are killed before a store is left to finish.
KILLS_PER_STORE = 5


def kill_until_same(work, folder, moments):
    """Kill a collection, resume it, and compare what it leaves with the uninterrupted one.

    Args:
        work: Called as ``work(path, resume=...)``; collects into a store.
        folder: For the stores.
        moments: Random moments of SIGKILL that must have hit a running collection.
    """
    start = time.monotonic()
    work(folder / "whole", resume=False)
    seconds = time.monotonic() - start
    whole = TraceStore(folder / "whole")
    assert len(whole.manifest.shards) > 3
    rng = random.Random(moments)
    killed = stores = 0
    while killed < moments:
        path = folder / f"killed{stores}"
        for _ in range(KILLS_PER_STORE):
            killed += _killed_after(rng.uniform(0, seconds / 2), work, path)
        work(path, resume=path.exists())
        same_rows(path, folder / "whole")
        assert TraceStore(path).manifest.shards == whole.manifest.shards  # checksums included
        assert sorted(p.name for p in path.iterdir()) == sorted(p.name for p in whole.path.iterdir())
        stores += 1
        assert stores <= moments, "the collection ends before it is killed"


def _killed_after(seconds, work, path):
    """Whether a fork was still at work when it was killed."""
    child = os.fork()
    if not child:
        try:
            work(path, resume=path.exists())
        finally:
            os._exit(0)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
