"""How fast does training read a trace store, beside pandas and a Python loop?

    python benchmarks/trace_reading.py --target checkpoints/target

Writes ``trace_reading.json`` and ``trace_reading.md``. Every reader turns the same store into the same two arrays,
token ids int32 ``[N]`` and experts uint8 ``[N, L, K]``, which are compared; readers take turns in random order.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from benchmarks.trace_size import demo_traces
from ecospec.decoding.measurement import interleaved
from ecospec.trace_collection.store import TraceStore
from ecospec.train.arrays import read_arrays

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceReadingConfig:
    """Tokens per second of readers of a trace store."""

    target: Path = Path("checkpoints/target")
    """Folder of the target that demo traces are collected from."""
    traces: Path | None = None
    """Store to read; None collects one into --work, or uses the one there."""
    work: Path = Path("runs/benchmarks/trace_size")
    """Folder for the collected traces, kept for the next run."""
    sequences: int = 450
    """Sequences of up to 512 tokens to collect."""
    repeats: int = 3
    """Readings by each reader; the table shows the median."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of the order."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""


def training_reader(folder: Path) -> Arrays:
    """What training reads with: row groups as views of Arrow memory, checked, copied once."""
    arrays = read_arrays([TraceStore(folder)])
    return arrays.tokens, arrays.experts


def pandas_loop(folder: Path) -> Arrays:
    """What one writes without a library: ``pandas.read_parquet`` and a loop over rows and tokens."""
    import pandas as pd  # type: ignore[import-untyped]  # noqa: PLC0415 - only in this reader

    tokens: list[int] = []
    experts: list[npt.NDArray[Any]] = []
    for file in sorted(folder.glob("shard-*.parquet")):
        frame = pd.read_parquet(file)
        for row in frame.itertuples():
            for token, ids in zip(row.token_ids, row.experts, strict=False):  # a last token without experts
                tokens.append(token)
                experts.append(ids)
    return np.array(tokens, np.int32), np.stack(experts)


def pandas_stacked(folder: Path) -> Arrays:
    """The same with one ``numpy.stack`` per row instead of a loop over its tokens."""
    import pandas as pd  # noqa: PLC0415 - only in this reader

    frames = [pd.read_parquet(file) for file in sorted(folder.glob("shard-*.parquet"))]
    experts = [np.stack(row) for frame in frames for row in frame["experts"]]
    tokens = [row for frame in frames for row in frame["token_ids"]]
    kept = [ids[: len(rows)] for ids, rows in zip(tokens, experts, strict=True)]
    return np.concatenate(kept), np.concatenate(experts)


READERS: dict[str, Callable[[Path], Arrays]] = {
    "training reader": training_reader,
    "pandas, Python loop": pandas_loop,
    "pandas, stacked rows": pandas_stacked,
}


def run(config: TraceReadingConfig) -> None:
    """Measure and write the two files."""
    traces = config.traces or demo_traces(config.target, config.work, config.sequences, config.threads)
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    tokens, experts = training_reader(traces)  # also brings the store into the page cache
    seconds: dict[str, list[float]] = {name: [] for name in READERS}
    for name in interleaved(list(READERS), config.repeats, config.seed):
        start = time.perf_counter()
        read = READERS[name](traces)
        seconds[name].append(time.perf_counter() - start)
        if not (np.array_equal(read[0], tokens) and np.array_equal(read[1].reshape(experts.shape), experts)):
            raise ValueError(f"{name} read other rows from {traces} than the training reader")
    naive = statistics.median(seconds["pandas, Python loop"])
    rows = [
        {
            "reader": name,
            "seconds": statistics.median(times),
            "tokens_per_second": len(tokens) / statistics.median(times),
            "times_naive": naive / statistics.median(times),
        }
        for name, times in seconds.items()
    ]
    results: dict[str, Any] = {"tokens": len(tokens), "traces": str(traces), "readers": rows}
    common.write_json(
        config.out / "trace_reading.json", common.result("trace_reading", conditions, config, results)
    )
    setting = (
        f"One store of {len(tokens):,} tokens, from the page cache into the same two arrays; the training reader "
        "also checks every row against the contract, the others check nothing."
    )
    parts = [
        setting,
        common.markdown_table(
            ["reader", "seconds", "tokens/s", "times the loop"],
            [
                [
                    row["reader"],
                    round(row["seconds"], 3),
                    int(round(row["tokens_per_second"], -3)),
                    round(row["times_naive"], 1),
                ]
                for row in rows
            ],
        ),
    ]
    common.write_page(config.out / "trace_reading.md", "Reading trace stores", conditions, parts)
    print("\n\n".join(parts))


if __name__ == "__main__":
    common.run_script(TraceReadingConfig, run)
