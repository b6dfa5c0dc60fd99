"""The outermost wrapper: one line and exit 2 for user errors, and the options of every verb pinned."""

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ecospec.cli.collect_traces import CollectTracesConfig
from ecospec.cli.errors import exit_status, one_line, terminable
from ecospec.cli.flags import normalise_flags
from ecospec.cli.main import VERBS, _config_class, build_parser, main, run_verb
from ecospec.cli.output import check_output, prepare_output
from ecospec.cli.tables import show_table
from ecospec.eval.tables import Table


def test_unknown_verb_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown verb 'collect-trace'; did you mean 'collect-traces'\?"):
        run_verb("collect-trace", [])


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_unknown_option_is_one_line_and_exit_2(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*verb.split(), "--no-such-option", "1"])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"ecospec {verb}: error:")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_ends_in_a_command_that_can_be_pasted(verb):
    help_text = " ".join(build_parser(verb).format_help().split())
    assert f"example: {VERBS[verb].example}" in help_text


def test_dashes_and_bare_switches_are_accepted():
    words = normalise_flags(
        ["--max-new-tokens", "8", "--resume", "--target=a-b", "--weights", "false"], CollectTracesConfig
    )
    assert words == ["--max_new_tokens", "8", "--resume", "true", "--target=a-b", "--weights", "false"]


def test_positional_arguments_have_no_flag(capsys):
    with pytest.raises(SystemExit):
        main(["traces", "merge", "runs/a", "--stores", "runs/b", "--out", "x"])
    assert "--stores is given without its name, as the first argument" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["traces", "merge", "runs/a", "runs/b", "--out", "x"])
    assert "unexpected argument 'runs/b'; several values of one option are joined" in capsys.readouterr().err


def test_print_config_takes_a_dash_too(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["traces", "verify", "runs/a", "--print-config"])
    assert stopped.value.code == 0
    assert "allow_incomplete: false" in capsys.readouterr().out


def test_examples_parse():
    for name, verb in VERBS.items():
        words = verb.example.split()
        first = 1 + len(name.split())
        assert words[:first] == ["ecospec", *name.split()]
        build_parser(name).parse_args(normalise_flags(words[first:], _config_class(verb)))


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("traces verify", {"store", "json", "allow_incomplete"}),
        ("traces info", {"store", "json"}),
        ("traces merge", {"stores", "out", "duplicates"}),
    ],
)
def test_options_of_the_store_verbs(verb, options):
    assert {field.name for field in dataclasses.fields(_config_class(VERBS[verb]))} == options


def test_a_group_alone_lists_its_verbs(capsys):
    for arguments, status in ((["traces"], 2), (["traces", "--help"], 0)):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == status
        shown = capsys.readouterr().out
        assert "traces verify  check every file" in shown
        assert "  ecospec traces merge runs/a,runs/b --out runs/traces" in shown
    with pytest.raises(SystemExit) as stopped:
        main(["traces", "verfy", "runs/traces"])
    assert stopped.value.code == 2
    assert "unknown verb 'traces verfy'; did you mean 'traces verify'?" in capsys.readouterr().err


def test_user_errors_are_one_line(capsys):
    def fail():
        raise ValueError("first\n  second")

    assert exit_status("ecospec test", fail) == 2
    assert capsys.readouterr().err == "ecospec test: error: first second\n"


def test_bugs_keep_their_traceback():
    def fail():
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        exit_status("ecospec test", fail)


def test_interrupt_is_130(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_status("ecospec test", interrupted) == 130
    assert "--resume" in capsys.readouterr().err


def test_sigterm_ends_like_an_interrupt(capsys):
    """Schedulers send it before they kill: what the command holds open must be closed."""
    closed: list[bool] = []

    def command():
        with terminable(), contextlib.ExitStack() as stack:
            stack.callback(closed.append, True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    assert exit_status("ecospec test", command) == 143
    assert closed == [True]
    assert capsys.readouterr().err == (
        "ecospec test: terminated; run the same command again, with --resume where it has it, to go on\n"
    )
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: bytearray(2**62),
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    ],
    ids=["python", "host", "gpu"],
)
def test_too_little_memory_is_for_the_user_to_mend(capsys, allocate):
    assert exit_status("ecospec test", allocate) == 2
    error = capsys.readouterr().err
    assert "; out of memory: use smaller batches" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "1e3"], "--limit must be a whole number, got 1e3"),
        (["--temperature", "nan"], "--temperature must be a finite number, got nan"),
        (["--engine", "tgi"], "--engine must be one of hooks, vllm, sglang, got tgi"),
        (["--resume=7"], "--resume must be true or false, got 7"),
        (["--engine-options", "[1]"], "--engine-options must be a JSON object, got [1]"),
        (["--out", "\udcff"], r"argument '\udcff' is not UTF-8 text"),
        (["--threads", "100000"], "--threads must be at most 1024, got 100000"),
        (["--server-timeout", "5"], "--server-timeout needs --server"),
        (["--new-tokens", "5"], "unknown option --new-tokens; did you mean --max-new-tokens? (--help lists all)"),
        (["--tokens", "5"], "unknown option --tokens; did you mean --"),
        (
            ["more.jsonl"],
            "unexpected argument 'more.jsonl'; several values of one option are joined by commas: A,B",
        ),
    ],
)
def test_what_a_flag_takes_is_said_on_one_line(tmp_path, capsys, arguments, message):
    options = ["--target", "x", "--prompts", "x.jsonl", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["collect-traces", *options, *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ecospec collect-traces: error: {message}")
    assert error.count("\n") == 1


def test_output_folders_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out, message in (
        ("file/sub/out", "file is a file, not a folder"),
        ("link", "link is a link that leads nowhere"),
        ("link/out", "link is a link that leads nowhere"),
        ("loop", "loop is a link that leads nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            check_output(tmp_path / out, resume=True)
    assert not (tmp_path / "nowhere").exists()
    check_output(tmp_path / "new" / "out", resume=False)


def test_os_errors_name_the_file(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught:
        missing.read_text()
    assert one_line(caught.value) == f"No such file or directory: {missing}"


def test_output_folders_are_not_overwritten(tmp_path):
    out = tmp_path / "out"
    assert prepare_output(out, resume=False) == out
    prepare_output(out, resume=False)
    (out / "file").write_text("x")
    with pytest.raises(ValueError, match="is not empty; name a new folder, or add --resume"):
        prepare_output(out, resume=False)
    prepare_output(out, resume=True)
    with pytest.raises(ValueError, match="is a file; name a folder"):
        prepare_output(out / "file", resume=True)


def test_aliases_are_installed():
    for alias in (
        "collect-traces",
        "collect-trees",
        "train-predictor",
        "report-overlap",
        "export-predictor",
        "benchmark-decoding",
    ):
        script = Path(sys.executable).parent / alias
        result = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert f"ecospec {alias}" in result.stdout


def shown_table(**console):
    text = io.StringIO()
    table = Table(
        "Shares",
        ("dataset, origin", "identical in all layers", "lowest layer", "a further column", "and one more"),
        [("stdlib_documentation, generated", "12.5", "[84.3, 84.9]", "1,234,567", "0")],
    )
    show_table(Console(file=text, width=60, **console), table)
    return text.getvalue()


def test_tables_in_a_log_are_as_wide_as_they_need_to_be():
    lines = shown_table().splitlines()
    header = next(line for line in lines if "dataset" in line)
    assert " ".join(header.split()) == (
        "dataset, origin identical in all layers lowest layer a further column and one more"
    )
    assert any("stdlib_documentation, generated" in line and "[84.3, 84.9]" in line for line in lines)


def test_tables_on_a_narrow_terminal_are_wrapped_and_not_cut_off():
    shown = shown_table(force_terminal=True, no_color=True)
    assert "…" not in shown
    for word in ("umentation", "identical", "84.9]", "1,234,567"):
        assert word in shown
