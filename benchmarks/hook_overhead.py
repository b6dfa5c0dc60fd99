"""What does recording cost, and what does it cost the way it is done today?

    python benchmarks/hook_overhead.py --target checkpoints/target

Writes ``hook_overhead.json`` and ``hook_overhead.md``. Three ways of running the same batch, interleaved in random
order:

- ``plain``: the forward alone;
- ``recorded``: the forward inside a RoutingRecorder, and the copy of its rows to the host, as in a collection;
- ``router_logits``: ``output_router_logits=True``, then top-k of them, kept in memory.

Two batches, a text that is read and a step of generation, on the demo target and on the widened one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from ecospec.cli.loading import load_target
from ecospec.decoding.measurement import interleaved, measure_seconds
from ecospec.decoding.widening import COST_LEVELS, apply_cost_level_
from ecospec.eval.bootstrap import ratio_interval
from ecospec.trace_collection.engine import HostCopy
from ecospec.trace_collection.growing_cache import make_cache
from ecospec.trace_collection.hooks import RoutingRecorder

WAYS = ("plain", "recorded", "router_logits")
#: Asked of ``recorded`` over ``plain``.
BOUNDS = {"demo": 1.05, "widened": 1.02}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A batch on a target.

    Attributes:
        target: ``demo`` or ``widened``.
        batch: ``read`` (one forward without cache) or ``step`` (one token a sequence behind a context).
        sequences: Sequences of the batch.
        tokens: Tokens of each: of the text, or of the context.
        forwards: Forwards of one measurement.
        rounds: Measurements of each way.
    """

    target: str
    batch: str
    sequences: int
    tokens: int
    forwards: int
    rounds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookOverheadConfig:
    """Time and memory of recording."""

    target: Path = Path("checkpoints/target")
    """Folder of the target."""
    cases: tuple[Case, ...] = (
        Case("demo", "read", 16, 256, 1, 60),
        Case("demo", "step", 64, 128, 10, 60),
        Case("widened", "read", 4, 128, 1, 80),
        Case("widened", "step", 64, 128, 1, 60),
    )
    """What is measured; a first round warms up and is not counted."""
    kept_tokens: int = 32_768
    """Tokens of which each way keeps the experts where memory is measured; an eighth on the widened target."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of tokens and order."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""

    def __post_init__(self) -> None:
        """Validate the cases."""
        for case in self.cases:
            if case.target not in BOUNDS or case.batch not in {"read", "step"}:
                raise ValueError(
                    f"--cases must name target demo or widened and batch read or step, got {case.target!r} and "
                    f"{case.batch!r}"
                )


def run(config: HookOverheadConfig) -> None:
    """Measure times, then peak memory in fresh processes, and write the two files."""
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load, device=config.device)
    common.keep_freed_memory()
    times = []
    for name in dict.fromkeys(case.target for case in config.cases):
        model = load(config, name)
        for case in (case for case in config.cases if case.target == name):
            print(f"timing {case.batch} on the {name} target", flush=True)
            times.append(measure(model, case, config))
        del model
    memory = []
    for case in config.cases:
        if case.batch == "read":
            print(f"memory on the {case.target} target", flush=True)
            peaks = {way: common.in_fresh_process(peak_bytes, config, case, way) for way in WAYS}
            memory.append({"target": case.target, "kept_tokens": _kept(config, case), "peak_bytes": peaks})
    results = {"times": times, "memory": memory, "bounds": BOUNDS}
    common.write_json(
        config.out / "hook_overhead.json", common.result("hook_overhead", conditions, config, results)
    )
    parts = _page(config, times, memory)
    common.write_page(config.out / "hook_overhead.md", "What recording costs", conditions, parts)
    print("\n\n".join(parts))


def load(config: HookOverheadConfig, name: str) -> Any:
    """The demo target, widened on request."""
    disable_progress_bar()
    model = load_target(config.target, "float32" if config.device == "cpu" else "auto", config.device)
    if name == "widened":
        apply_cost_level_(model, COST_LEVELS["bare"])
    return model


class Batch:
    """One batch that can be run in each way, any number of times.

    Args:
        model: The target.
        case: What is run.
        seed: Seed of the tokens.
    """

    def __init__(self, model: Any, case: Case, seed: int) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.config.vocab_size, (case.sequences, case.tokens + 1), generator=generator)
        ids = ids.to(model.device)
        self._options: dict[str, Any] = {"input_ids": ids[:, :-1], "use_cache": False, "logits_to_keep": 1}
        self._past: int | None = None
        if case.batch == "step":
            cache = make_cache(model, case.tokens + 1)
            model(input_ids=ids[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
            self._options |= {"input_ids": ids[:, -1:], "cache": cache, "use_cache": True}
            self._past = case.tokens
        self._top_k = int(model.config.get_text_config().num_experts_per_tok)
        self.kept: list[Any] = []

    def forward(self, **more: Any) -> Any:
        """One forward; the cache is cut back to the context before it."""
        if self._past is not None and (extra := self._options["cache"].get_seq_length() - self._past):
            self._options["cache"].crop(-extra)
        return self._model(**self._options, **more)

    @contextlib.contextmanager
    def way(self, name: str, *, keep: bool = False) -> Iterator[Callable[[], None]]:
        """Yield a function that runs one forward in a way; ``keep`` holds on to the experts of every forward."""
        if name == "plain":
            yield self._plain
        elif name == "router_logits":
            yield functools.partial(self._with_logits, keep=keep)
        else:
            with RoutingRecorder(self._model) as recorder:
                yield functools.partial(self._recorded, recorder, keep=keep)

    def _plain(self) -> None:
        self.forward()

    def _recorded(self, recorder: RoutingRecorder, *, keep: bool) -> None:
        self.forward()
        self._keep(HostCopy(recorder.take()), keep=keep)

    def _with_logits(self, *, keep: bool) -> None:
        logits: tuple[Tensor, ...] = self.forward(output_router_logits=True).router_logits
        experts = torch.stack([layer.topk(self._top_k, dim=-1).indices for layer in logits], dim=1).cpu()
        self._keep(experts, keep=keep)

    def _keep(self, experts: object, *, keep: bool) -> None:
        if not keep:
            self.kept.clear()
        self.kept.append(experts)


@torch.inference_mode()
def measure(model: Any, case: Case, config: HookOverheadConfig) -> dict[str, Any]:
    """Seconds of a forward in each way, and the ratios to ``plain`` with intervals over rounds."""
    batch = Batch(model, case, config.seed)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for number, way in enumerate(interleaved(WAYS, case.rounds + 1, config.seed)):
        with batch.way(way) as once:

            def block(once: Callable[[], None] = once) -> None:
                for _ in range(case.forwards):
                    once()

            once()  # the first forward of a recorder checks its ids; the others get one too, that finds warm caches
            seconds = measure_seconds(block, torch.device(config.device))
        if number >= len(WAYS):
            samples[way].append(seconds / case.forwards)
    ratios = {way: ratio_interval(samples[way], samples["plain"]).to_dict() for way in WAYS[1:]}
    return {
        "case": dataclasses.asdict(case),
        "seconds": {way: sum(values) / len(values) for way, values in samples.items()},
        "ratio_to_plain": ratios,
        "bound": BOUNDS[case.target],
        "holds": ratios["recorded"]["mean"] <= BOUNDS[case.target],
    }


@torch.inference_mode()
def peak_bytes(config: HookOverheadConfig, case: Case, way: str) -> int:
    """Peak memory of this process (on a GPU: of the device) for one way that keeps the experts of ``kept_tokens``.

    The collector would have written them to disk by then; here both ways keep them, so that they can be compared.
    """
    torch.set_num_threads(config.threads)
    batch = Batch(load(config, case.target), case, config.seed)
    with batch.way(way, keep=True) as once:
        for _ in range(max(1, _kept(config, case) // (case.sequences * case.tokens))):
            once()
    device = torch.device(config.device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else common.peak_rss_bytes()


def _kept(config: HookOverheadConfig, case: Case) -> int:
    return config.kept_tokens // (1 if case.target == "demo" else 8)


def _page(config: HookOverheadConfig, times: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[str]:
    """Paragraphs and tables of the page."""
    setting = (
        f"Target: {config.target}, and the same widened as in `bare`. Milliseconds of one forward. `read`: a batch "
        "of random texts; `step`: one token a sequence behind a context. `recorded`: inside the recorder, rows "
        "copied to the host. `router_logits`: `output_router_logits=True`, then top-k. Ratios: summed times over "
        "those of `plain` in the same rounds, with 95 % intervals over rounds. The heap keeps what is freed: on a "
        "CPU, page faults else made single forwards of the widened target take 0.55 to 1.13 s."
    )
    return [
        setting,
        common.markdown_table(
            ["target", "batch", *(f"{way}, ms" for way in WAYS), *(f"{w} / plain" for w in WAYS[1:]), "asked for"],
            [
                [
                    entry["case"]["target"],
                    "{batch} {sequences} x {tokens}".format(**entry["case"]),
                    *(round(entry["seconds"][way] * 1e3, 2) for way in WAYS),
                    *(_interval(entry["ratio_to_plain"][way]) for way in WAYS[1:]),
                    f"<= {entry['bound']:.2f}: {'holds' if entry['holds'] else 'does not hold'}",
                ]
                for entry in times
            ],
        ),
        "Peak memory of a fresh process that reads texts and keeps the experts of all of them, MiB:",
        common.markdown_table(
            ["target", "tokens", *WAYS],
            [
                [
                    entry["target"],
                    entry["kept_tokens"],
                    *(round(entry["peak_bytes"][way] / 2**20, 1) for way in WAYS),
                ]
                for entry in memory
            ],
        ),
    ]


def _interval(ratio: dict[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['mean']:.3f}"
    return f"{ratio['mean']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


if __name__ == "__main__":
    common.run_script(HookOverheadConfig, run)
