"""``ecospec collect-traces``: record which experts a target uses, while it generates or reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.device import require_device
from ecospec.cli.output import prepare_output
from ecospec.trace_collection.plan import CollectConfig

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.trace_collection.collect import CollectProgress

__all__ = ["CollectTracesConfig", "run"]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class CollectTracesConfig(CollectConfig):
    """Options of ``collect-traces``."""

    target: Path
    """Folder (or hub id) of the target."""
    prompts: str
    """stdlib:<split>, stdlib:<split>/<dataset>, or a .jsonl file; several separated by commas."""
    out: Path
    """Folder of the trace store."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus, for stdlib: prompts."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..., or auto (spread over all GPUs)."""
    dtype: str = "auto"
    """Arithmetic of the target: auto (float32 on a CPU, else as stored), float32, bfloat16, float16 or float64."""
    experts_implementation: str | None = None
    """How transformers runs the experts: eager, grouped_mm or batched_mm; None leaves its choice."""
    tokens_per_shard: int = 131_072
    """Tokens after which a shard is finished; a killed run loses at most one shard."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    resume: bool = False
    """Go on with the store in --out."""

    def __post_init__(self) -> None:
        """Validate the options of the command, then those of the collection."""
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")
        if self.tokens_per_shard < 1:
            raise ValueError(f"--tokens-per-shard must be at least 1, got {self.tokens_per_shard}")


def run(config: CollectTracesConfig) -> None:
    """Collect traces, showing a progress bar with tokens per second."""
    require_device(config.device, auto=True)
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.trace_collection.collect import collect  # noqa: PLC0415
    from ecospec.trace_collection.prompts import load_prompts  # noqa: PLC0415

    prompts = load_prompts(config.prompts, groups=config.groups)
    spec = routing_spec_of(config.target)
    prepare_output(config.out, resume=config.resume)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, tokenizer = _load(config)
    console = Console(stderr=True)
    with _progress(console) as progress:
        store = collect(
            model,
            tokenizer,
            prompts,
            config,
            config.out,
            spec=spec,
            resume=config.resume,
            options={
                "prompts": config.prompts,
                "dtype": str(model.dtype).removeprefix("torch."),
                "experts_implementation": config.experts_implementation,
            },
            provenance=provenance(),
            tokens_per_shard=config.tokens_per_shard,
            progress=progress,
        )
    skipped = "".join(f", {count} {reason}" for reason, count in store.manifest.collection["skipped"].items())
    Console().print(
        f"{store.num_rows:,} sequences, {store.num_tokens:,} tokens with experts in {config.out}"
        f"{' (skipped' + skipped[1:] + ')' if skipped else ''}",
        soft_wrap=True,
    )


def _load(config: CollectTracesConfig) -> tuple[Any, Any]:
    """The target in eval mode on its device, and its tokenizer."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - keeps `--help` fast
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    from ecospec.cli.loading import load_target  # noqa: PLC0415

    disable_progress_bar()  # ours shows the work
    dtype = "float32" if config.dtype == "auto" and config.device == "cpu" else config.dtype
    model = load_target(config.target, dtype, config.device)
    if config.experts_implementation is not None:
        model.set_experts_implementation(config.experts_implementation)
    return model, AutoTokenizer.from_pretrained(config.target)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[CollectProgress], None]]:
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
