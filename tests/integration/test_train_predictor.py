"""train-predictor and export-predictor on a synthetic store: learning, resume, export, and every refusal."""

import dataclasses
import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ecospec.cli.main import run_verb
from ecospec.predictor import ExpertPredictor, load_target_embedding, routing_spec_of
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train import module as training_module
from ecospec.train.baselines import best_table
from ecospec.train.checkpoints import AtomicCheckpointIO
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.export import export_predictor, load_trained
from ecospec.train.fit import train_predictor
from ecospec.train.losses import objective_loss

VOCAB, LAYERS, EXPERTS, TOP_K = 40, 2, 8, 2
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16}


def save_target(path, seed):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def synthetic_traces(count, seed):
    """Routing that depends on the last three tokens, so that a bigram table cannot know it."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        tokens = rng.integers(0, VOCAB, int(rng.integers(20, 60)), dtype=np.int32)
        before = np.concatenate([[0, 0], tokens])
        state = (before[:-2] % 2) * 4 + (before[1:-1] % 2) * 2 + before[2:] % 2  # 0 to 7
        first = np.stack([state, (state * 3 + 1) % EXPERTS], axis=1)  # [n, L]
        experts = np.sort(np.stack([first, (first + 1) % EXPERTS], axis=-1), axis=-1).astype(np.uint8)
        yield RoutingTrace(
            sequence_id=f"sequence{seed}-{number}",
            group_id=f"document{number // 2}",
            dataset="synthetic",
            category="",
            token_ids=tokens,
            prompt_length=len(tokens),
            origin="teacher_forced",
            experts=experts,
            weights=None,
            finish_reason="text",
        )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("models") / "target", 0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory, target):
    path = tmp_path_factory.mktemp("traces") / "store"
    with TraceStoreWriter(path, routing_spec_of(target)) as writer:
        writer.append(list(synthetic_traces(160, 0)))
    return path


@pytest.fixture
def config(target, traces, tmp_path):
    return TrainPredictorConfig(
        target=target,
        traces=str(traces),
        out=tmp_path / "run",
        backbone=SMALL,
        context_length=32,
        batch_tokens=128,
        max_epochs=6,
        learning_rate=5e-3,
        token_dropout=0.02,
        threads=1,
    )


@pytest.fixture(scope="module")
def trained(target, traces, tmp_path_factory):
    out = tmp_path_factory.mktemp("training") / "run"
    run_verb(
        "train-predictor",
        [
            *("--target", str(target), "--traces", str(traces), "--out", str(out), "--threads", "1"),
            *("--backbone", json.dumps(SMALL), "--context_length", "32", "--batch_tokens", "128"),
            *("--max_epochs", "6", "--learning_rate", "5e-3"),
        ],
    )
    return out


def test_learns_what_tables_cannot_and_keeps_evidence(trained, target):
    best = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)
    run, metrics = best["ecospec"]["run"], best["ecospec"]["metrics"]
    _, table = best_table(run["baseline_overlaps"])
    assert table > run["baseline_overlaps"]["random"] == pytest.approx(TOP_K / EXPERTS, abs=0.03)
    assert metrics["val_overlap"] > table + 0.10
    assert not [name for name in best["state_dict"] if "embed" in name], "the target's embedding is not stored"
    assert run["options"]["target"] == str(target)
    parts = ("groups", "validation_groups", "calibration_groups", "held_out_groups")
    assert sum(run["training_data"][part] for part in parts) == 80
    assert 0 < run["padding_share"] < 0.10
    assert run["provenance"]["versions"]["torch"]
    assert (trained / "logs" / "csv_0" / "metrics.csv").read_text().startswith("epoch")
    assert list((trained / "logs" / "tensorboard_0").glob("events*"))
    assert json.loads((trained / "run.json").read_text()) == run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_predictor_equals_the_trained_one(trained, target, tmp_path, dtype):
    out = tmp_path / "bundle"
    options = ["--checkpoint", str(trained), "--target", str(target), "--out", str(out), "--dtype", dtype]
    run_verb("export-predictor", options)
    model, saved = load_trained(trained / "checkpoints" / "best.ckpt", target)
    if dtype == "bfloat16":
        model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    predictor = ExpertPredictor.from_pretrained(
        out, target_embedding=load_target_embedding(target, dtype=torch.float32), dtype=torch.float32
    )
    ids = torch.randint(VOCAB, (3, 50), generator=torch.Generator().manual_seed(7))
    temperature = torch.tensor(saved["temperature"])
    assert predictor.config.temperature == tuple(saved["temperature"])
    with torch.no_grad():
        calibrated = model(ids) / temperature.view(-1, 1)
        torch.testing.assert_close(predictor.score_batch(ids), calibrated, atol=2e-5, rtol=0)
    assert predictor.spec == routing_spec_of(target)
    assert predictor.config.metrics["val_overlap"] == saved["metrics"]["val_overlap"]
    assert predictor.config.training_data["fingerprint"] == saved["run"]["training_data"]["fingerprint"]
    assert set(predictor.config.provenance) == {"training", "export"}
    with pytest.raises(ValueError, match=r"is not empty; name a new folder$"):
        run_verb("export-predictor", options)


def test_interrupted_and_resumed_equals_uninterrupted(config, tmp_path):
    short = dataclasses.replace(config, max_epochs=4)
    whole = train_predictor(short)

    class KillInEpochTwo(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 2 and batch_idx == 3:
                raise RuntimeError("killed")

    broken = dataclasses.replace(short, out=tmp_path / "broken")
    with pytest.raises(RuntimeError, match="killed"):
        train_predictor(broken, callbacks=[KillInEpochTwo()])
    resumed = train_predictor(dataclasses.replace(broken, resume=True))
    one, two = (torch.load(r.last, weights_only=True) for r in (whole, resumed))
    assert one["global_step"] == two["global_step"]
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, atol=0, rtol=0, msg=name)
    assert whole.overlap == resumed.overlap
    assert len(list((broken.out / "logs").glob("csv_*"))) == 2


def test_more_cycles_prolong_a_finished_run_exactly(config, tmp_path):
    once = dataclasses.replace(config, max_epochs=2)
    train_predictor(once)
    prolonged = train_predictor(dataclasses.replace(once, max_epochs=4, cycles=2, resume=True))
    whole = train_predictor(dataclasses.replace(once, max_epochs=4, cycles=2, out=tmp_path / "whole"))
    one, two = (torch.load(r.last, weights_only=True) for r in (whole, prolonged))
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, atol=0, rtol=0, msg=name)
    with pytest.raises(ValueError, match=r"was trained with --max_epochs 4, this run has 6; resume with"):
        train_predictor(dataclasses.replace(once, max_epochs=6, cycles=2, resume=True))


def test_time_budget_ends_the_run_with_a_checkpoint(config):
    result = train_predictor(dataclasses.replace(config, max_epochs=100_000, max_minutes=0.03))
    last = torch.load(result.last, weights_only=True)
    assert 0.02 * 60 < last["ecospec"]["seconds"] < 20
    rates = [group["lr"] for group in last["optimizer_states"][0]["param_groups"]]
    assert max(rates) < 1e-4, "the learning rate follows the time budget to 0"
    assert result.overlap > 0


def test_refusals(config, target, traces, trained, tmp_path):
    with pytest.raises(ValueError, match=r"holds a training run; name a new folder, or resume"):
        train_predictor(dataclasses.replace(config, out=trained))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train_predictor(dataclasses.replace(config, traces=f"{traces},{tmp_path / 'nowhere'}"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train_predictor(dataclasses.replace(config, target=tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"the validation split is empty: 80 groups"):
        train_predictor(dataclasses.replace(config, validation_fraction=1e-9))
    other = save_target(tmp_path / "other", 1)
    with pytest.raises(ValueError, match=r"traces .* was made for another target than target .*other"):
        train_predictor(dataclasses.replace(config, target=other))
    with pytest.raises(ValueError, match=r"checkpoint .* was made for another target"):
        export_predictor(trained, other, tmp_path / "bundle")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        export_predictor(tmp_path / "nowhere", target, tmp_path / "bundle")
    (tmp_path / "broken.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="is not a checkpoint of train-predictor"):
        export_predictor(tmp_path / "broken.ckpt", target, tmp_path / "bundle")
    with pytest.raises(ValueError, match="unknown backbone preset 'tiney'; did you mean 'tiny'"):
        train_predictor(dataclasses.replace(config, preset="tiney", backbone=None))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"traces": " , "}, "names no trace store"),
        ({"traces": "a,,b"}, "traces 'a,,b' holds an empty entry"),
        ({"max_minutes": math.inf}, "max_minutes must be above 0 and finite"),
        ({"validation_fraction": math.nan}, "validation_fraction must lie between 0 and 1"),
        ({"learning_rate": math.inf}, "learning_rate must be above 0 and finite"),
        ({"muon_learning_rate": math.nan}, "muon_learning_rate must be above 0 and finite"),
        ({"gradient_clip": math.inf}, "gradient_clip must be above 0 and finite"),
        ({"weight_decay": math.nan}, "weight_decay must not be negative and must be finite"),
        ({"beta2": math.nan}, "beta2 must be at least 0 and below 1"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63"),
        ({"dtype": "float16"}, "unknown dtype 'float16'; did you mean 'bfloat16'. allowed: float32, bfloat16"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean 'adamw'. allowed: muon, adamw"),
        (
            {"objective": "bse"},
            "unknown objective 'bse'; did you mean 'bce'. allowed: cross_entropy, bce, router_w",
        ),
        ({"input_mode": "target"}, "unknown input_mode 'target'; .*allowed: target_embedding, backbone_embedding"),
        ({"finetune": "head"}, "unknown finetune 'head'; did you mean 'heads'. allowed: full, lora, heads"),
        ({"finetune": "lora"}, "finetune lora keeps pretrained weights, and there are none; give --backbone_path"),
        ({"backbone_path": "x"}, "backbone_path brings its own config; leave out preset and backbone"),
        (
            {"backbone_path": "x", "backbone": None, "finetune": "lora", "optimizer": "muon"},
            "optimizer muon moves whole matrices, LoRA trains factors of them; use adamw",
        ),
        ({"objective": "router_weighted", "tree_traces": "trees"}, "draft trees hold none; use bce"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"lora_alpha": math.nan}, "lora_alpha must be above 0 and finite"),
        ({"backbone_learning_rate": 0.0}, "backbone_learning_rate must be above 0 and finite"),
        ({"max_epochs": 0}, "max_epochs must be at least 1"),
        ({"max_minutes": 0.0}, "max_minutes must be above 0"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_options_are_validated(config, change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(config, **change)


def test_changed_trace_bytes_are_refused(config, traces, tmp_path):
    damaged = shutil.copytree(traces, tmp_path / "damaged")
    shard = damaged / "shard-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00000\.parquet does not match its checksum; restore it"):
        train_predictor(dataclasses.replace(config, traces=str(damaged)))


def copy_run(trained, config, tmp_path):
    """A copy of the finished run, and the config that resumes it."""
    out = shutil.copytree(trained, tmp_path / "copy")
    return out, dataclasses.replace(config, out=out, token_dropout=0.0, resume=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"learning_rate": 1e-3}, r"was trained with --learning_rate 0\.005, this run has 0\.001; resume with"),
        ({"max_epochs": 9}, "was trained with --max_epochs 6, this run has 9"),
        ({"max_minutes": 1.0}, "was trained with --max_minutes none, this run has 1.0"),
        ({"backbone": SMALL | {"num_hidden_layers": 1}}, "was trained with --backbone"),
        ({"seed": 1}, "was trained with --seed 0, this run has 1"),
    ],
)
def test_resume_refuses_changed_options(trained, config, tmp_path, change, match):
    out, resumed = copy_run(trained, config, tmp_path)
    before = (out / "run.json").read_bytes()
    with pytest.raises(ValueError, match=match):
        train_predictor(dataclasses.replace(resumed, **change))
    assert (out / "run.json").read_bytes() == before


def test_resume_compares_traces_by_content(trained, config, traces, target, tmp_path):
    _, resumed = copy_run(trained, config, tmp_path)
    moved = shutil.copytree(traces, tmp_path / "moved")
    train_predictor(dataclasses.replace(resumed, traces=str(moved)))
    with TraceStoreWriter(tmp_path / "others", routing_spec_of(target)) as writer:
        writer.append(list(synthetic_traces(40, 5)))
    with pytest.raises(ValueError, match=r"was trained on other --traces .*store"):
        train_predictor(dataclasses.replace(resumed, traces=str(tmp_path / "others")))


def test_truncated_checkpoints_are_named(trained, config, target, tmp_path):
    out, resumed = copy_run(trained, config, tmp_path)
    for name in ("last.ckpt", "best.ckpt"):
        file = out / "checkpoints" / name
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"last\.ckpt is not a checkpoint of train-predictor, or is truncated"):
        train_predictor(resumed)
    with pytest.raises(ValueError, match=r"best\.ckpt is not a checkpoint of train-predictor, or is truncated"):
        export_predictor(out, target, tmp_path / "bundle")


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, path)

    def full_disk(_content, handle):
        handle.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"epoch": 2}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_training_stops_when_the_loss_is_not_finite(config, monkeypatch, factor):
    calls = []

    def broken(*arguments):
        calls.append(1)
        return objective_loss(*arguments) * (factor if len(calls) == 4 else 1.0)

    monkeypatch.setattr(training_module, "objective_loss", broken)
    with pytest.raises(ValueError, match=r"the loss is not finite at step 3; start again .* lower --learning_rate"):
        train_predictor(config)
    assert not list(config.out.rglob("*.ckpt")), "no checkpoint holds broken weights"


@pytest.mark.parametrize(
    ("backbone", "match"),
    [
        ({"num_layers": 2}, "backbone field 'num_layers' is unknown to 'qwen3'; allowed: .*num_hidden_layers"),
        ({"num_hidden_layers": "two"}, "backbone field num_hidden_layers must be a positive integer, got 'two'"),
        ({"num_hidden_layers": 0}, "backbone field num_hidden_layers must be a positive integer, got 0"),
        ({"hidden_size": -8}, "backbone field hidden_size must be a positive integer, got -8"),
        ({"num_key_value_heads": 2}, r"num_attention_heads \(3\) must be a multiple of num_key_value_heads \(2\)"),
        ({"head_dim": 7}, "backbone field head_dim must be even"),
        ({"hidden_act": "nosuch"}, r"--backbone \{'hidden_act': 'nosuch'\} does not work with the preset"),
        ({"rms_norm_eps": "tiny"}, "(?s)backbone configuration of model_type 'qwen3': .*rms_norm_eps"),
        ({"model_type": "nosuch"}, "backbone configuration of model_type 'nosuch'"),
    ],
)
def test_bad_backbones_are_refused(config, backbone, match):
    with pytest.raises(ValueError, match=match) as caught:
        train_predictor(dataclasses.replace(config, backbone=backbone))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_is_a_keyboard_interrupt_and_can_be_resumed(config, number):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                os.kill(os.getpid(), number)

    handler = signal.getsignal(signal.SIGINT)
    short = dataclasses.replace(config, max_epochs=2)
    with pytest.raises(KeyboardInterrupt):
        train_predictor(short, callbacks=[Interrupt()])
    assert signal.getsignal(signal.SIGINT) is handler
    assert train_predictor(dataclasses.replace(short, resume=True)).overlap > 0
