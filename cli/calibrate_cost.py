"""``ecospec calibrate-cost``: measure what a step of the target costs on this machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.checks import (
    require_above,
    require_at_least,
    require_drafter,
    require_known,
    require_new_file,
    require_power_of_two,
)
from ecospec.cli.device import require_device

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from ecospec.decoding.cost_model import CostModel
    from ecospec.decoding.target import TargetModel
    from ecospec.decoding.widening import CostLevel
    from ecospec.decoding.workload import Workload
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.trace_collection.prompts import Prompt

__all__ = ["CalibrateCostConfig", "load_target_and_prompts", "run"]

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class CalibrateCostConfig:
    """Options of ``calibrate-cost``."""

    target: Path
    """Folder (or hub id) of the target."""
    out: Path
    """File of the cost table (JSON); it must not exist."""
    level: str = "bare"
    """Cost level: bare (experts widened) or ballast (the same, plus weights read at every step)."""
    widening_factor: int | None = None
    """Factor by which experts are widened, a power of two; None takes the level's. Use 1 for a full-size target."""
    ballast_bytes: int | None = None
    """Bytes of ballast per MoE layer; None takes the level's."""
    ballast_ratio: float | None = None
    """Size the ballast here, so that a step of 4 tokens takes this many times a step of one; None: do not."""
    step_overhead: float | None = None
    """Seconds that a step spends besides verifying when the ballast is sized; None takes the measured drafting."""
    drafter: Path | None = None
    """Folder of the drafter whose trees are verified; None verifies chains of the prompts' own next tokens."""
    prompts: str = "stdlib:tuning"
    """Text that is processed: stdlib:<split>, a file or folder, hf: or preset: (docs/prompts.md)."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus, for stdlib: prompts."""
    contexts: int = 8
    """Number of prompts that the mean curve is measured on."""
    context_length: int = 128
    """Tokens in the cache when a step is measured."""
    max_tokens: int = 11
    """Largest number of tokens of a step; 11 is a whole tree of 3 drafts x top-2."""
    points_per_row: int = 5
    """Numbers of unique experts measured for each number of tokens."""
    repeats: int = 7
    """Measurements of each cell of the table; the median counts."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    dtype: str = "float32"
    """Arithmetic of the target: float32, bfloat16, float16 or float64."""
    seed: int = 0
    """Seed of the choice of prompts, the forced routing and the order of measurements."""
    threads: int = 1
    """CPU threads; one makes timings repeatable."""
    allow_load: bool = False
    """Measure although other work runs (load average above 0.3); the load is recorded."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names the flag.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        require_at_least(self, 1, "contexts", "context_length", "threads", "max_tokens", "repeats")
        require_at_least(self, 2, "points_per_row")
        require_at_least(self, 0, "ballast_bytes")
        require_power_of_two("widening_factor", self.widening_factor)
        from ecospec.decoding.widening import COST_LEVELS  # noqa: PLC0415 - keeps `--help` fast

        require_known("level", [self.level], COST_LEVELS)
        if self.ballast_ratio is not None and (self.level != "ballast" or self.ballast_bytes is not None):
            raise ValueError("--ballast-ratio sizes the ballast: use --level ballast and no --ballast-bytes")
        require_above(self, 1, "ballast_ratio")
        if self.step_overhead is not None and not 0 <= self.step_overhead < math.inf:
            raise ValueError(f"--step-overhead must not be negative and must be finite, got {self.step_overhead}")


def run(config: CalibrateCostConfig) -> None:
    """Measure, write the table, and show it."""
    require_device(config.device)
    require_new_file(config.out)
    if config.drafter is not None:
        require_drafter(config.drafter)
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.decoding.measurement import pin_threads, require_quiet  # noqa: PLC0415
    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.trace_collection.prompts import load_prompts  # noqa: PLC0415

    spec = routing_spec_of(config.target)
    prompts = load_prompts(config.prompts, groups=config.groups)
    require_quiet(allow_load=config.allow_load)
    pin_threads(config.threads)
    model = _measure(config, spec, prompts, Console(stderr=True))
    model.save(config.out)
    _show(model, Console())
    Console().print(f"written to {config.out}", soft_wrap=True)


def _measure(config: CalibrateCostConfig, spec: RoutingSpec, read: list[Prompt], console: Console) -> CostModel:
    from ecospec.cli.provenance import provenance  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.decoding.calibration import CalibrationConfig, calibrate, suggest_ballast  # noqa: PLC0415
    from ecospec.decoding.target import TargetModel  # noqa: PLC0415
    from ecospec.decoding.widening import add_ballast_, apply_cost_level_  # noqa: PLC0415

    settings = CalibrationConfig(config.max_tokens, config.points_per_row, config.repeats, seed=config.seed)
    level = _level(config)
    prompts, causal = load_target_and_prompts(config, read)
    start = replace(level, ballast_bytes_per_layer=0) if config.ballast_ratio else level
    memory = apply_cost_level_(causal, start).widening.memory
    console.print(f"widening took {memory.extra_bytes / 2**20:,.0f} MiB", soft_wrap=True)
    target = TargetModel(causal, spec)
    workload = _workload(config, target, prompts)
    if config.ballast_ratio:
        overhead = workload.draft_seconds if config.step_overhead is None else config.step_overhead
        found = suggest_ballast(target, workload, target_ratio=config.ballast_ratio, overhead_seconds=overhead)
        console.print(
            f"ballast: {found.bytes_per_layer / 2**20:.0f} MiB per layer, ratio {found.bare_ratio:.2f} without, "
            f"{found.ratio:.2f} with it (wanted {found.target_ratio:.2f}); drafting {overhead * 1e3:.1f} ms",
            soft_wrap=True,
        )
        level = replace(level, ballast_bytes_per_layer=found.bytes_per_layer)
        if found.bytes_per_layer:
            add_ballast_(causal, found.bytes_per_layer)
    with _progress(console) as progress:
        return calibrate(
            target,
            spec,
            level,
            workload,
            settings,
            provenance=provenance(),
            ballast_target_ratio=config.ballast_ratio,
            progress=progress,
        )


def _level(config: CalibrateCostConfig) -> CostLevel:
    from ecospec.decoding.widening import cost_level  # noqa: PLC0415 - keeps `--help` fast

    level = cost_level(config.level)
    if config.widening_factor is not None:
        level = replace(level, widening_factor=config.widening_factor)
    if config.ballast_bytes is not None:
        level = replace(level, ballast_bytes_per_layer=config.ballast_bytes)
    return level


def load_target_and_prompts(
    config: CalibrateCostConfig, prompts: list[Prompt] | None = None
) -> tuple[list[Tensor], Any]:
    """Token ids to measure on, and the target in eval mode; prompts are read when they are not given."""
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from transformers import AutoTokenizer  # noqa: PLC0415

    from ecospec.cli.loading import load_target  # noqa: PLC0415
    from ecospec.trace_collection.prompts import leading_ids, load_prompts, prompt_ids  # noqa: PLC0415

    if prompts is None:
        prompts = load_prompts(config.prompts, groups=config.groups)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    length = config.context_length + config.max_tokens
    source = random.Random(config.seed)
    chosen: list[Tensor] = []
    for prompt in source.sample(prompts, len(prompts)):
        if len(chosen) == config.contexts:
            break
        ids = prompt_ids(prompt, tokenizer, generate=True)
        lead = leading_ids(tokenizer) if prompt.document else []
        body = length - len(lead)
        if len(ids) >= body:
            begin = source.randrange(len(ids) - body + 1) if prompt.document else 0
            chosen.append(torch.tensor([*lead, *ids[begin : begin + body]], device=config.device))
    if not chosen:
        raise ValueError(
            f"no prompt of {config.prompts} has {length} tokens; choose others, or lower --context-length"
        )
    return chosen, load_target(config.target, config.dtype, config.device)


def _workload(config: CalibrateCostConfig, target: TargetModel, prompts: list[Tensor]) -> Workload:
    from ecospec.decoding.workload import drafted_workload, text_workload  # noqa: PLC0415 - keeps `--help` fast

    if config.drafter is None:
        return text_workload(prompts, context_length=config.context_length, nodes=config.max_tokens)
    import torch  # noqa: PLC0415

    from ecospec.decoding.drafters.eagle3_drafter import Eagle3Drafter  # noqa: PLC0415

    identity = None
    if target.spec is not None:
        identity = {name: getattr(target.spec, name) for name in ("tokenizer_fingerprint", "target_fingerprint")}
    dtype = getattr(torch, config.dtype)
    drafter = Eagle3Drafter.from_pretrained(config.drafter, target.model, identity=identity, dtype=dtype)
    return drafted_workload(target, drafter, prompts, context_length=config.context_length)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import Progress  # noqa: PLC0415 - keeps `--help` fast

    with Progress(console=console) as bar:
        task = bar.add_task("measure", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(model: CostModel, console: Console) -> None:
    """Show the table: one row per number of tokens, its times from fewest to most unique experts."""
    from rich.table import Table  # noqa: PLC0415 - keeps `--help` fast

    table = Table(title=f"step time in ms, level {model.level}, {model.hardware}, {model.threads} thread(s)")
    headers = ("tokens", "ms at (unique experts per layer), routing forced", "own routing: unique", "ms", "x one")
    for header in headers:
        table.add_column(header)
    for row in model.table:
        cells = ("  ".join(f"{s * 1e3:.1f} ({u:.0f})" for u, s in zip(row.unique, row.seconds, strict=True)),)
        mean = model.mean_curve[row.tokens - 1]
        table.add_row(
            str(row.tokens),
            *cells,
            f"{model.mean_unique[row.tokens - 1]:.1f}",
            f"{mean * 1e3:.1f}",
            f"{mean / model.mean_curve[0]:.2f}",
        )
    console.print(table)
