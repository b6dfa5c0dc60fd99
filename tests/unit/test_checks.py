"""What commands check before they load or measure: devices, options, inputs, and targets whose files disagree."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ecospec.cli import device
from ecospec.cli.calibrate_cost import CalibrateCostConfig
from ecospec.cli.calibrate_cost import run as calibrate_cost
from ecospec.cli.checks import require_drafter, require_new_file
from ecospec.cli.collect_traces import show_progress as collect_progress
from ecospec.cli.demo import DemoConfig
from ecospec.cli.demo import run as demo
from ecospec.cli.errors import one_line
from ecospec.cli.flags import check_config_files
from ecospec.cli.loading import load_target
from ecospec.cli.main import run_verb
from ecospec.cli.report_overlap import _progress as overlap_progress
from ecospec.decoding.drafters.eagle3_config import Eagle3Config
from ecospec.predictor.checkpoint_files import load_target_embedding
from tests.tiny_files import LAYERS, save_target

NEEDED = {
    "collect-traces": ("target", "prompts", "out"),
    "train-predictor": ("target", "traces", "out"),
    "report-overlap": ("target", "traces", "predictor", "baselines", "out"),
    "calibrate-cost": ("target", "out"),
    "benchmark-decoding": ("target", "drafter", "predictor", "out"),
}


@pytest.mark.parametrize("verb", NEEDED)
@pytest.mark.parametrize("name", ["cuda", "cuda:3", "foo", "mps", "meta"])
def test_devices_that_are_not_here(verb, name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    needed = [part for option in NEEDED[verb] for part in (f"--{option}", str(tmp_path / "nowhere" / option))]
    with pytest.raises(ValueError, match=f"--device '{name}' .*this machine has cpu only .*; (use|give)"):
        run_verb(verb, [*needed, "--device", name])
    assert not list(tmp_path.iterdir())


def test_devices_that_are_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        device.require_device(name)
    device.require_device("auto", auto=True)
    with pytest.raises(ValueError, match=r"this machine has cpu and 2 CUDA device.*use --device cuda:0 to cuda:1"):
        device.require_device("cuda:2")
    device.require_device("cuda", devices=2)
    with pytest.raises(ValueError, match=r"--devices 3 are not on this machine; .*; use at most 2"):
        device.require_device("cuda", devices=3)
    for name in ("auto", "cuda:", "cuda:x", "cpu0", "cuda1"):
        with pytest.raises(ValueError, match="is not supported"):
            device.require_device(name)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def changed(target, tmp_path):
    """Copy of the target with some entries of its config changed."""

    def change(**entries):
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        for file in target.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | entries
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return change


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": 32}, r"stored as .*config\.json asks for|cannot be loaded"),
        ({"vocab_size": 48}, r"stored as \[40, 16\], config\.json asks for \[48, 16\]"),
        ({"num_hidden_layers": LAYERS + 1}, r"the weights lack model\.layers\.3\..* and \d+ more"),
    ],
)
def test_a_target_whose_config_and_weights_disagree(changed, capfd, entries, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_target(changed(**entries), "float32", "cpu")
    assert "do not belong together" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_a_sound_target_is_loaded(target):
    model = load_target(target, "float64", "cpu")
    assert model.dtype == torch.float64
    assert not model.training


def test_an_embedding_of_another_width(target, changed):
    assert load_target_embedding(target).shape == (40, 16)
    with pytest.raises(ValueError, match=r"stored as \[40, 16\], config.json says hidden_size 32"):
        load_target_embedding(changed(hidden_size=32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ballast_ratio": math.inf, "level": "ballast"}, "--ballast-ratio must be above 1 and finite, got inf"),
        ({"ballast_ratio": math.nan, "level": "ballast"}, "--ballast-ratio must be above 1 and finite, got nan"),
        ({"step_overhead": math.nan}, "--step-overhead must not be negative and must be finite, got nan"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"contexts": 0}, "--contexts must be at least 1, got 0"),
        ({"points_per_row": 1}, "--points-per-row must be at least 2"),
        ({"widening_factor": 3}, r"--widening-factor must be a power of two \(1, 2, 4, ...\), got 3"),
        ({"level": "balast"}, "--level names unknown 'balast'; did you mean 'ballast'"),
    ],
)
def test_options_of_calibrate_cost(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        CalibrateCostConfig(target=tmp_path, out=tmp_path / "cost.json", **options)


def test_calibrate_cost_checks_inputs_before_it_waits_for_quiet(target, tmp_path, monkeypatch):
    monkeypatch.setattr("ecospec.decoding.measurement.load_average", lambda: 9.0)
    options = {"target": target, "out": tmp_path / "cost.json", "prompts": str(tmp_path / "text.jsonl")}
    with pytest.raises(FileNotFoundError, match=r"text.jsonl does not exist"):
        calibrate_cost(CalibrateCostConfig(**options))
    with pytest.raises(FileNotFoundError, match=r"--drafter nowhere: nowhere does not exist"):
        calibrate_cost(CalibrateCostConfig(**options, drafter=Path("nowhere")))


def test_output_files(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="exists; remove it or name another file"):
        require_new_file(tmp_path / "file")
    with pytest.raises(ValueError, match="file is a file, not a folder"):
        require_new_file(tmp_path / "file" / "deep" / "cost.json")
    with pytest.raises(FileExistsError, match="is a folder; name a file in it"):
        require_new_file(tmp_path)
    require_new_file(tmp_path / "new" / "cost.json")


def test_a_drafter_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match=r"model.safetensors does not exist; give a folder with config.json"
    ):
        require_drafter(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_repeats": 0}, "--cost-repeats must be at least 1, got 0"),
        ({"widening_factor": 6}, "--widening-factor must be a power of two"),
        ({"decode_minutes": math.nan}, "--decode-minutes must be above 0 and finite, got nan"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
    ],
)
def test_options_of_the_demo(options, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**options)


def test_the_demo_reads_all_prompts_before_its_first_stage(tmp_path):
    for name in ("target", "drafter", "predictor"):
        (tmp_path / name).mkdir()
    (tmp_path / "groups.json").write_text("{}")
    (tmp_path / "good.jsonl").write_text('{"text": "w1 w2"}\n')
    good = str(tmp_path / "good.jsonl")
    config = DemoConfig(
        checkpoints=tmp_path,
        out=tmp_path / "out",
        train_prompts=good,
        report_prompts=good,
        tuning_prompts=str(tmp_path / "bad.jsonl"),
    )
    with pytest.raises(FileNotFoundError, match=r"--tuning-prompts: .*bad.jsonl does not exist"):
        demo(config)
    assert not (tmp_path / "out").exists()


def test_no_empty_bar_above_an_error(capsys):
    from rich.console import Console

    def fail(bar, *arguments):
        with bar(Console(force_terminal=True), *arguments):
            raise ValueError("nothing to do")

    for bar, arguments in ((collect_progress, ()), (overlap_progress, (5,))):
        with pytest.raises(ValueError, match="nothing to do"):
            fail(bar, *arguments)
    assert capsys.readouterr().out == ""


def test_a_full_disk():
    message = one_line(OSError(errno.ENOSPC, "No space left on device", "runs/traces"))
    assert message.startswith("No space left on device: runs/traces; free space, then run again")


def test_config_files(tmp_path):
    file = tmp_path / "options.yaml"
    for text, message in (
        ("", r"options.yaml is empty; write lines of option: value \(options: out, checkpoints"),
        ("- a\n", "holds a list, not options"),
        ("a: [", "is not YAML"),
        ("decode-minute: 2\n", "unknown option 'decode-minute'; did you mean 'decode_minutes'. allowed: out, "),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            check_config_files(["--config", str(file)], DemoConfig)
    with pytest.raises(FileNotFoundError, match=r"--config .*nowhere.yaml does not exist"):
        check_config_files([f"--config={tmp_path / 'nowhere.yaml'}"], DemoConfig)
    file.write_text("seed: 3\n")
    check_config_files(["--config", str(file)], DemoConfig)


def test_a_damaged_head_config():
    good: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 40}
    good |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "some_field_of_others": 1}
    assert Eagle3Config.from_dict(good).head_dim == 8
    with pytest.raises(
        ValueError, match=r"head/config.json: num_attention_heads must be a positive integer, got 'x'"
    ):
        Eagle3Config.from_dict(good | {"num_attention_heads": "x"}, "head/config.json")
    with pytest.raises(ValueError, match=r"head/config.json: rope_parameters must be an object, got 3"):
        Eagle3Config.from_dict(good | {"rope_parameters": 3}, "head/config.json")
