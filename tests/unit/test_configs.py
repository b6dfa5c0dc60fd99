"""The ready YAML files parse and hide no choice; the page on training says what the code works out."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from ecospec.cli.flags import check_config_files
from ecospec.cli.main import build_parser
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.config import TRAINER_OPTIONS, TrainPredictorConfig
from ecospec.train.module import trained_parameters
from ecospec.train.scaling import BACKBONES, TARGETS, Run, estimate, tables

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PAPER = ROOT / "configs" / "paper.yaml"
TARGET_FILES = [path for path in CONFIGS if path != PAPER]

#: Where and on what a run works, and how it is watched: no choice of the paper's.
PLACES = {
    *("target", "traces", "out", "cache", "preset", "backbone", "backbone_path", "baseline_tokens", "workers"),
    *("device", "devices", "strategy", "dtype", "gradient_checkpointing", "compile", "threads", "resume", "wandb"),
    *("trainer", "checkpoint_every_minutes", "checkpoint_every_steps", "keep_overlap", "overlap_looks"),
}


def parsed(*options):
    check_config_files(list(options), TrainPredictorConfig)
    values = vars(build_parser("train-predictor").parse_args(list(options)))
    return TrainPredictorConfig(**{name: value for name, value in values.items() if name != "config"})


def test_there_is_a_file_for_each_target_of_the_paper():
    assert {path.stem for path in TARGET_FILES} == {target.name.lower() for target in TARGETS}


@pytest.mark.parametrize("path", TARGET_FILES, ids=lambda path: path.stem)
def test_a_target_file_is_complete_and_the_paper_preset_goes_after_it(path):
    alone = parsed("--config", str(path))
    assert alone.devices == 8
    assert alone.chosen_dtype() == "bfloat16"
    both = parsed("--config", str(path), "--config", str(PAPER))
    assert both.target == alone.target
    assert both.validation_fraction == 0.2
    assert both.calibration_fraction == 0.0
    assert both.max_epochs == 100
    assert both.objective == "cross_entropy"
    flag = parsed("--config", str(path), "--batch_tokens", "1024", "--trainer", "{log_every_n_steps: 5}")
    assert flag.batch_tokens == 1024
    assert flag.trainer == {"log_every_n_steps": 5}


def test_the_paper_preset_shows_every_choice():
    named = set(yaml.safe_load(PAPER.read_text()))
    assert named | PLACES == {field.name for field in dataclasses.fields(TrainPredictorConfig)}
    assert not named & PLACES


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"strategy": "ddq"}, "unknown strategy 'ddq'; did you mean 'ddp'. allowed: auto, ddp, fsdp2"),
        ({"strategy": "fsdp2"}, "strategy fsdp2 divides weights over devices; give --devices 2 or more"),
        ({"device": "cuda:1", "devices": 2}, "device cuda:1 names one device, devices 2 asks for more; use cuda"),
        (
            {"strategy": "fsdp2", "devices": 2, "token_dropout": 0.1, "input_mode": "backbone_embedding"},
            "strategy fsdp2 cannot drop tokens of a backbone's own embedding; use ddp",
        ),
        ({"wandb": " "}, "wandb is empty; name a project"),
        ({"trainer": {"devices": 2}}, "trainer option 'devices' has an option of its own: --devices"),
        ({"trainer": {"accumulate_grad_batches": 2}}, "has an option of its own: --accumulate"),
        ({"trainer": {"log_every_n_step": 2}}, "unknown trainer option 'log_every_n_step'; did you mean"),
        ({"trainer": {"num_nodes": 0}}, "trainer option num_nodes must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_options_of_processes_are_validated(change, match):
    with pytest.raises(ValueError, match=match):
        TrainPredictorConfig(Path("target"), "traces", Path("out"), **change)


def test_trainer_options_exist():
    import inspect

    from lightning.pytorch import Trainer

    assert set(TRAINER_OPTIONS) <= set(inspect.signature(Trainer.__init__).parameters)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_parameters_are_those_of_the_network(backbone, target):
    spec = RoutingSpec(
        target.num_layers, tuple(range(target.num_layers)), target.num_experts, target.top_k, target.vocab_size,
        "a" * 64, "t", "b" * 64,
    )  # fmt: skip
    with torch.device("meta"):
        model = RoutingPredictorModel(spec, backbone=backbone, embedding_size=target.embedding_size)
    assert estimate(target, backbone, Run()).parameters == trained_parameters(model)


def test_formulas():
    one, eight = (estimate(TARGETS[0], BACKBONES[0], Run(devices=n)) for n in (1, 8))
    assert one.activation_bytes == 8 * eight.activation_bytes
    assert one.seconds == pytest.approx(8 * eight.seconds)
    assert eight.device_bytes(sharded_over=8) < eight.device_bytes()
    assert eight.checkpointed_bytes < eight.activation_bytes / 10
    n, q, context = 28, 2048, 4096  # Qwen3-0.6B
    assert eight.flops_per_token == 6 * eight.parameters + 6 * n * q * context


def test_the_page_shows_what_the_code_works_out():
    page = (ROOT / "docs" / "training.md").read_text()
    assert tables() in page, (
        "write the tables anew: python -c 'from ecospec.train.scaling import tables; print(tables())'"
    )
    documented = set(re.findall(r"`(\w+)`", page.split("## Options of Lightning's Trainer")[1].split("\n## ")[0]))
    assert set(TRAINER_OPTIONS) <= documented
