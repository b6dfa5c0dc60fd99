"""What befalls a store from outside: a full disk, two writers, a killed process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import signal
import subprocess
import threading
import time
import warnings
from typing import Any

import pytest

from ecospec.cli.errors import exit_status
from ecospec.trace_collection import encoding
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from ecospec.trace_collection.store_lock import LOCK_NAME, StoreLock
from tests.killing import kill_until_same
from tests.store_rows import SPEC, same_rows, trace, write

UNITS = 40
OPTIONS: dict[str, Any] = {"tokens_per_shard": 90, "collection": {"seed": 1}, "plan_hash": "a" * 64}


def run_units(path, *, resume, pause=0.0, units=UNITS, background=False):
    """What a collection does: the units that are not finished, in order."""
    with TraceStoreWriter(path, SPEC, resume=resume, background=background, **OPTIONS) as writer:
        for number in range(writer.finished_units, units):
            writer.append([trace(number), trace(1000 + number)])
            time.sleep(pause)


@contextlib.contextmanager
def full_disk(tmp_path, room):
    """A folder whose file system takes ``room`` bytes per file (or, as root, in all), and a way to make room."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def free():
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room // 4, old[1]))
    try:
        yield folder, free
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_line_and_resume_gives_the_same_rows(background, tmp_path, capsys):
    run_units(tmp_path / "whole", resume=False)
    with full_disk(tmp_path, 64 * 1024) as (folder, free):
        work = functools.partial(run_units, folder / "out", background=background)
        assert exit_status("ecospec test", lambda: work(resume=False)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "free space, then run again (with --resume" in lines[0]
        assert str(folder / "out") in lines[0]
        assert not list((folder / "out").glob("*.tmp"))  # what was torn takes no space
        partial = TraceStore(folder / "out")
        assert not partial.manifest.complete
        partial.verify()
        free()
        work(resume=True)
        same_rows(folder / "out", tmp_path / "whole")
        assert TraceStore(folder / "out").manifest.shards == TraceStore(tmp_path / "whole").manifest.shards


def test_no_space_for_the_first_manifest(tmp_path, capsys):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        assert exit_status("ecospec test", lambda: run_units(tmp_path / "out", resume=False)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in capsys.readouterr().err
    run_units(tmp_path / "out", resume=True)
    assert TraceStore(tmp_path / "out").manifest.complete


def test_second_writer_is_refused(tmp_path):
    with TraceStoreWriter(tmp_path / "out", SPEC, **OPTIONS) as writer:
        writer.append([trace(1)])
        with pytest.raises(ValueError, match=rf"out is being written by process {os.getpid()} on .*; wait until"):
            TraceStoreWriter(tmp_path / "out", SPEC, resume=True, **OPTIONS)
        with pytest.raises(FileExistsError, match="is not empty"):
            TraceStoreWriter(tmp_path / "out", SPEC, **OPTIONS)
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["manifest.json", "shard-00000.parquet"]
    assert TraceStore(tmp_path / "out").num_rows == 1


def test_second_process_is_refused_and_a_killed_one_blocks_nobody(tmp_path, capsys):
    child = os.fork()
    if not child:
        run_units(tmp_path / "out", resume=False, pause=60)
        os._exit(0)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out" / "manifest.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert exit_status("ecospec test", lambda: run_units(tmp_path / "out", resume=True)) == 2
        message = capsys.readouterr().err
        assert f"is being written by process {child}" in message
        assert len(message.splitlines()) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / "out" / LOCK_NAME).exists()  # stale: the process is gone, and the lock with it
    run_units(tmp_path / "out", resume=True)
    assert TraceStore(tmp_path / "out").manifest.complete


def test_writers_let_go_after_errors(tmp_path):
    class StopError(Exception):
        pass

    with pytest.raises(StopError), TraceStoreWriter(tmp_path / "out", SPEC, **OPTIONS) as writer:
        raise StopError
    with pytest.raises(ValueError, match="is closed; open the store again with resume=True"):
        writer.append([trace(1)])
    with pytest.raises(ValueError, match="another batch plan"):
        TraceStoreWriter(tmp_path / "out", SPEC, resume=True, **(OPTIONS | {"plan_hash": "b" * 64}))
    run_units(tmp_path / "out", resume=True)


@pytest.mark.parametrize("background", [False, True])
def test_two_interrupts_do_not_unlock_a_store_that_is_still_written(held, tmp_path, background):
    """Ctrl-C in the wait for a shard, and again in the wait that follows."""

    def run():
        with TraceStoreWriter(tmp_path / "out", SPEC, background=background, tokens_per_shard=1) as writer:
            writers.append(writer)
            writer.append([trace(0)])
            writer.flush()

    def interrupt():
        assert held.begun.wait(30)
        for _ in range(3):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    writers: list[TraceStoreWriter] = []
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, old)
    with pytest.raises(ValueError, match="is being written by process"):
        TraceStoreWriter(tmp_path / "out", SPEC, resume=True)
    held.go.set()
    writers[0].abandon()
    with TraceStoreWriter(tmp_path / "out", SPEC, resume=True) as again:
        assert again.finished_units == 1


def test_what_was_abandoned_is_not_written_without_the_lock(tmp_path):
    writer = TraceStoreWriter(tmp_path / "out", SPEC)
    writer.append([trace(1)])
    writer.abandon()
    with pytest.raises(ValueError, match="is closed; open the store again with resume=True"):
        writer.flush()
    writer.close()
    assert not TraceStore(tmp_path / "out").manifest.complete


def test_file_systems_without_locks_warn(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="see to it that one process writes"):
        lock = StoreLock(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lock.release()
        lock.release()


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path, monkeypatch):
    """Between opening the lock's file and locking it, its holder may end and remove the file."""
    original = fcntl.flock
    calls: list[int] = []

    def flock(handle, operation):
        if not calls:
            (tmp_path / LOCK_NAME).unlink()
        calls.append(operation)
        return original(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = StoreLock(tmp_path)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="is being written"):
        StoreLock(tmp_path)
    lock.release()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("moments", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_at_random_moments_gives_the_same_store(tmp_path, moments, background):
    kill_until_same(functools.partial(run_units, background=background), tmp_path, moments)


class Held:
    """Holds back or breaks the writing of shards, where their rows are encoded."""

    def __init__(self, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        self.error: OSError | None = None
        original = encoding.write_shard

        def write_shard(*arguments):
            self.begun.set()
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            original(*arguments)

        monkeypatch.setattr("ecospec.trace_collection.shard_writer.write_shard", write_shard)


@pytest.fixture
def held(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.go.set()


def test_units_are_added_while_a_shard_is_written(held, tmp_path):
    full = sum(trace(number).num_processed for number in range(5))
    with TraceStoreWriter(tmp_path / "out", SPEC, background=True, tokens_per_shard=full) as writer:
        for number in range(7):  # the fifth fills a shard, and nobody waits for it
            writer.append([trace(number)])
        assert held.begun.wait(30)
        assert writer.finished_units == 0
        held.go.set()
    same_rows(tmp_path / "out", write(tmp_path / "whole", range(7)))
    assert [shard.units for shard in TraceStore(tmp_path / "out").manifest.shards] == [5, 2]


def test_nothing_follows_a_shard_that_could_not_be_written(held, tmp_path):
    """Its units would be missing between those before and after it."""
    held.error = OSError(errno.ENOSPC, "No space left on device")
    held.go.set()
    writer = TraceStoreWriter(tmp_path / "out", SPEC, background=True, tokens_per_shard=40)

    def add_all():
        for number in range(100):
            writer.append([trace(number)])
            time.sleep(0.001)

    with pytest.raises(OSError, match="No space left"):
        add_all()
    with pytest.raises(ValueError, match="is closed; open the store again with resume=True"):
        writer.append([trace(100)])
    writer.close()
    manifest = TraceStore(tmp_path / "out").manifest
    assert (manifest.units, manifest.complete) == (0, False)
    held.error = None
    with TraceStoreWriter(tmp_path / "out", SPEC, background=True, tokens_per_shard=40, resume=True) as again:
        for number in range(again.finished_units, 100):
            again.append([trace(number)])
    same_rows(tmp_path / "out", write(tmp_path / "whole", range(100)))


def test_an_error_in_the_last_shard_leaves_the_store_incomplete(held, tmp_path):
    held.error = OSError(errno.ENOSPC, "No space left on device")
    held.go.set()

    def run():
        with TraceStoreWriter(tmp_path / "out", SPEC, background=True) as writer:
            writer.append([trace(0)])

    with pytest.raises(OSError, match="No space left"):
        run()
    assert not TraceStore(tmp_path / "out").manifest.complete
    assert not (tmp_path / "out" / LOCK_NAME).exists()


def test_a_store_is_locked_until_its_last_shard_is_written(held, tmp_path):
    writer = TraceStoreWriter(tmp_path / "out", SPEC, background=True, tokens_per_shard=1)
    writer.append([trace(0)])
    leaving = threading.Thread(target=writer.abandon)
    leaving.start()
    assert held.begun.wait(30)
    time.sleep(0.05)
    assert leaving.is_alive()
    with pytest.raises(ValueError, match="is being written by process"):
        TraceStoreWriter(tmp_path / "out", SPEC, resume=True)
    held.go.set()
    leaving.join(30)
    with TraceStoreWriter(tmp_path / "out", SPEC, resume=True) as again:
        assert again.finished_units == 1  # what was being written is not lost


def test_write_helper_is_deterministic(tmp_path):
    """What the tests above rest on: the same units give the same bytes."""
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert TraceStore(first).manifest.shards == TraceStore(second).manifest.shards
