"""One writer per store: a lock that ends with the process that holds it, however it ends.

``.writer.lock`` lies in the store while something writes to it, with host and process id of the writer. The lock is
the kernel's (``flock``), not the file: after ``kill -9`` the file is still there and locks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import warnings
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".writer.lock"


class StoreLock:
    """The lock of one store, held from construction until `release` or the end of the process.

    Args:
        folder: The store; must exist.

    Raises:
        ValueError: Another process (or another writer of this one) holds it; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._file: IO[str] | None = None
        if fcntl is not None:
            self._file = self._acquire()

    @property
    def held(self) -> bool:
        """Whether the lock has not been released."""
        return self._file is not None

    def release(self) -> None:
        """Give the lock back and remove its file; does nothing the second time."""
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()  # while it is still locked: who waits for the name makes a new file
            self._file.close()
            self._file = None

    def _acquire(self) -> IO[str]:
        while True:
            handle = self._path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    handle.seek(0)
                    holder = handle.read().strip() or "another process"
                    handle.close()
                    raise ValueError(
                        f"{self._path.parent} is being written by {holder}; wait until it ends, or choose "
                        "another folder"
                    ) from error
                warnings.warn(f"no lock on {self._path} ({error}): see to it that one process writes", stacklevel=4)
                return handle
            if self._is_current(handle):
                handle.truncate(0)
                handle.write(f"process {os.getpid()} on {platform.node()}\n")
                handle.flush()
                return handle
            handle.close()  # its holder removed the file between open and lock

    def _is_current(self, handle: IO[str]) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(handle.fileno()))
        except FileNotFoundError:
            return False
