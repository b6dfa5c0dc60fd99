"""Two gloo processes train what one does: same loss curve, metrics, temperatures and weights; DDP and FSDP2."""

import csv
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from ecospec.train import module as training_module
from ecospec.train.export import export_predictor, load_trained
from ecospec.train.fit import train_predictor
from ecospec.train.losses import objective_loss
from tests.integration.test_training_resume import BACKBONE, config, files  # noqa: F401 - fixtures
from tests.processes import SECONDS, run_processes, start_processes
from tests.unit.test_predictor_model import save_backbone


class Norms(Callback):
    """Norm of the gradient of every step; AdamW and Muon hardly see its scale, so weights would not show it."""

    def __init__(self):
        self.values = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        squares = [p.grad.square().sum() for p in pl_module.parameters() if p.grad is not None]
        total = sum(s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares)
        self.values.append(float(total.sqrt()))


def train(config):  # noqa: F811
    """A run; what it ended with, and the norms."""
    norms = Norms()
    return train_predictor(config, callbacks=[norms]), norms.values


@pytest.fixture
def pair(config, tmp_path):  # noqa: F811
    """One process, and two that shall do the same; batches of few rows, so that some shares are empty."""
    one = dataclasses.replace(
        config, token_dropout=0.0, max_epochs=2, trainer={"log_every_n_steps": 1}, calibration_fraction=0.2
    )
    return one, dataclasses.replace(one, out=tmp_path / "several", devices=2)


def curve(config, name, session=0):  # noqa: F811
    """A column of the CSV log, step by step."""
    with (config.out / "logs" / f"csv_{session}" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def last(config):  # noqa: F811
    return torch.load(config.out / "checkpoints" / "last.ckpt", weights_only=True)


def assert_same_end(one, several, tolerance=1e-4):
    first, second = last(one), last(several)
    assert first["global_step"] == second["global_step"]
    assert second["ecospec"]["temperature"] == pytest.approx(first["ecospec"]["temperature"], rel=1e-3)
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][name], value, atol=tolerance, rtol=0, msg=name)


def assert_same_curves(one, several, tolerance=2e-5):
    for name in ("train_loss", "train_loss_epoch", "val_loss", "val_overlap", "val_calibration_error_raw"):
        expected, found = curve(one, name), curve(several, name)
        assert len(expected) == len(found) > 0, name
        assert found == pytest.approx(expected, abs=tolerance), name


@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulate": 3, "optimizer": "adamw"}, {"strategy": "fsdp2"}],
    ids=["ddp", "ddp-accumulate", "fsdp2"],
)
def test_two_processes_train_what_one_trains(pair, changes):
    one = dataclasses.replace(pair[0], **{k: v for k, v in changes.items() if k != "strategy"})
    several = dataclasses.replace(pair[1], **changes)
    _, norms = train(one)
    (first, first_norms), (second, second_norms) = run_processes(train, several)
    assert first_norms == pytest.approx(norms, rel=1e-3)
    assert second_norms == first_norms
    assert_same_curves(one, several)
    assert_same_end(one, several)
    assert first.overlap == second.overlap
    assert first.baseline_overlaps
    assert not second.baseline_overlaps, "the tables are fitted once"
    assert len(list(several.out.rglob("events*"))) == 1, "one process logs"
    export_predictor(several.out, several.target, several.out / "bundle")
    trained, _ = load_trained(first.best, several.target)
    assert torch.isfinite(trained.head.weight).all()


class KillRank(Callback):
    """Kills one process with -9 after a batch."""

    def __init__(self, rank, epoch, batch):
        self.place = (rank, epoch, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.global_rank, trainer.current_epoch, batch_idx) == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(config, rank):  # noqa: F811
    return train_predictor(config, callbacks=[KillRank(rank, 0, 9)])


@pytest.mark.parametrize(
    ("strategy", "killed", "resumed_by"), [("ddp", 1, 2), ("ddp", 0, 1), ("fsdp2", 1, 2)], ids=str
)
def test_a_killed_process_ends_the_run_and_resume_goes_on(pair, strategy, killed, resumed_by):
    one, several = pair
    several = dataclasses.replace(several, strategy=strategy, checkpoint_every_steps=4)
    processes, results = start_processes(train_until_killed, several, killed)
    start = time.monotonic()
    rank, _, error = results.get(timeout=SECONDS)
    assert rank == 1 - killed
    assert re.match(r"ConnectionError: another process of this run is gone .*--resume", error), error
    for process in processes:
        process.join(SECONDS)
    assert time.monotonic() - start < 60
    assert last(several)["TraceDataModule"] == {"epoch": 0, "batches": 8}
    train_predictor(one)
    resumed = dataclasses.replace(several, resume=True, devices=resumed_by)
    if resumed_by == 1:
        train_predictor(resumed)
    else:
        run_processes(train_predictor, resumed)
    assert_same_end(one, resumed)
    assert curve(resumed, "train_loss_epoch", 1)[0] == pytest.approx(curve(one, "train_loss_epoch")[0], abs=2e-5)


def train_broken(config):  # noqa: F811
    """The loss of the second process becomes no number at its fourth batch."""
    calls = []

    def broken(*arguments):
        calls.append(1)
        worse = os.environ["RANK"] == "1" and len(calls) == 4
        return objective_loss(*arguments) * (float("nan") if worse else 1.0)

    training_module.objective_loss = broken  # type: ignore[attr-defined]
    try:
        train_predictor(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_that_is_not_finite_in_one_process_ends_all(pair, strategy):
    messages = run_processes(train_broken, dataclasses.replace(pair[1], strategy=strategy))
    assert all("the loss is not finite at step 3" in message for message in messages), messages
    assert not list(pair[1].out.rglob("*.ckpt"))


@pytest.mark.parametrize("finetune", ["full", "lora", "heads"])
def test_fsdp2_trains_a_pretrained_backbone_as_one_process(pair, tmp_path, finetune):
    words = {f"w{i}": i for i in range(40)}
    save_backbone(tmp_path / "backbone", words=words)
    changes: dict[str, Any] = {"backbone": None, "backbone_path": str(tmp_path / "backbone")}
    changes |= {"input_mode": "backbone_embedding", "finetune": finetune, "max_epochs": 1}
    one, several = (dataclasses.replace(run, **changes) for run in pair)
    train_predictor(one)
    run_processes(train_predictor, dataclasses.replace(several, strategy="fsdp2"))
    assert_same_curves(one, several)
    export_predictor(several.out, several.target, several.out / "bundle")


def test_one_clock_for_all_processes(pair):
    several = dataclasses.replace(pair[1], max_epochs=100_000, max_minutes=0.05)
    first, second = run_processes(train_predictor, several)
    assert first.overlap == second.overlap


def test_early_stopping_stops_all_processes_at_once(pair):
    several = dataclasses.replace(pair[1], max_epochs=50, patience=2, learning_rate=1e-9, muon_learning_rate=1e-9)
    run_processes(train_predictor, several)
    assert len(curve(several, "val_overlap")) == 3


def test_the_command_starts_its_processes(files, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    command = [Path(sys.executable).parent / "ecospec", "train-predictor", "--target", files / "target"]
    command += ["--traces", files / "traces", "--out", out, "--backbone", str(BACKBONE).replace("'", '"')]
    command += [
        "--max-epochs",
        "1",
        "--batch-tokens",
        "64",
        "--threads",
        "1",
        "--strategy",
        "ddp",
        "--devices",
        "2",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("best validation overlap") == 1, "one process prints"
    assert result.stdout.count("epoch 1/1") == 1
    assert (out / "checkpoints" / "last.ckpt").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert again.returncode == 2
    (line,) = again.stderr.splitlines()
    assert line.startswith(f"ecospec train-predictor: error: --out {out} is not empty; name a new folder")
