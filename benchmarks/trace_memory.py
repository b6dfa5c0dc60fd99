"""Does the memory of a collection grow with the number of tokens?

    python benchmarks/trace_memory.py --target checkpoints/target

Writes ``trace_memory.json`` and ``trace_memory.md``. The same `collect-traces --mode teacher_forced` reads a
smaller and a larger JSONL file of documents of the demo corpus, each in a fresh process that reports its own peak
memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.cli.collect_traces import CollectTracesConfig
from ecospec.cli.collect_traces import run as collect_traces
from ecospec.trace_collection.store import TraceStore

#: Peak memory of the larger collection over that of the smaller one.
BOUND = 1.10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceMemoryConfig:
    """Peak memory of a collection against its number of tokens."""

    target: Path = Path("checkpoints/target")
    """Folder of the target."""
    prompts: str = "stdlib:target_train"
    """Documents that are read, again and again under new names where they do not suffice."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus."""
    tokens: tuple[int, ...] = (100_000, 1_000_000)
    """Tokens of the collections, ascending; the first is what the others are compared with."""
    max_length: int = 256
    """Tokens of a sequence."""
    batch_size: int = 16
    """Sequences of a batch."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""

    def __post_init__(self) -> None:
        """Validate the sizes."""
        if len(self.tokens) < 2 or sorted(set(self.tokens)) != list(self.tokens) or self.tokens[0] < 1:
            raise ValueError(f"--tokens must be two or more ascending numbers, got {list(self.tokens)}")


def run(config: TraceMemoryConfig) -> None:
    """Collect every size and write the two files."""
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in config.tokens:
            print(f"collecting {tokens:,} tokens", flush=True)
            path = Path(folder) / f"{tokens}.jsonl"
            common.in_fresh_process(write_documents, config, tokens, path)
            runs.append(common.in_fresh_process(collect_once, config, path, Path(folder) / str(tokens)))
    first = runs[0]["peak_rss_bytes"]
    results: dict[str, Any] = {
        "runs": [run | {"ratio": run["peak_rss_bytes"] / first} for run in runs],
        "bound": BOUND,
        "holds": all(run["peak_rss_bytes"] <= BOUND * first for run in runs),
    }
    common.write_json(config.out / "trace_memory.json", common.result("trace_memory", conditions, config, results))
    parts = _page(config, results)
    common.write_page(config.out / "trace_memory.md", "Memory of a collection", conditions, parts)
    print("\n\n".join(parts))


def write_documents(config: TraceMemoryConfig, tokens: int, path: Path) -> None:
    """Write a JSONL file of documents with this many tokens altogether; the last one is cut."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - in the child only

    tokenizer: Any = AutoTokenizer.from_pretrained(config.target)
    left = tokens
    with path.open("w", encoding="utf-8") as lines:
        for group, text in _documents(config):
            encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
            offsets = encoded["offset_mapping"]
            end = offsets[left - 1][1] if len(offsets) >= left else len(text)
            lines.write(json.dumps({"text": text[:end], "group_id": group, "dataset": "demo corpus"}) + "\n")
            left -= len(offsets)
            if left <= 0:
                return


def _documents(config: TraceMemoryConfig) -> Iterator[tuple[str, str]]:
    """Group and text of the documents, in rounds."""
    from ecospec.trace_collection.prompts import iter_prompts  # noqa: PLC0415 - in the child only

    for number in itertools.count():
        for prompt in iter_prompts(config.prompts, groups=config.groups):
            yield f"{prompt.group_id}-{number}", prompt.text or ""


def collect_once(config: TraceMemoryConfig, prompts: Path, out: Path) -> dict[str, Any]:
    """Run one collection and return its tokens, seconds and peak memory."""
    start = time.perf_counter()
    collect_traces(
        CollectTracesConfig(
            target=config.target,
            prompts=str(prompts),
            mode="teacher_forced",
            max_length=config.max_length,
            batch_size=config.batch_size,
            threads=config.threads,
            out=out,
        )
    )
    seconds = time.perf_counter() - start
    peak = common.peak_rss_bytes()
    store = TraceStore(out)
    return {
        "tokens": store.num_tokens,
        "sequences": store.num_rows,
        "seconds": seconds,
        "tokens_per_second": store.num_tokens / seconds,
        "store_bytes": sum(shard.num_bytes for shard in store.manifest.shards),
        "peak_rss_bytes": peak,
    }


def _page(config: TraceMemoryConfig, results: dict[str, Any]) -> list[str]:
    """Paragraphs and table of the page."""
    setting = (
        f"`collect-traces --mode teacher_forced` on {config.target}, sequences of at most {config.max_length} "
        f"tokens, batches of {config.batch_size}; each size in a fresh process, whose peak resident memory is "
        "given. Seconds include loading and planning. Ratio: peak memory over that of the first row; at most "
        f"{BOUND:.2f} is asked for: {'holds' if results['holds'] else 'does not hold'}."
    )
    return [
        setting,
        common.markdown_table(
            ["tokens", "sequences", "seconds", "tokens/s", "store, MiB", "peak memory, MiB", "ratio"],
            [
                [
                    run["tokens"],
                    run["sequences"],
                    round(run["seconds"], 1),
                    round(run["tokens_per_second"]),
                    round(run["store_bytes"] / 2**20, 1),
                    round(run["peak_rss_bytes"] / 2**20, 1),
                    round(run["ratio"], 3),
                ]
                for run in results["runs"]
            ],
        ),
    ]


if __name__ == "__main__":
    common.run_script(TraceMemoryConfig, run)
