"""The outermost wrapper: one line and exit 2 for user errors, and the options of every verb pinned."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from ecospec.cli.collect_traces import CollectTracesConfig
from ecospec.cli.errors import exit_status, one_line
from ecospec.cli.flags import normalise_flags
from ecospec.cli.main import VERBS, _config_class, build_parser, main, run_verb
from ecospec.cli.output import prepare_output


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
