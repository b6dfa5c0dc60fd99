"""Does the memory of training grow with the number of trace tokens, and how fast are traces read?

    python benchmarks/training_memory.py

Writes ``training_memory.json`` and ``training_memory.md``. Synthetic stores of three sizes go through what
`train-predictor` does with its traces (checks, files, splits, tables on a capped number of tokens, the plan of an
epoch), then through all batches of an epoch and a few steps of a tiny predictor. Each size runs in a fresh process
that reports its own peak memory. Beside it stands the same epoch with all traces in memory.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.config import TrainPredictorConfig

#: Shape of the demo target; 28 bytes a token.
SPEC = RoutingSpec(6, tuple(range(6)), 64, 4, 2048, "0" * 64, "synthetic", "0" * 64)
EMBEDDING_SIZE = 128
#: Peak memory of the largest store over that of the smallest.
BOUND = 1.10
_UNIT = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemoryConfig:
    """Peak memory and speed of the training reader against the number of trace tokens."""

    tokens: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    """Tokens of the stores, ascending; the first is what the others are compared with."""
    steps: int = 20
    """Training steps of each process."""
    context_length: int = 512
    """Longest window, in tokens."""
    batch_tokens: int = 4096
    """Positions of a batch, padding included."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of the traces and of the order."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""

    def __post_init__(self) -> None:
        """Validate the sizes."""
        if len(self.tokens) < 2 or sorted(set(self.tokens)) != list(self.tokens) or self.tokens[0] < 40_000:
            raise ValueError(f"--tokens must be two or more ascending numbers from 40000, got {list(self.tokens)}")


def run(config: TrainingMemoryConfig) -> None:
    """Measure every size and write the two files."""
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in config.tokens:
            print(f"{tokens:,} tokens", flush=True)
            store = Path(folder) / f"store-{tokens}"
            common.in_fresh_process(write_store, store, tokens, config.seed)
            files = common.in_fresh_process(measure, config, store, Path(folder) / f"run-{tokens}", "files")
            memory = common.in_fresh_process(measure, config, store, Path(folder) / f"run-{tokens}", "memory")
            rows.append({"tokens": tokens, "files": files, "memory": memory})
    peaks = [row["files"]["peak_rss_bytes"] for row in rows]
    holds = max(peaks) <= BOUND * peaks[0] and all(row["files"]["padding_share"] < 0.10 for row in rows)
    results: dict[str, Any] = {"runs": rows, "bound": BOUND, "holds": holds}
    common.write_json(
        config.out / "training_memory.json", common.result("training_memory", conditions, config, results)
    )
    parts = _page(config, results)
    common.write_page(config.out / "training_memory.md", "Memory of training", conditions, parts)
    print("\n\n".join(parts))


def write_store(path: Path, tokens: int, seed: int) -> None:
    """A store of sequences of 32 to 1,024 random tokens, two of each group, written in units of 256."""
    rng = np.random.default_rng(seed)
    with TraceStoreWriter(path, SPEC, compression="zstd-1") as writer:
        pending: list[RoutingTrace] = []
        for number, size in enumerate(_lengths(tokens, rng)):
            pending.append(_sequence(number, size, rng))
            if len(pending) == _UNIT:
                writer.append(pending)
                pending = []
        if pending:
            writer.append(pending)


def _lengths(tokens: int, rng: np.random.Generator) -> Iterator[int]:
    left = tokens
    while left > 0:
        size = min(left, int(rng.integers(32, 1025)))
        yield size
        left -= size


def _sequence(number: int, size: int, rng: np.random.Generator) -> RoutingTrace:
    gaps = rng.integers(1, SPEC.num_experts // SPEC.top_k + 1, (size, SPEC.num_layers, SPEC.top_k), dtype=np.uint8)
    return RoutingTrace(
        sequence_id=f"{number:032x}",
        group_id=f"{number // 2:032x}",
        dataset=f"synthetic{number % 3}",
        category="",
        token_ids=rng.integers(0, SPEC.vocab_size, size, dtype=np.int32),
        prompt_length=size,
        origin="teacher_forced",
        experts=np.cumsum(gaps, axis=-1, dtype=np.uint8) - np.uint8(1),
        weights=None,
        finish_reason="text",
    )


def measure(config: TrainingMemoryConfig, store: Path, out: Path, kind: str) -> dict[str, Any]:
    """Prepare the data of a run, read an epoch and train some steps.

    Args:
        config: Options.
        store: Store of traces.
        out: Folder of the run.
        kind: ``files``, as `train-predictor` does; ``memory``: read all traces into arrays instead.
    """
    import torch  # noqa: PLC0415 - in the child only

    from ecospec.train.arrays import open_stores, read_arrays  # noqa: PLC0415
    from ecospec.train.data import TraceDataModule  # noqa: PLC0415
    from ecospec.train.run_data import prepare_data  # noqa: PLC0415

    torch.set_num_threads(config.threads)
    sizes = {"context_length": config.context_length, "batch_tokens": config.batch_tokens, "seed": config.seed}
    start = time.perf_counter()
    if kind == "files":
        options = TrainPredictorConfig(
            target=Path("synthetic"),
            traces=str(store),
            out=out,
            calibration_fraction=0.2,
            baseline_tokens=20_000,
            **sizes,
        )
        data = prepare_data(options, SPEC).module
    else:
        arrays = read_arrays(open_stores([store], SPEC))
        data = TraceDataModule(arrays, arrays, **sizes)
    prepared = time.perf_counter()
    counted = sum(int(batch["mask"].sum()) for batch in data.train_dataloader())
    read = time.perf_counter()
    trained = _train(config, data)
    return {
        "prepare_seconds": prepared - start,
        "read_tokens": counted,
        "read_tokens_per_second": counted / (read - prepared),
        "train_tokens_per_second": trained / (time.perf_counter() - read),
        "padding_share": data.training_plan(0).padding_share(),
        "peak_rss_bytes": common.peak_rss_bytes(),
        **_resident(),
    }


def _train(config: TrainingMemoryConfig, data: Any) -> int:
    """A few steps of a tiny predictor; returns the tokens that counted."""
    import torch  # noqa: PLC0415 - in the child only

    from ecospec.predictor.model import RoutingPredictorModel  # noqa: PLC0415
    from ecospec.train.losses import selected_expert_cross_entropy  # noqa: PLC0415

    torch.manual_seed(config.seed)
    backbone = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    backbone |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    table = torch.randn(SPEC.vocab_size, EMBEDDING_SIZE)
    model = RoutingPredictorModel(SPEC, backbone=backbone, embedding_size=EMBEDDING_SIZE, target_embedding=table)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = 0
    for _, batch in zip(range(config.steps), data.train_dataloader(), strict=False):
        loss = selected_expert_cross_entropy(model(batch["input_ids"]), batch["experts"], batch["mask"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int(batch["mask"].sum())
    return tokens


def _resident() -> dict[str, int]:
    """Resident memory at the end: of the process's own, and of mapped files (programs and libraries)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        key: 1024 * int(fields[name].split()[0])
        for key, name in (("anonymous_bytes", "RssAnon"), ("file_bytes", "RssFile"))
    }


def _page(config: TrainingMemoryConfig, results: dict[str, Any]) -> list[str]:
    """Paragraphs and table of the page."""
    setting = (
        "Synthetic stores (6 MoE layers, 64 experts, top-4) through everything that `train-predictor` does with "
        f"its traces, all batches of one epoch, and {config.steps} steps of a tiny predictor; each row is a fresh "
        "process. Peak: VmHWM, imports included, the page cache not. Anonymous and file-backed memory are those at "
        "the end; the latter are programs and libraries, as traces are read and not mapped. `in memory`: the same "
        "batches from arrays that hold all traces (no splits, no tables). The tables are fitted on 20,000 tokens "
        "here, by default on up to 2,000,000, which takes memory of its own. Asked for: a peak of at most "
        f"{BOUND:.2f} times that of the first row, and less than 10 % padding: "
        f"{'holds' if results['holds'] else 'does not hold'}."
    )
    first = results["runs"][0]["files"]["peak_rss_bytes"]
    headers = ["tokens", "peak, MiB", "ratio", "anonymous, MiB", "file-backed, MiB", "in memory: peak, MiB"]
    headers += ["prepare, s", "read, tokens/s", "train, tokens/s", "padding, %"]
    rows = [
        [
            row["tokens"],
            _mib(files["peak_rss_bytes"]),
            round(files["peak_rss_bytes"] / first, 3),
            _mib(files["anonymous_bytes"]),
            _mib(files["file_bytes"]),
            _mib(row["memory"]["peak_rss_bytes"]),
            round(files["prepare_seconds"], 1),
            round(files["read_tokens_per_second"]),
            round(files["train_tokens_per_second"]),
            round(100 * files["padding_share"], 2),
        ]
        for row in results["runs"]
        for files in [row["files"]]
    ]
    return [setting, common.markdown_table(headers, rows)]


def _mib(size: int) -> int:
    return round(size / 2**20)


if __name__ == "__main__":
    common.run_script(TrainingMemoryConfig, run)
