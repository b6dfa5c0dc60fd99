"""A run killed at any instant and resumed ends with bit-identical weights; the data options of the command."""

import dataclasses
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from ecospec.cli.main import run_verb
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.export import export_predictor
from ecospec.train.fit import train_predictor
from tests.tiny_files import save_target
from tests.trace_files import make_arrays, random_tree, write_store, write_trees

BACKBONE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
BACKBONE |= {"num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    spec = routing_spec_of(save_target(folder / "target"))
    lengths = np.random.default_rng(0).integers(8, 40, 40).tolist()
    names = [f"document{i // 2}" for i in range(40)]
    arrays = make_arrays(lengths, names, ["code", "docs"] * 20, spec=spec)
    write_store(folder / "traces", arrays)
    rng = np.random.default_rng(1)
    trees = [random_tree(arrays, i, p, 5, rng) for i in range(40) for p in range(2, lengths[i], 9)]
    write_trees(folder / "trees", trees, spec)
    return folder


@pytest.fixture
def config(files, tmp_path):
    return TrainPredictorConfig(
        target=files / "target",
        traces=str(files / "traces"),
        tree_traces=str(files / "trees"),
        out=tmp_path / "whole",
        backbone=BACKBONE,
        context_length=16,
        batch_tokens=64,
        max_epochs=3,
        token_dropout=0.2,
        calibration_fraction=0.1,
        threads=1,
        checkpoint_every_minutes=None,
    )


class KillAt(Callback):
    def __init__(self, epoch, batch):
        self.place = (epoch, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(config, epoch, batch):
    """Train in a process of its own that is killed with -9."""
    process = multiprocessing.get_context("fork").Process(
        target=train_predictor, args=(config,), kwargs={"callbacks": [KillAt(epoch, batch)]}
    )
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL


def assert_same_end(one, two):
    one, two = (torch.load(result.last, weights_only=True) for result in (one, two))
    assert one["global_step"] == two["global_step"]
    assert one["epoch"] == two["epoch"]
    for name, value in one["state_dict"].items():
        assert torch.equal(two["state_dict"][name], value), name
    for left, right in zip(*(c["optimizer_states"][0]["state"].values() for c in (one, two)), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_killed_in_the_middle_of_an_epoch_and_resumed_equals_uninterrupted(config, tmp_path):
    whole = train_predictor(config)
    assert whole.last.exists()
    broken = dataclasses.replace(config, out=tmp_path / "broken", checkpoint_every_steps=4)
    killed(broken, 0, 9)
    saved = torch.load(broken.out / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["TraceDataModule"] == {"epoch": 0, "batches": 8}
    with pytest.raises(
        ValueError, match=r"last\.ckpt was written before the first validation; train on \(--resume\)"
    ):
        export_predictor(broken.out / "checkpoints" / "last.ckpt", config.target, tmp_path / "bundle")
    again = dataclasses.replace(broken, resume=True, checkpoint_every_steps=7)
    killed(again, 1, 8)  # one batch after a checkpoint, or several: nothing may depend on it
    resumed = train_predictor(again)
    assert_same_end(whole, resumed)
    assert whole.overlap == resumed.overlap
    assert all(
        0 < float(value) < 0.10 for value in _column(config.out / "logs" / "csv_0", "padding_share") if value
    )
    losses = [
        [line for line in _column(path, "train_loss_epoch") if line][-1]
        for path in (config.out / "logs" / "csv_0", broken.out / "logs" / "csv_2")
    ]
    assert losses[0] == losses[1], "the mean over the epoch, not over what was left of it"


def _column(folder, name):
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    return [line[lines[0].index(name)] for line in lines[1:]]


def test_data_options_of_the_command(config, files, tmp_path):
    options = ["--target", str(files / "target"), "--traces", str(files / "traces"), "--threads", "1"]
    options += ["--backbone", str(BACKBONE).replace("'", '"'), "--max-epochs", "1", "--batch-tokens", "64"]

    def run(name, *more):
        run_verb("train-predictor", [*options, "--out", str(tmp_path / name), *more])
        last = torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)
        return last["ecospec"]["run"], last["ecospec"]["metrics"]

    facts, metrics = run(
        *("trees", "--tree-traces", str(files / "trees"), "--trees-only", "--cache", str(tmp_path / "cache")),
        *("--workers", "1", "--hold-out-length", "38", "--calibration-fraction", "0"),
    )
    data = facts["training_data"]
    assert (tmp_path / "cache" / "trees" / "experts.bin").exists()
    assert not (tmp_path / "trees" / "arrays").exists()
    assert 0 <= metrics["val_tree_overlap"] <= 1
    assert data["tree_nodes"] == 5 * data["trees"] > 0
    assert data["held_out_tokens"] % 39 == 0
    assert data["held_out_tokens"] > 0
    assert facts["padding_share"] < 0.10
    for flags, match in (
        (
            ("--hold-out-dataset", "codes"),
            r"--hold_out_dataset names 'codes', .*did you mean 'code'\? .*code, docs",
        ),
        (("--hold-out-dataset", "code,docs"), "the validation split is empty: 0 groups"),
        (("--tree-traces", str(files / "traces")), "is a routing_trace store, a draft_tree_trace store is needed"),
        (("--trees-only",), "trees_only needs draft trees"),
    ):
        with pytest.raises(ValueError, match=match):
            run("refused", *flags)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tree_traces": "a,,b"}, "tree_traces 'a,,b' holds an empty entry"),
        ({"hold_out_dataset": "a,"}, "hold_out_dataset 'a,' holds an empty entry"),
        ({"hold_out_length": 0}, "hold_out_length must be at least 1"),
        ({"calibration_fraction": 0.8}, "calibration_fraction must be at least 0 and leave groups for training"),
        ({"checkpoint_every_minutes": 0.0}, "checkpoint_every_minutes must be above 0 and finite"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps must be at least 1"),
        ({"workers": -1}, "workers must be at least 0"),
        ({"baseline_tokens": 0}, "baseline_tokens must be at least 1"),
    ],
)
def test_options_are_validated(config, change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(config, **change)
