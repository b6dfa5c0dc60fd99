"""What is trained and how: input modes, heads, fine-tuning, objectives, calibration, and the refusals of each."""

import csv
import dataclasses
import functools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ecospec.cli.main import main
from ecospec.predictor import ExpertPredictor, load_target_embedding, routing_spec_of
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.calibration import TemperatureFit
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.export import export_predictor, load_trained
from ecospec.train.fit import train_predictor
from ecospec.train.network import new_model
from ecospec.train.optimizer import parameter_groups
from ecospec.train.run_data import prepare_data
from tests.integration.test_train_predictor import EXPERTS, LAYERS, SMALL, VOCAB, save_target, synthetic_traces
from tests.unit.test_predictor_model import save_backbone

IDS = torch.randint(VOCAB, (3, 50), generator=torch.Generator().manual_seed(7))


def with_weights(trace):
    """Router weights that are a function of the experts."""
    share = ((trace.experts % 3) + 1).astype(np.float16) / 4
    return dataclasses.replace(trace, weights=share)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A target, traces of it with and without router weights, and a pretrained backbone of its vocabulary."""
    root = tmp_path_factory.mktemp("variants")
    save_target(root / "target", 0)
    spec = routing_spec_of(root / "target")
    for name, change in (("traces", lambda trace: trace), ("weighted", with_weights)):
        with TraceStoreWriter(root / name, spec, weights=name == "weighted") as writer:
            writer.append([change(trace) for trace in synthetic_traces(80, 0)])
    save_backbone(root / "backbone", words={f"w{i}": i for i in range(VOCAB)})
    save_backbone(root / "foreign", words={f"v{i}": i for i in range(VOCAB)})
    return root


@pytest.fixture
def config(places, tmp_path):
    return TrainPredictorConfig(
        target=places / "target",
        traces=str(places / "traces"),
        out=tmp_path / "run",
        backbone=SMALL,
        context_length=32,
        batch_tokens=256,
        max_epochs=2,
        learning_rate=5e-3,
        calibration_fraction=0.2,
        threads=1,
    )


def tuned(config, places, **changes):
    """A config that starts from the pretrained backbone."""
    fields = {"backbone": None, "backbone_path": str(places / "backbone"), "lora_rank": 3, "lora_alpha": 9.0}
    return dataclasses.replace(config, **(fields | changes))


def exported(config):
    """Train and export; the trained network, what its checkpoint says, and the loaded bundle."""
    result = train_predictor(config)
    bundle = config.out / "bundle"
    export_predictor(result.best, config.target, bundle)
    model, saved = load_trained(result.best, config.target)
    embedding = load_target_embedding(config.target, dtype=torch.float32)
    return model, saved, ExpertPredictor.from_pretrained(bundle, target_embedding=embedding)


def losses(config):
    """Training loss of every epoch, from the CSV log."""
    with (config.out / "logs" / "csv_0" / "metrics.csv").open() as file:
        return [float(row["train_loss_epoch"]) for row in csv.DictReader(file) if row["train_loss_epoch"]]


@pytest.mark.parametrize("input_mode", ["target_embedding", "backbone_embedding"])
@pytest.mark.parametrize("finetune", ["full", "lora", "heads"])
def test_fine_tuning_moves_what_it_should_and_exports_what_was_trained(config, places, finetune, input_mode):
    model, saved, predictor = exported(tuned(config, places, finetune=finetune, input_mode=input_mode))
    with torch.no_grad():
        torch.testing.assert_close(predictor.model(IDS), model(IDS), atol=1e-5, rtol=0)
    assert not [name for name in predictor.state_dict() if "lora" in name or "base_layer" in name]
    pretrained = {f"backbone.{k.removeprefix('model.')}": v for k, v in backbone_weights(places).items()}
    stored = {name: value for name, value in predictor.model.state_dict().items() if name in pretrained}
    own_table = "backbone.embed_tokens.weight"
    assert (own_table in stored) == (input_mode == "backbone_embedding")
    moved = {name for name, value in stored.items() if not torch.equal(value, pretrained[name])}
    if finetune == "heads":
        assert not moved
    elif finetune == "lora":
        assert moved == {name for name in stored if "_proj." in name}
        for name in moved:
            change = stored[name] - pretrained[name]
            assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 3, name
    else:
        assert moved == set(stored)
    assert saved["run"]["options"]["optimizer"] == "adamw"
    assert predictor.config.options["finetune"] == finetune
    assert (predictor.config.embedding_size is None) == (input_mode == "backbone_embedding")
    first, last = losses(dataclasses.replace(config))
    assert last < first


def backbone_weights(places):
    return load_file(places / "backbone" / "model.safetensors")


def test_a_lora_bundle_needs_no_peft(config, places, tmp_path):
    result = train_predictor(
        tuned(config, places, finetune="lora", lora_target_modules="q_proj, v_proj", max_epochs=1)
    )
    export_predictor(result.best, config.target, tmp_path / "bundle")
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "from ecospec.predictor import load_predictor\n"
        f"print(type(load_predictor({str(tmp_path / 'bundle')!r})).__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "ExpertPredictor"


def test_from_scratch_with_its_own_embedding_and_a_low_rank_head(config):
    model, saved, predictor = exported(dataclasses.replace(config, input_mode="backbone_embedding", head_rank=6))
    with torch.no_grad():
        torch.testing.assert_close(predictor.model(IDS), model(IDS), atol=1e-5, rtol=0)
    stored = load_file(config.out / "bundle" / "model.safetensors")
    assert stored["backbone.embed_tokens.weight"].shape == (VOCAB, SMALL["hidden_size"])
    assert stored["head_down.weight"].shape == (6, SMALL["hidden_size"])
    assert "projection.weight" not in stored
    assert (predictor.config.head_rank, predictor.config.input_mode) == (6, "backbone_embedding")
    assert saved["run"]["options"]["optimizer"] == "muon"


def test_the_loss_curve_is_pinned(config):
    """Two epochs of the paper's loss, from near log 8; another curve means another method, seed or order."""
    train_predictor(config)
    assert losses(config) == pytest.approx([2.08280, 2.06866], rel=2e-4)


def test_objectives_train_and_router_weights_arrive_with_their_experts(config, places):
    for objective in ("bce", "router_weighted"):
        store = "weighted" if objective == "router_weighted" else "traces"
        changed = dataclasses.replace(
            config, objective=objective, traces=str(places / store), out=config.out / objective
        )
        train_predictor(changed)
        first, last = losses(changed)
        # Where it starts: of all-zero scores bce is log 2, cross-entropy log E.
        assert last < first < (1.1 * math.log(2) if objective == "bce" else 1.05 * math.log(EXPERTS))
    data = prepare_data(dataclasses.replace(changed, out=config.out / "data"), routing_spec_of(places / "target"))
    for batch in data.module.val_dataloader():
        expected = ((batch["experts"] % 3) + 1).half() / 4 * batch["mask"][..., None, None]
        assert torch.equal(batch["weights"], expected)
    with pytest.raises(ValueError, match=r"traces .*traces hold no router weights, .*collect them with --weights"):
        train_predictor(dataclasses.replace(config, objective="router_weighted"))


def test_temperatures_are_those_of_the_calibration_split(config):
    model, saved, predictor = exported(config)
    data = prepare_data(dataclasses.replace(config, resume=True), predictor.spec)
    fit = TemperatureFit(LAYERS)
    for batch in data.module.calibration_dataloader():
        with torch.no_grad():
            fit.update(model(batch["input_ids"]), batch["experts"], batch["mask"])
    assert saved["temperature"] == pytest.approx(fit.compute().tolist(), rel=1e-4)
    assert predictor.config.temperature == tuple(saved["temperature"])
    assert all(value != 1 for value in saved["temperature"])
    metrics = predictor.config.metrics
    assert 0 < metrics["val_calibration_error_calibrated"] < 1
    assert metrics["val_calibration_error_raw"] != metrics["val_calibration_error_calibrated"]
    session = predictor.session()
    session.prefill(IDS[0, :5])
    scores = session.score(IDS[0, 5:6], torch.tensor([-1]))
    with torch.no_grad():
        expected = predictor.model(IDS[:1, :6])[0, -1] / torch.tensor(saved["temperature"]).view(-1, 1)
    torch.testing.assert_close(scores[0], expected, atol=1e-4, rtol=1e-4)


def test_without_a_calibration_split_temperatures_stay_one(config):
    result = train_predictor(dataclasses.replace(config, calibration_fraction=0.0, max_epochs=1))
    assert torch.load(result.best, weights_only=True)["ecospec"]["temperature"] == [1.0] * LAYERS


def test_checkpointing_compiling_and_bfloat16(config):
    """Checkpointing computes the same; compile leaves the names of the weights; bfloat16 keeps float32 weights."""
    plain = torch.load(train_predictor(config).last, weights_only=True)
    for name, changes in (
        ("checkpointing", {"gradient_checkpointing": True}),
        ("compile", {"compile": True}),
        ("bfloat16", {"dtype": "bfloat16"}),
    ):
        with torch.compiler.set_stance("force_eager"):  # that compiled code is right is the slow test's business
            result = train_predictor(dataclasses.replace(config, out=config.out / name, **changes))
        found = torch.load(result.last, weights_only=True)
        assert found["state_dict"].keys() == plain["state_dict"].keys()
        assert {value.dtype for key, value in found["state_dict"].items() if key.startswith("model.")} == {
            torch.float32
        }
        if name != "bfloat16":
            for key, value in plain["state_dict"].items():
                torch.testing.assert_close(found["state_dict"][key], value, atol=1e-5, rtol=0, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_is_plain_training(config, monkeypatch, backend):
    """``aot_eager`` traces forward and backward for any shape; ``inductor`` also compiles them with g++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    curves = []
    for name in (False, True):
        changed = dataclasses.replace(config, out=config.out / str(name), compile=name)
        train_predictor(changed)
        curves.append(losses(changed))
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_parameter_groups(config, places):
    spec = routing_spec_of(places / "target")
    model = new_model(spec, dataclasses.replace(config, input_mode="backbone_embedding"))
    groups = parameter_groups(model, config)
    assert [(group["muon"], group["lr"], group["weight_decay"]) for group in groups] == [
        (True, 0.02, 0.05),
        (False, 5e-3, 0.05),
        (False, 5e-3, 0.0),
    ]
    table = model.backbone.get_parameter("embed_tokens.weight")
    assert any(parameter is table for parameter in groups[1]["params"]), "Muon does not move embeddings"
    lora = tuned(config, places, finetune="lora")
    groups = parameter_groups(new_model(spec, lora), lora)
    assert [(group["muon"], group["lr"], group["weight_decay"]) for group in groups] == [
        (False, 2e-4, 0.05),
        (False, 5e-3, 0.05),
        (False, 5e-3, 0.0),
    ]
    assert len(groups[0]["params"]) == 2 * 7 * 2, "A and B of seven projections in two layers"
    with pytest.raises(
        ValueError, match=r"--lora_target_modules names 'query', .*allowed: all-linear, or of down_proj"
    ):
        new_model(spec, tuned(config, places, finetune="lora", lora_target_modules="query"))


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--backbone_path", "{places}/foreign", "--input_mode", "backbone_embedding"],
            "needs one vocabulary; the",
        ),
        (["--backbone_path", "{places}/nowhere"], "backbone "),
        (["--preset", "qwen3-06b"], "unknown backbone preset 'qwen3-06b'; did you mean 'qwen3-0.6b'?"),
        (["--objective", "bse"], "unknown objective 'bse'; did you mean 'bce'?"),
        (["--input-mode", "own"], "unknown input_mode 'own'; "),
        (["--finetune", "lora"], "give --backbone_path"),
        (["--head-rank", "99"], "head_rank must lie between 1 and 15"),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_refusals_are_one_line_and_exit_2(places, tmp_path, capsys, options, message):
    argv = ["--target", str(places / "target"), "--traces", str(places / "traces"), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stopped:
        main(["train-predictor", *argv, *[option.replace("{places}", str(places)) for option in options]])
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_export_refuses_a_bundle_path_that_exists(config, tmp_path, capsys):
    result = train_predictor(dataclasses.replace(config, max_epochs=1))
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({}))
    argv = ["--checkpoint", str(result.best), "--target", str(config.target), "--out", str(out)]
    with pytest.raises(SystemExit) as stopped:
        main(["export-predictor", *argv])
    assert stopped.value.code == 2
    assert "bundle is not empty; name a new folder" in capsys.readouterr().err
