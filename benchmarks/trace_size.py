"""How many bytes does a traced token take, against the entropy of its sets of experts, and how fast is it written?

    python benchmarks/trace_size.py --target checkpoints/target

Writes ``trace_size.json`` and ``trace_size.md``. Reference on the demo traces is the zero-order entropy of the
sets: per MoE layer the entropy of the distribution of whole K-sets, summed over the layers. Two estimates are
given, the plug-in one (the smaller, which the bound is held against) and that of Chao and Shen; where they are
apart, there are too few tokens. Reference on uniform synthetic routing is L * log2 C(E, K), which no code can beat.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.compression import AUTO, resolve_compression
from ecospec.trace_collection.inspection import inspect_store
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.routing_statistics import set_entropy
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter

CODECS = ("zstd-3", "zstd-9", "zstd-12", "zstd-16", "zstd-18", "brotli-5", "brotli-9", "brotli-10", "brotli-11")
#: Codecs for the synthetic traces: higher levels look for repetition, of which there is none.
UNIFORM_CODECS = ("zstd-3", "zstd-9", "zstd-16", "brotli-5", "brotli-9", "brotli-10")
DEMO_BOUND, UNIFORM_BOUND = 1.15, 1.35
_EXPERTS = "experts.list.element.list.element"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSizeConfig:
    """Bytes per token of a trace store."""

    target: Path = Path("checkpoints/target")
    """Folder of the target that demo traces are collected from."""
    traces: Path | None = None
    """Store to measure on; None collects one into --work, or uses the one there."""
    work: Path = Path("runs/benchmarks/trace_size")
    """Folder for the collected traces, kept for the next run."""
    sequences: int = 450
    """Sequences of up to 512 tokens to collect."""
    uniform_tokens: int = 8192
    """Tokens of synthetic traces."""
    uniform_layers: int = 58
    """MoE layers of synthetic traces; 58 is DeepSeek-V3's number."""
    repeats: int = 3
    """Writes of each store; the table shows the median."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of the synthetic traces."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""


def run(config: TraceSizeConfig) -> None:
    """Measure and write the two files."""
    traces = config.traces or demo_traces(config.target, config.work, config.sequences, config.threads)
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load)
    store = TraceStore(traces)
    rows = [dataclasses.replace(row, weights=None) for row in store.iter_sequences()]
    experts = np.concatenate([row.experts for row in rows])
    layers = [set_entropy(experts[:, layer], store.spec.num_experts) for layer in range(store.spec.num_layers)]
    plug_in, chao_shen = (sum(layer[place] for layer in layers) / 8 for place in (0, 1))
    print(f"{len(experts):,} tokens, {plug_in:.2f} bytes of set entropy each", flush=True)
    demo = [measure(rows, store.spec, codec, plug_in, config.repeats) for codec in CODECS]
    spec, synthetic = uniform_rows(config)
    chance = spec.num_layers * math.log2(math.comb(spec.num_experts, spec.top_k)) / 8
    uniform = [measure(synthetic, spec, codec, chance, config.repeats) for codec in UNIFORM_CODECS]
    default = {
        name: resolve_compression(AUTO, each.num_layers * each.top_k)
        for name, each in (("demo", store.spec), ("uniform", spec))
    }
    results: dict[str, Any] = {
        "tokens": len(experts),
        "traces": str(traces),
        "default": default,
        "entropy_bytes": {
            "plug_in": plug_in,
            "chao_shen": chao_shen,
            "plug_in_bits_by_layer": [h for h, _ in layers],
        },
        "demo": demo,
        "layouts": layouts(rows, store.spec, plug_in),
        "uniform_reference_bytes": chance,
        "uniform": uniform,
        "bounds": {"demo": DEMO_BOUND, "uniform": UNIFORM_BOUND},
        "holds": {
            name: next(row["ratio"] for row in table if row["codec"] == default[name]) <= bound
            for name, table, bound in (("demo", demo, DEMO_BOUND), ("uniform", uniform, UNIFORM_BOUND))
        },
    }
    common.write_json(config.out / "trace_size.json", common.result("trace_size", conditions, config, results))
    parts = page(results, store.spec, spec)
    common.write_page(config.out / "trace_size.md", "Size of trace stores", conditions, parts)
    print("\n\n".join(parts))


def demo_traces(target: Path, work: Path, sequences: int, threads: int) -> Path:
    """Collect teacher-forced traces of the demo corpus, or go on with what is there."""
    from ecospec.cli.collect_traces import CollectTracesConfig  # noqa: PLC0415 - only where nothing is given
    from ecospec.cli.collect_traces import run as collect  # noqa: PLC0415

    out = work / f"traces-{sequences}"
    collect(
        CollectTracesConfig(
            target=target,
            prompts="stdlib:predictor_train",
            mode="teacher_forced",
            max_length=512,
            batch_size=16,
            limit=sequences,
            threads=threads,
            out=out,
            resume=out.exists(),
        )
    )
    return out


def measure(
    rows: Sequence[RoutingTrace], spec: RoutingSpec, codec: str, reference: float, repeats: int
) -> dict[str, Any]:
    """Write rows with a codec, read them back, and count bytes; ``reference`` is in bytes per token."""
    tokens = sum(row.num_processed for row in rows)
    seconds, reading = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            out = Path(folder) / str(number)
            start = time.perf_counter()
            with TraceStoreWriter(out, spec, compression=codec) as writer:
                for first in range(0, len(rows), 16):
                    writer.append(rows[first : first + 16])
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            assert sum(row.num_processed for row in TraceStore(out).iter_sequences()) == tokens
            reading.append(time.perf_counter() - start)
        info = inspect_store(out)
    return {
        "codec": codec,
        "bytes_per_token": info.bytes_per_token,
        "ratio": info.bytes_per_token / reference,
        "experts_bytes_per_token": info.bytes_by_column["experts"],
        "experts_ratio": info.bytes_by_column["experts"] / reference,
        "write_tokens_per_second": tokens / statistics.median(seconds),
        "read_tokens_per_second": tokens / statistics.median(reading),
    }


def layouts(rows: Sequence[RoutingTrace], spec: RoutingSpec, reference: float) -> list[dict[str, Any]]:
    """Experts column in other encodings, pages and row groups, written with zstd-9; bytes per token."""
    experts = np.concatenate([row.experts for row in rows]).reshape(-1)
    width = spec.num_layers * spec.top_k
    offsets = np.cumsum([0, *(row.num_processed for row in rows)], dtype=np.int32)
    values = pa.FixedSizeListArray.from_arrays(pa.array(experts), width)
    table = pa.table({"experts": pa.ListArray.from_arrays(pa.array(offsets), values)})
    encodings: dict[str, dict[str, Any]] = {
        "dictionary": {"use_dictionary": True},
        "plain": {"use_dictionary": False},
        "delta": {"use_dictionary": False, "column_encoding": {_EXPERTS: "DELTA_BINARY_PACKED"}},
        "byte stream split": {"use_dictionary": False, "column_encoding": {_EXPERTS: "BYTE_STREAM_SPLIT"}},
    }
    found = []
    for name, encoding in encodings.items():
        for where, group, page_bytes in (
            ("groups of 16,384 tokens", 16_384, 2**28),
            ("one group, pages of 1 MiB", len(experts), 2**20),
            ("one group, one page", len(experts), 2**28),
        ):
            buffer = pa.BufferOutputStream()
            rows_per_group = max(1, round(table.num_rows * min(1.0, group * width / len(experts))))
            pq.write_table(
                table,
                buffer,
                row_group_size=rows_per_group,
                data_page_size=page_bytes,
                compression="zstd",
                compression_level=9,
                **encoding,
            )
            size = buffer.getvalue().size * width / len(experts)
            found.append({"encoding": name, "pages": where, "bytes_per_token": size, "ratio": size / reference})
    return found


def uniform_rows(config: TraceSizeConfig) -> tuple[RoutingSpec, list[RoutingTrace]]:
    """Sequences of 512 tokens whose sets are drawn uniformly, E = 256, K = 8; tokens uniform in 129,280."""
    layers, size = config.uniform_layers, 512
    spec = RoutingSpec(layers, tuple(range(layers)), 256, 8, 129_280, "0" * 64, "uniform", "0" * 64)
    rng = np.random.default_rng(config.seed)
    rows = []
    for number in range(max(1, config.uniform_tokens // size)):
        draws = rng.random((size, layers, 256), dtype=np.float32)
        rows.append(
            RoutingTrace(
                sequence_id=rng.bytes(16).hex(),
                group_id=str(number),
                dataset="uniform",
                category="",
                token_ids=rng.integers(0, spec.vocab_size, size).astype(np.int32),
                prompt_length=size,
                origin="teacher_forced",
                experts=np.sort(np.argpartition(draws, 8)[..., :8]).astype(np.uint8),
                weights=None,
                finish_reason="text",
            )
        )
    return spec, rows


def page(results: dict[str, Any], demo: RoutingSpec, uniform: RoutingSpec) -> list[str]:
    """Paragraphs and tables of the page."""
    entropy, held = results["entropy_bytes"], {True: "holds", False: "missed"}
    setting = (
        f"{results['tokens']:,} teacher-forced tokens of the demo target ({demo.num_layers} MoE layers, "
        f"{demo.top_k} of {demo.num_experts} experts). Zero-order entropy of the sets: {entropy['plug_in']:.2f} "
        f"bytes per token (plug-in), {entropy['chao_shen']:.2f} (Chao-Shen). Ratios are to the plug-in estimate. "
        "`store` counts every byte of the shards, token ids and texts included; `experts` that column alone. "
        f"Speeds include checking rows, checksums and fsync."
    )
    demo_bound = (
        f"Bound: store at most {DEMO_BOUND} times the entropy with the default codec, "
        f"{results['default']['demo']}: {held[results['holds']['demo']]}."
    )
    pages = (
        "What a codec finds repeated lies within one page. Stores use byte stream split and one page per row "
        "group; `one group` here holds all tokens of the table, a store's row groups are shorter, to bound its "
        "memory."
    )
    uniform_bound = (
        f"{uniform.num_layers} MoE layers, {uniform.top_k} of {uniform.num_experts} experts; log2 C(E, K) is "
        f"{results['uniform_reference_bytes']:.1f} bytes per token. Bound: {UNIFORM_BOUND} with the default codec "
        f"for that many ids a token, {results['default']['uniform']}: {held[results['holds']['uniform']]}."
    )
    layout_rows = [
        [row["encoding"], row["pages"], round(row["bytes_per_token"], 2), round(row["ratio"], 3)]
        for row in results["layouts"]
    ]
    return [
        setting,
        "## Demo traces by codec",
        demo_bound,
        _codec_table(results["demo"]),
        "## Experts column by Parquet encoding and page, zstd-9",
        pages,
        common.markdown_table(["encoding", "pages", "bytes per token", "ratio"], layout_rows),
        "## Uniform synthetic traces by codec",
        uniform_bound,
        _codec_table(results["uniform"]),
    ]


def _codec_table(rows: list[dict[str, Any]]) -> str:
    return common.markdown_table(
        [
            "codec",
            "store, bytes per token",
            "ratio",
            "experts, bytes per token",
            "ratio",
            "written, tokens/s",
            "read, tokens/s",
        ],
        [
            [
                row["codec"],
                round(row["bytes_per_token"], 2),
                round(row["ratio"], 3),
                round(row["experts_bytes_per_token"], 2),
                round(row["experts_ratio"], 3),
                int(round(row["write_tokens_per_second"], -2)),
                int(round(row["read_tokens_per_second"], -2)),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    common.run_script(TraceSizeConfig, run)
