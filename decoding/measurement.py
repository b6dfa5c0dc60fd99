"""What every timing in this project shares: quiet machine, pinned threads, interleaved order, hardware name."""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

MAX_LOAD = 0.3


def load_average() -> float:
    """Mean number of runnable processes over the last minute; NaN where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return float("nan")


def require_quiet(*, allow_load: bool = False, limit: float = MAX_LOAD) -> float:
    """Refuse to time anything beside other work.

    Args:
        allow_load: Measure all the same; the load is recorded either way.
        limit: Highest load average accepted.

    Returns:
        The load average.

    Raises:
        ValueError: The load average is above ``limit`` and ``allow_load`` is false.
    """
    load = load_average()
    if load > limit and not allow_load:
        raise ValueError(
            f"the load average is {load:.2f}, above {limit}: other work would spoil the timing; wait until the "
            "machine is quiet, or add --allow-load to measure all the same"
        )
    return load


def pin_threads(threads: int = 1) -> None:
    """Let torch compute with this many threads.

    Raises:
        ValueError: ``threads`` is below 1.
    """
    if threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, the device's queue empty before and after."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(jobs: Sequence[T], repeats: int, seed: int) -> Iterator[T]:
    """Yield every job ``repeats`` times: rounds over all jobs, each round in its own random order.

    Rounds spread slow drifts of the machine evenly over the jobs; the random order keeps any job from always
    running after the same one.

    >>> sorted(interleaved(["a", "b"], repeats=2, seed=0))
    ['a', 'a', 'b', 'b']
    """
    source = random.Random(seed)
    for _ in range(repeats):
        yield from source.sample(jobs, len(jobs))


def hardware_string(device: torch.device) -> str:
    """Name of the processor or accelerator, with its number of cores or its memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_bytes(device: torch.device) -> int | None:
    """Bytes free on a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return free[0] if free else None
