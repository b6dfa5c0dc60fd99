"""What train-predictor refuses, through the command: one line, exit status 2; and YAML that it writes and reads."""

import importlib.util
import math

import pytest
import yaml  # type: ignore[import-untyped]

from ecospec.cli.main import build_parser, main
from ecospec.train import module as training_module
from ecospec.train.losses import objective_loss
from tests.integration.test_training_resume import BACKBONE, files  # noqa: F401 - a fixture
from tests.tiny_files import save_target


@pytest.fixture
def command(files, tmp_path, capsys):  # noqa: F811
    """Run the command with more options, which win; the lines of its error."""
    first = [
        "--target",
        files / "target",
        "--traces",
        files / "traces",
        "--out",
        tmp_path / "run",
        "--threads",
        "1",
    ]
    first += ["--backbone", str(BACKBONE).replace("'", '"'), "--max_epochs", "1", "--batch_tokens", "64"]

    def run(*more, status=2):
        with pytest.raises(SystemExit) as stopped:
            main(["train-predictor", *map(str, first), *map(str, more)])
        shown = capsys.readouterr()
        assert stopped.value.code == status, shown.err
        return shown.out if status == 0 else [line for line in shown.err.splitlines() if line.strip()]

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--validation_fraction", "1e-9"], "the validation split is empty: 20 groups"),
        (["--hold-out-dataset", "codes"], "names 'codes', .*did you mean 'code'"),
        (["--batch_tokens", "4"], "batch_tokens must be at least 8, got 4"),
        (["--trainer", "{devices: 2}"], "trainer option 'devices' has an option of its own: --devices"),
        (["--trainer", "{profiler: nosuch}"], "--trainer {'profiler': 'nosuch'}: "),
        (["--strategy", "fsdp"], "unknown strategy 'fsdp'; did you mean 'fsdp2'?"),
        (["--patients", "3"], "patients"),
        (["--traces", "nowhere"], "nowhere"),
    ],
)
def test_one_line_and_exit_2(command, options, message):
    (line,) = command(*options)
    assert line.startswith("ecospec train-predictor: error: ")
    assert all(part in line for part in message.split(".*"))


def test_traces_of_another_target(command, tmp_path):
    (line,) = command("--target", save_target(tmp_path / "other", seed=5))
    assert "was made for another target than target" in line


def test_a_loss_that_is_not_finite(command, monkeypatch):
    monkeypatch.setattr(training_module, "objective_loss", lambda *arguments: objective_loss(*arguments) * math.nan)
    line = command()[-1]
    assert "error: the loss is not finite at step 0; start again in a new folder with a lower" in line


def test_a_folder_with_content(command, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (line,) = command()
    assert "is not empty; name a new folder, or add --resume" in line


def test_wandb_is_imported_only_when_asked_for(command, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else found(name, *more)
    )
    (line,) = command("--wandb", "demo")
    assert "--wandb demo needs the wandb package; pip install wandb" in line


def test_yaml(command, tmp_path):
    printed = yaml.safe_load(command("--seed", "7", "--print_config", status=0))
    assert printed["seed"] == 7
    assert printed["backbone"] == BACKBONE
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(printed))
    again = build_parser("train-predictor").parse_args(["--config", str(file), "--seed", "8"])
    assert (again.seed, again.batch_tokens) == (8, 64)
    file.write_text("sead: 7\n")
    (line,) = command("--config", file)
    assert "names unknown option 'sead'; did you mean 'seed'?" in line
