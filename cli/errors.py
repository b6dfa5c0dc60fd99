"""The one place where user errors become a line on the terminal and an exit status.

Statuses: 0 success; 2 the user can mend it (bad flag, missing file, wrong pair of artefacts, full disk, too little
memory); 130 for Ctrl-C, and 143 for SIGTERM where a command handles it (`terminable`). Anything else is a bug of
ours and keeps its traceback. ``ECOSPEC_TRACEBACK=1`` shows the traceback of user errors too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# OSError covers missing files, permissions, existing folders, full disks, and what transformers raises for a
# checkpoint it cannot find.
USER_ERRORS = (ValueError, OSError)
_AGAIN = "run the same command again, with --resume where it has it, to go on"


class Terminated(BaseException):
    """SIGTERM came; not an Exception, so that no handler of errors takes it for one."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the commands in the context as Ctrl-C does: files closed, locks released, one line.

    Schedulers send it before they kill. Without effect outside the main thread, where Python allows no handlers.
    """

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def one_line(error: BaseException) -> str:
    """The message of an error on one line, white space folded.

    >>> one_line(FileNotFoundError(2, "No such file or directory", "traces"))
    'No such file or directory: traces'
    >>> one_line(OSError(errno.ENOSPC, "No space left on device", "traces"))
    'No space left on device: traces; free space, then run again (with --resume where the command has it)'
    """
    if isinstance(error, OSError) and error.strerror:
        name = f": {error.filename}" if error.filename is not None else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # full disk, quota, ulimit -f
            advice = "free space, then run again (with --resume where the command has it)"
            return f"{error.strerror}{name}; {advice}"
        return f"{error.strerror}{name}"
    return " ".join(str(error).split()) or type(error).__name__


def exit_status(program: str, function: Callable[[], None]) -> int:
    """Run a command and turn what it raises into an exit status.

    Args:
        program: Name shown before the message, e.g. ``"ecospec collect-traces"``.
        function: The command, argument parsing included.

    Returns:
        The exit status; see the top of this file.
    """
    try:
        function()
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted; {_AGAIN}\n")
        return 130
    except Terminated:
        sys.stderr.write(f"{program}: terminated; {_AGAIN}\n")
        return 143
    except Exception as error:
        short = _is_memory_error(error)
        if os.environ.get("ECOSPEC_TRACEBACK") == "1" or not (short or isinstance(error, USER_ERRORS)):
            raise
        advice = "; out of memory: use smaller batches or shorter sequences, or a device with more" if short else ""
        sys.stderr.write(f"{program}: error: {one_line(error)}{advice}\n")
        return 2
    return 0


def _is_memory_error(error: Exception) -> bool:
    """Whether memory ran out: Python's, a GPU's as torch says it, or the host's, for which torch has no class."""
    torch = sys.modules.get("torch")
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
