"""``ecospec <verb>``: the verbs, their aliases, and the parser built from each verb's config dataclass.

A verb is a module of this package with a frozen config dataclass (one typed field = flag, YAML key, default and
help text) and ``run(config)``. To add one, write the module and list it in ``VERBS``. A verb of two words
(``traces info``) belongs to the group that its first word names.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from ecospec.cli.errors import exit_status
from ecospec.cli.flags import check_config_files, normalise_flags, readable_error


@dataclasses.dataclass(frozen=True, slots=True)
class Verb:
    """One command.

    Attributes:
        module: Module of ``ecospec.cli`` that holds the config dataclass and the function.
        config: Name of the config dataclass in it.
        summary: One line for the overview.
        example: A command that can be pasted.
        function: What runs the verb, called with the config.
        positional: Field of the config that is given without a flag.
    """

    module: str
    config: str
    summary: str
    example: str
    function: str = "run"
    positional: str | None = None


VERBS: dict[str, Verb] = {
    "collect-traces": Verb(
        "collect_traces",
        "CollectTracesConfig",
        "record which experts a target uses, to Parquet",
        "ecospec collect-traces --target checkpoints/target --prompts stdlib:report --out runs/traces",
    ),
    "collect-trees": Verb(
        "collect_trees",
        "CollectTreesConfig",
        "record draft trees with the true experts of every candidate",
        "ecospec collect-trees --target checkpoints/target --drafter checkpoints/drafter --traces runs/traces "
        "--out runs/trees",
    ),
    "traces verify": Verb(
        "traces",
        "VerifyConfig",
        "check every file, checksum and row of a trace store",
        "ecospec traces verify runs/traces",
        function="verify",
        positional="store",
    ),
    "traces info": Verb(
        "traces",
        "InfoConfig",
        "what is in a trace store, and what looks wrong with it",
        "ecospec traces info runs/traces --json runs/traces-info.json",
        function="info",
        positional="store",
    ),
    "traces merge": Verb(
        "traces",
        "MergeConfig",
        "merge trace stores of one target into one",
        "ecospec traces merge runs/a,runs/b --out runs/traces",
        function="merge",
        positional="stores",
    ),
    "train-predictor": Verb(
        "train_predictor",
        "TrainPredictorConfig",
        "train a predictor on routing traces",
        "ecospec train-predictor --target checkpoints/target --traces runs/traces --out runs/training",
    ),
    "train-attached": Verb(
        "train_attached",
        "TrainAttachedConfig",
        "train a predictor on a drafter's hidden states",
        "ecospec train-attached --target checkpoints/target --drafter checkpoints/drafter --traces runs/traces "
        "--out runs/attached",
    ),
    "fit-baselines": Verb(
        "fit_baselines",
        "FitBaselinesConfig",
        "fit the predictors that a trained one has to beat",
        "ecospec fit-baselines --target checkpoints/target --traces runs/traces --out runs/baselines",
    ),
    "export-predictor": Verb(
        "export_predictor",
        "ExportPredictorConfig",
        "export a training checkpoint to a predictor bundle",
        "ecospec export-predictor --checkpoint runs/training --target checkpoints/target --out runs/predictor",
    ),
    "report-overlap": Verb(
        "report_overlap",
        "ReportOverlapConfig",
        "top-K overlap of a predictor beside the trivial ones",
        "ecospec report-overlap --target checkpoints/target --traces runs/report-traces "
        "--predictor checkpoints/predictor --baseline-traces runs/traces --out runs/overlap",
    ),
    "report-tree-overlap": Verb(
        "report_tree_overlap",
        "ReportTreeOverlapConfig",
        "top-K overlap on candidates of draft trees, by depth and fate",
        "ecospec report-tree-overlap --target checkpoints/target --trees runs/trees --traces runs/traces "
        "--predictor checkpoints/predictor,checkpoints/tables/bigram_table --out runs/tree-overlap",
    ),
    "calibrate-cost": Verb(
        "calibrate_cost",
        "CalibrateCostConfig",
        "measure what a verification step costs on this machine",
        "ecospec calibrate-cost --target checkpoints/target --drafter checkpoints/drafter "
        "--out runs/cost/bare.json",
    ),
    "benchmark-decoding": Verb(
        "benchmark_decoding",
        "BenchmarkDecodingConfig",
        "compare selection policies, side by side and losslessly",
        "ecospec benchmark-decoding --target checkpoints/target --drafter checkpoints/drafter "
        "--predictor checkpoints/predictor --cost runs/cost/bare.json,runs/cost/ballast.json --tune "
        "--out runs/decoding",
    ),
    "demo": Verb(
        "demo",
        "DemoConfig",
        "the whole pipeline on the shipped checkpoints",
        "ecospec demo --out runs/demo",
    ),
}


def overview() -> str:
    """Help text of ``ecospec`` without a verb."""
    width = max(len(name) for name in VERBS)
    lines = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: ecospec <verb> [options]\n\nCost-aware speculative decoding for mixture-of-experts models.\n\n"
        f"verbs:\n{lines}\n\n`ecospec <verb> --help` lists a verb's options; `ecospec --version` the version.\n"
        "Start with:\n  ecospec demo --out runs/demo\n"
    )


def groups() -> set[str]:
    """First words of the verbs of two words."""
    return {name.split()[0] for name in VERBS if " " in name}


def group_overview(group: str) -> str:
    """Help text of a first word without a second, e.g. ``ecospec traces``."""
    verbs = {name: verb for name, verb in VERBS.items() if name.split()[0] == group}
    width = max(len(name) for name in verbs)
    lines = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in verbs.items())
    examples = "\n".join(f"  {verb.example}" for verb in verbs.values())
    return (
        f"usage: ecospec {group} <verb> [options]\n\nverbs:\n{lines}\n\n"
        f"`ecospec {group} <verb> --help` lists a verb's options.\nexamples:\n{examples}\n"
    )


def build_parser(name: str) -> Any:
    """Parser of one verb, built from its config dataclass.

    Args:
        name: A key of ``VERBS``.

    Returns:
        The ``jsonargparse.ArgumentParser``; ``parse_args`` raises ``ArgumentError`` instead of exiting.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings  # noqa: PLC0415 - keeps `--help` fast

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    verb = VERBS[name]
    parser = ArgumentParser(
        prog=f"ecospec {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=f"example: {verb.example}",
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,  # an abbreviation would change its meaning with the next option that is added
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    config = _config_class(verb)
    places = set() if verb.positional is None else {verb.positional}
    if places:
        flags = {field.name for field in dataclasses.fields(config)} - places
        parser.add_class_arguments(config, nested_key=None, as_group=False, as_positional=True, skip=flags)
    parser.add_class_arguments(config, nested_key=None, as_group=False, skip=places)
    return parser


def _config_class(verb: Verb) -> Any:
    return getattr(importlib.import_module(f"ecospec.cli.{verb.module}"), verb.config)


def run_verb(name: str, argv: Sequence[str]) -> None:
    """Parse the options of a verb and run it.

    Args:
        name: The verb.
        argv: Its options.

    Raises:
        ValueError: The verb or one of its options is unknown or out of range.
    """
    if name not in VERBS:
        close = get_close_matches(name, VERBS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown verb {name!r}{hint} (allowed: {', '.join(VERBS)})")
    from jsonargparse import ArgumentError  # noqa: PLC0415 - keeps `--help` fast

    verb = VERBS[name]
    parser = build_parser(name)
    if broken := next((argument for argument in argv if not _is_text(argument)), None):
        raise ValueError(
            f"argument {broken!r} is not UTF-8 text, so it cannot be recorded; rename the file or folder"
        )
    arguments = normalise_flags(argv, _config_class(verb))
    check_config_files(arguments, _config_class(verb))
    try:
        namespace = parser.parse_args(arguments)
        values = vars(parser.instantiate(namespace))
    except ArgumentError as error:
        raise ValueError(readable_error(str(error), _config_class(verb))) from error
    values.pop("config", None)
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - keeps `--help` fast

    transformers_logging.disable_progress_bar()  # a bar for loading weights says nothing about our progress
    module = importlib.import_module(f"ecospec.cli.{verb.module}")
    getattr(module, verb.function)(_config_class(verb)(**values))


def _is_text(argument: str) -> bool:
    """Whether an argument can be written to a file; bytes that are no UTF-8 come as lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``ecospec``; exits with the status of the verb."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help"}:
        sys.stdout.write(overview())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        sys.stdout.write(f"ecospec {importlib.metadata.version('ecospec')}\n")
        sys.exit(0)
    words = 1
    if arguments[0] in groups():
        if len(arguments) < 2 or arguments[1] in {"-h", "--help"}:
            sys.stdout.write(group_overview(arguments[0]))
            sys.exit(0 if len(arguments) > 1 else 2)
        words = 2
    name = " ".join(arguments[:words])
    sys.exit(exit_status(f"ecospec {name}", lambda: run_verb(name, arguments[words:])))


def collect_traces() -> None:
    """Alias of ``ecospec collect-traces``."""
    main(["collect-traces", *sys.argv[1:]])


def collect_trees() -> None:
    """Alias of ``ecospec collect-trees``."""
    main(["collect-trees", *sys.argv[1:]])


def train_predictor() -> None:
    """Alias of ``ecospec train-predictor``."""
    main(["train-predictor", *sys.argv[1:]])


def export_predictor() -> None:
    """Alias of ``ecospec export-predictor``."""
    main(["export-predictor", *sys.argv[1:]])


def report_overlap() -> None:
    """Alias of ``ecospec report-overlap``."""
    main(["report-overlap", *sys.argv[1:]])


def benchmark_decoding() -> None:
    """Alias of ``ecospec benchmark-decoding``."""
    main(["benchmark-decoding", *sys.argv[1:]])
