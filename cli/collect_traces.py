"""``ecospec collect-traces``: record which experts a target uses, while it generates or reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.checks import require_threads
from ecospec.cli.device import require_device
from ecospec.cli.errors import terminable
from ecospec.cli.output import check_output
from ecospec.trace_collection.engines.choose import SERVER_TIMEOUT, EngineChoice, EngineName
from ecospec.trace_collection.manifest import TOKENS_PER_SHARD
from ecospec.trace_collection.plan import SKIPPED_NAME, CollectConfig

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.trace_collection.collect import CollectProgress

__all__ = ["CollectTracesConfig", "run", "show_progress"]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class CollectTracesConfig(CollectConfig):
    """Options of ``collect-traces``."""

    target: Path | None = None
    """Folder (or hub id) of the target; with --server, the name it offers the target under (default: its first)."""
    engine: EngineName = "hooks"
    """What runs the target: hooks (transformers, in this process), vllm or sglang; see docs/engines.md."""
    server: str | None = None
    """Address of a running vLLM or SGLang server, http://host:port; None: vllm loads --target in this process."""
    target_path: Path | None = None
    """Folder of the target's files, for fingerprint and tokenizer, where a server runs it; default: --target."""
    server_timeout: float = SERVER_TIMEOUT
    """Seconds to wait for one answer of the server."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM in this process, as JSON: '{"tensor_parallel_size": 8}'."""
    prompts: str = ""
    """stdlib:<split>[/<dataset>]; a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, or a folder of them;
    hf:<name or folder>[@config]:<split> of datasets; preset:<name>[=<local copy>] of the paper (gsm8k, humaneval,
    mmstar, aime25, math500, amc, mt_bench). #column after a file, folder or hf: source names its column. Several
    are separated by commas; docs/prompts.md has examples."""
    traces: Path | None = None
    """Mode replay: the trace store whose sequences are read again."""
    low_share: float | None = None
    """Mode replay: flag layers with a smaller share of identical sets. None: 0.99 in float32 or wider, else 0.9."""
    out: Path
    """Folder of the trace store; mode replay: of replay.json and the re-run's store."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus, for stdlib: prompts."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..., or auto (spread over all GPUs)."""
    dtype: str = "auto"
    """Arithmetic of the target: auto (float32 on a CPU, else as stored), float32, bfloat16, float16 or float64."""
    experts_implementation: str | None = None
    """How transformers runs the experts: eager, grouped_mm or batched_mm; None leaves its choice."""
    tokens_per_shard: int = TOKENS_PER_SHARD
    """Tokens of a shard. A killed run loses the shards not yet written: one; two on a GPU or other engine."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    resume: bool = False
    """Go on with the store in --out."""

    def __post_init__(self) -> None:
        """Validate the options of the command, then those of the collection."""
        super().__post_init__()
        self.engine_choice()
        self._check_source()
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        require_threads(self.threads)
        if self.tokens_per_shard < 1:
            raise ValueError(f"--tokens-per-shard must be at least 1, got {self.tokens_per_shard}")
        if self.low_share is not None and not 0 <= self.low_share <= 1:
            raise ValueError(f"--low-share must be a share from 0 to 1, got {self.low_share}")

    def engine_choice(self) -> EngineChoice:
        """The flags that choose and reach the engine, checked against each other."""
        if self.engine != "hooks" and self.experts_implementation is not None:
            raise ValueError(f"--experts-implementation needs --engine hooks, got --engine {self.engine}")
        return EngineChoice(
            engine=self.engine,
            target=self.target,
            target_path=self.target_path,
            server=self.server,
            server_timeout=self.server_timeout,
            options=self.engine_options,
            weights=self.weights,
        )

    def _check_source(self) -> None:
        """Refuse a mode without its source of sequences, or with that of another mode."""
        replays = self.mode == "replay"
        if not replays and not self.prompts:
            raise ValueError(f"--prompts is needed in mode {self.mode}; name a source, e.g. stdlib:report")
        if replays and self.traces is None:
            raise ValueError("--traces is needed in mode replay; name the trace store to read again")
        for name, given in (("prompts", replays and bool(self.prompts)), ("traces", not replays and self.traces)):
            if given:
                raise ValueError(f"--{name} has no meaning in mode {self.mode}; leave it out")
        if not replays and self.low_share is not None:
            raise ValueError(f"--low-share has no meaning in mode {self.mode}; leave it out")


def run(config: CollectTracesConfig) -> None:
    """Collect or replay traces, showing a progress bar with tokens per second."""
    require_device(config.device, auto=True)
    check_output(config.out, resume=config.resume)
    import torch  # noqa: PLC0415 - keeps `--help` fast

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with terminable():
        if config.mode == "replay":
            from ecospec.cli.replay_traces import run_replay  # noqa: PLC0415

            run_replay(config)
        else:
            _run_collection(config)


def _run_collection(config: CollectTracesConfig) -> None:
    """Collect from prompts, and say what was left out."""
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.collect_target import prepare_target  # noqa: PLC0415
    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.cli.tables import show_line  # noqa: PLC0415
    from ecospec.trace_collection.collect import run_plan  # noqa: PLC0415
    from ecospec.trace_collection.plan import make_plan  # noqa: PLC0415
    from ecospec.trace_collection.prompts import iter_prompts  # noqa: PLC0415

    prompts = iter_prompts(config.prompts, groups=config.groups)
    target = prepare_target(config)
    # Planned before the target is loaded, which may take minutes: wrong prompts show at once.
    plan = make_plan(target.tokenizer, prompts, config, context=target.context)
    with target.open() as opened, show_progress(Console(stderr=True)) as progress:
        store = run_plan(
            opened.engine,
            plan,
            config.out,
            spec=target.spec,
            resume=config.resume,
            options={"prompts": config.prompts, **opened.options},
            provenance={**provenance(), **opened.about},
            tokens_per_shard=config.tokens_per_shard,
            progress=progress,
        )
    console = Console()
    show_line(console, f"{store.num_rows:,} sequences, {store.num_tokens:,} tokens with experts in {config.out}")
    if skipped := store.manifest.collection["skipped"]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
        show_line(console, f"skipped: {counts}; listed in {config.out / SKIPPED_NAME}")


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[Callable[[CollectProgress], None]]:
    """Show a progress bar while the context lasts; the value is called with the state after each batch."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("collect"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task("collect", total=None, tokens=0, speed=0.0)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:

        def show(state: CollectProgress) -> None:
            if not bar.live.is_started:  # the first report follows planning: no empty bar above an error
                stack.enter_context(bar)
            speed = state.tokens / max(time.monotonic() - start, 1e-9)
            bar.update(task, completed=state.sequences, total=state.total, tokens=state.tokens, speed=speed)

        yield show
