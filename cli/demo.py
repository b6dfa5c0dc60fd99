"""``ecospec demo``: the whole pipeline on the shipped checkpoints, in about eight minutes on two cores.

On disk::

    OUT/
      traces-train/  traces-report/  traces of the predictor_train and of the report groups
      training/      checkpoints and logs of the demo's own predictor
      predictor/     its bundle
      overlap/       report.json, report.md, report.html
      cost/          bare.json, ballast.json
      decoding/      report.json, report.md, report.html
      report.html    both reports on one page
      summary.json   the essential numbers (ecospec.eval.demo_page)
      stages/        which stage is done, with what
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.checks import flag, require_above, require_at_least, require_power_of_two
from ecospec.cli.output import check_output, prepare_output

if TYPE_CHECKING:
    from ecospec.cli.stages import Stage

__all__ = ["DemoConfig", "run"]


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Options of ``demo``."""

    out: Path = Path("runs/demo")
    """Folder of the run."""
    checkpoints: Path = Path("checkpoints")
    """Folder with target, drafter, predictor, tables and groups.json; without tables, the demo fits some itself."""
    train_prompts: str = "stdlib:predictor_train"
    """Prompts whose continuations the demo's own predictor learns from."""
    report_prompts: str = "stdlib:report"
    """Prompts that are reported on."""
    tuning_prompts: str = "stdlib:tuning"
    """Prompts that ε' and the cost tables are measured on."""
    train_sequences: int = 768
    """Sequences for training, of up to 64 + 192 tokens."""
    report_sequences: int = 256
    """Sequences to report on."""
    new_tokens: int = 192
    """Tokens generated per traced sequence."""
    train_minutes: float = 2.0
    """Wall-clock limit of the training."""
    decode_prompts: int = 16
    """Prompts of the decoding benchmark, one per group."""
    decode_minutes: float = 2.5
    """No further prompts are decoded after this time."""
    decode_tokens: int = 32
    """Tokens generated per prompt and policy."""
    tuning_number: int = 4
    """Prompts on which ε' is chosen."""
    cost_repeats: int = 2
    """Measurements of each cell of a cost table."""
    widening_factor: int | None = None
    """Factor by which experts are widened for timing; None takes the cost levels' own."""
    ballast_bytes: int | None = None
    """Bytes of ballast per MoE layer at level ballast; None takes the level's own."""
    seed: int = 0
    """Seed of everything."""
    threads: int | None = None
    """CPU threads of collecting and training; None leaves torch's choice. Timing always uses one."""
    resume: bool = False
    """Go on in --out: finished stages are reused, an interrupted one goes on."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names the flag.
        """
        require_at_least(self, 1, "train_sequences", "report_sequences", "new_tokens", "decode_prompts")
        require_at_least(self, 1, "tuning_number", "cost_repeats", "threads")
        require_at_least(self, 2, "decode_tokens")
        require_at_least(self, 0, "ballast_bytes", "seed")
        require_above(self, 0, "train_minutes", "decode_minutes")
        require_power_of_two("widening_factor", self.widening_factor)

    @property
    def target(self) -> Path:
        """The shipped target."""
        return self.checkpoints / "target"

    @property
    def groups(self) -> Path:
        """The shipped manifest of groups."""
        return self.checkpoints / "groups.json"

    @property
    def tables(self) -> Path | None:
        """The shipped tables, fitted on the shipped predictor's training traces; None where there are none."""
        folder = self.checkpoints / "tables"
        return folder if folder.is_dir() else None


def run(config: DemoConfig) -> None:
    """Run (or reuse) every stage, write page and summary, and show one table."""
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.stages import StageRunner  # noqa: PLC0415
    from ecospec.cli.tables import show_table  # noqa: PLC0415
    from ecospec.eval.demo_page import result_table, write_demo  # noqa: PLC0415
    from ecospec.eval.report_files import read_report  # noqa: PLC0415

    for path in (config.checkpoints / name for name in ("target", "drafter", "predictor", "groups.json")):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; name the demo checkpoints' folder with --checkpoints")
    check_output(config.out, resume=config.resume)
    _require_prompts(config)
    prepare_output(config.out, resume=config.resume)
    console = Console()
    runner = StageRunner(config.out, lambda text: console.print(f"[bold]{text}[/bold]", soft_wrap=True))
    runner.run(stages(config))
    overlap = read_report(config.out / "overlap" / "report.json", "overlap")
    decoding = read_report(config.out / "decoding" / "report.json", "decoding")
    write_demo(overlap, decoding, config.out)
    show_table(console, result_table(overlap, decoding))
    console.print(f"{config.out / 'report.html'}, {config.out / 'summary.json'}", soft_wrap=True)


def _require_prompts(config: DemoConfig) -> None:
    """Read the prompts of every stage, so that a wrong name stops the run before its first one."""
    from ecospec.trace_collection.prompts import load_prompts  # noqa: PLC0415 - keeps `--help` fast

    for name in ("train_prompts", "report_prompts", "tuning_prompts"):
        try:
            load_prompts(getattr(config, name), groups=config.groups)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{flag(name)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{flag(name)}: {error}") from error


def stages(config: DemoConfig) -> list[Stage]:
    """The stages of a demo, in order.

    Args:
        config: The options.
    """
    from ecospec.cli.stages import Stage  # noqa: PLC0415 - keeps `--help` fast

    out, shared = config.out, [config.target, config.groups]
    train = _collect_options(config, config.train_prompts, config.train_sequences)
    report = _collect_options(config, config.report_prompts, config.report_sequences)
    training = {"max_minutes": config.train_minutes, "context_length": 256, "max_epochs": 40, "seed": config.seed}
    cost = {"repeats": config.cost_repeats, "prompts": config.tuning_prompts, "seed": config.seed}
    cost |= {"max_tokens": 4, "contexts": 6, "points_per_row": 4, "widening_factor": config.widening_factor}
    cost |= {"ballast_bytes": config.ballast_bytes}
    bench = _bench_options(config)
    heads = [*shared, config.checkpoints / "drafter"]
    return [
        Stage(
            "traces-train",
            "collect routing traces to learn from",
            train,
            partial(_collect, config, train, out / "traces-train"),
            out / "traces-train",
            shared,
            resumable=True,
        ),
        Stage(
            "traces-report",
            "collect routing traces to report on",
            report,
            partial(_collect, config, report, out / "traces-report"),
            out / "traces-report",
            shared,
            resumable=True,
        ),
        Stage(
            "training",
            f"train a predictor, at most {config.train_minutes:g} minutes",
            training,
            partial(_train, config, training),
            out / "training",
            [config.target],
            ["traces-train"],
            resumable=True,
        ),
        Stage(
            "predictor", "export it", {}, partial(_export, config), out / "predictor", [config.target], ["training"]
        ),
        Stage(
            "overlap",
            "report top-K overlap",
            {},
            partial(_overlap, config),
            out / "overlap",
            [config.target, config.checkpoints / "predictor", *([] if config.tables is None else [config.tables])],
            ["traces-train", "traces-report", "predictor"],
        ),
        Stage(
            "cost", "measure what verification costs here", cost, partial(_cost, config, cost), out / "cost", heads
        ),
        Stage(
            "decoding",
            f"decode with every policy, at most {config.decode_minutes:g} minutes of new prompts",
            bench,
            partial(_decode, config, bench),
            out / "decoding",
            [*heads, config.checkpoints / "predictor"],
            ["cost"],
        ),
    ]


def _collect_options(config: DemoConfig, prompts: str, sequences: int) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "limit": sequences,
        "max_new_tokens": config.new_tokens,
        "max_prompt_tokens": 64,
        "windows_per_document": 8,
        "batch_size": 128,
        "seed": config.seed,
    }


def _bench_options(config: DemoConfig) -> dict[str, Any]:
    return {
        "prompts": config.report_prompts,
        "tuning_prompts": config.tuning_prompts,
        "number": config.decode_prompts,
        "max_new_tokens": config.decode_tokens,
        "block": 2,
        "max_minutes": config.decode_minutes,
        "tune": True,
        "tuning_number": config.tuning_number,
        "seed": config.seed,
    }


def _collect(config: DemoConfig, options: dict[str, Any], out: Path, resume: bool) -> None:  # noqa: FBT001 - a stage's
    from ecospec.cli.collect_traces import CollectTracesConfig  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.cli.collect_traces import run as collect_traces  # noqa: PLC0415

    collect_traces(
        CollectTracesConfig(
            target=config.target,
            groups=config.groups,
            out=out,
            threads=config.threads,
            resume=resume,
            **options,
        )
    )


def _train(config: DemoConfig, options: dict[str, Any], resume: bool) -> None:  # noqa: FBT001 - a stage's
    from ecospec.cli.train_predictor import TrainPredictorConfig  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.cli.train_predictor import run as train_predictor  # noqa: PLC0415

    train_predictor(
        TrainPredictorConfig(
            target=config.target,
            traces=str(config.out / "traces-train"),
            out=config.out / "training",
            threads=config.threads,
            resume=resume,
            **options,
        )
    )


def _export(config: DemoConfig, resume: bool) -> None:  # noqa: ARG001, FBT001 - a stage's
    from ecospec.cli.export_predictor import ExportPredictorConfig  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.cli.export_predictor import run as export_predictor  # noqa: PLC0415

    export_predictor(
        ExportPredictorConfig(
            checkpoint=config.out / "training", target=config.target, out=config.out / "predictor", dtype="bfloat16"
        )
    )


def _overlap(config: DemoConfig, resume: bool) -> None:  # noqa: ARG001, FBT001 - a stage's
    from ecospec.cli.report_overlap import ReportOverlapConfig  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.cli.report_overlap import run as report_overlap  # noqa: PLC0415
    from ecospec.eval.overlap_report import require_disjoint  # noqa: PLC0415
    from ecospec.trace_collection.store import TraceStore  # noqa: PLC0415

    # The report sees to the groups of the tables; the demo's own predictor has its training traces here.
    stores = [TraceStore(config.out / name) for name in ("traces-train", "traces-report")]
    training, reported = ({entry.group_id for entry in store.index()} for store in stores)
    require_disjoint(
        training,
        reported,
        training=f"--train-prompts {config.train_prompts}",
        report=f"--report-prompts {config.report_prompts}",
        advice="choose prompts of other groups",
    )
    tables = config.tables
    report_overlap(
        ReportOverlapConfig(
            target=config.target,
            traces=str(config.out / "traces-report"),
            predictor=f"predictor={config.checkpoints / 'predictor'},demo_run_predictor={config.out / 'predictor'}",
            baselines=tables,
            baseline_traces=str(config.out / "traces-train") if tables is None else None,
            out=config.out / "overlap",
            threads=config.threads,
        )
    )


def _cost(config: DemoConfig, options: dict[str, Any], resume: bool) -> None:  # noqa: ARG001, FBT001 - a stage's
    from ecospec.cli.calibrate_cost import CalibrateCostConfig  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.cli.calibrate_cost import run as calibrate_cost  # noqa: PLC0415

    for level in ("bare", "ballast"):
        changes = options if level == "ballast" else options | {"ballast_bytes": None}
        calibrate_cost(
            CalibrateCostConfig(
                target=config.target,
                drafter=config.checkpoints / "drafter",
                groups=config.groups,
                level=level,
                out=config.out / "cost" / f"{level}.json",
                allow_load=True,  # the stages before have just kept all cores busy
                **changes,
            )
        )


def _decode(config: DemoConfig, options: dict[str, Any], resume: bool) -> None:  # noqa: ARG001, FBT001 - a stage's
    from ecospec.cli.benchmark_decoding import BenchmarkDecodingConfig  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.cli.benchmark_decoding import run as benchmark_decoding  # noqa: PLC0415

    cost = config.out / "cost"
    benchmark_decoding(
        BenchmarkDecodingConfig(
            target=config.target,
            drafter=config.checkpoints / "drafter",
            predictor=config.checkpoints / "predictor",
            groups=config.groups,
            cost=f"{cost / 'bare.json'},{cost / 'ballast.json'}",
            out=config.out / "decoding",
            allow_load=True,
            **options,
        )
    )
