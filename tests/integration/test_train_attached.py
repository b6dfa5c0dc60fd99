"""``train-attached``: what is learnt, what is read again, the report at every level, and every refusal."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ecospec.cli.main import main, run_verb
from ecospec.decoding import DecodingLoop, LosslessCheck, TargetModel, make_policy
from ecospec.decoding.drafter_states import text_states
from ecospec.decoding.drafters import Eagle3Drafter
from ecospec.predictor import DrafterAttachedPredictor
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.train.arrays import open_stores
from ecospec.train.attached import AttachedTraining, DrafterView, train_attached
from tests.tiny_files import EXPERTS, HIDDEN, LAYERS, TOP_K, VOCAB, save_head, save_target
from tests.trace_files import SPEC, make_arrays, write_store

WIDTH = 6


@pytest.fixture
def dependent(tmp_path):
    """Traces whose experts are a matrix times a vector of the token before; and a drafter that knows it."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((SPEC.vocab_size, WIDTH)).astype(np.float32)
    matrix = rng.standard_normal((WIDTH, SPEC.num_layers * SPEC.num_experts)).astype(np.float32)
    arrays = make_arrays([24] * 60)
    before = np.roll(arrays.tokens, 1)
    scores = (vectors[before] @ matrix).reshape(-1, SPEC.num_layers, SPEC.num_experts)
    experts = np.sort(np.argsort(scores, axis=-1)[..., -SPEC.top_k :], axis=-1).astype(np.uint8)
    write_store(tmp_path / "traces", dataclasses.replace(arrays, experts=experts))
    read = []

    def text_states(ids):
        read.append(len(ids))
        states = torch.zeros(3, len(ids), WIDTH)
        states[:, 1:] = torch.from_numpy(vectors)[ids[:-1]]
        states[2] *= -1  # at the deepest level the drafter misleads
        return states

    view = DrafterView("d" * 64, (2, WIDTH), lambda ids: torch.zeros(*ids.shape, 2), text_states)
    return open_stores([tmp_path / "traces"]), view, read


OPTIONS = AttachedTraining(rank=16, activation="none", depth=2, epochs=8, batch_tokens=96, learning_rate=0.05)


def test_learns_what_the_states_tell(dependent, tmp_path):
    """Where the states tell the experts, they are learnt; where the sign is turned, a matrix cannot know."""
    stores, view, read = dependent
    epochs = []
    predictor = train_attached(
        stores, tmp_path / "cache", view, OPTIONS, on_epoch=lambda *line: epochs.append(line)
    )
    metrics = predictor.config.metrics
    assert len(epochs) == 8
    assert epochs[-1][1] < epochs[0][1]
    assert metrics["val_overlap"] == pytest.approx(np.mean([metrics[f"val_overlap_depth_{d}"] for d in range(3)]))
    assert metrics["val_overlap_depth_0"] == metrics["val_overlap_depth_1"] > metrics["val_overlap_frequency"] + 0.2
    assert metrics["val_overlap_depth_2"] < metrics["val_overlap_depth_0"] - 0.2
    assert len(predictor.config.temperature) == SPEC.num_layers
    assert len(read) == 60
    # The same options give the same predictor, from the file alone.
    again = train_attached(stores, tmp_path / "cache", view, OPTIONS)
    assert len(read) == 60
    assert torch.equal(again.heads.up.weight, predictor.heads.up.weight)
    assert again.config == predictor.config


def test_only_the_start_of_long_sequences_is_used(dependent, tmp_path):
    stores, view, read = dependent
    options = dataclasses.replace(OPTIONS, max_length=10, epochs=1)
    predictor = train_attached(stores, tmp_path / "cache", view, options)
    assert read == [10] * 60
    assert predictor.config.training_data["tokens"] == 10 * predictor.config.training_data["sequences"]


def test_a_loss_that_is_not_finite_is_one_line(dependent, tmp_path):
    stores, view, _ = dependent
    broken = dataclasses.replace(view, text_states=lambda ids: torch.full((3, len(ids), WIDTH), float("nan")))
    with pytest.raises(
        ValueError, match="the loss is not finite in epoch 0; start again with a lower --learning-rate"
    ):
        train_attached(stores, tmp_path / "cache", broken, OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"depth": -1}, "depth must be at least 0, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must lie between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0 and below 1"),
        ({"calibration_fraction": 0.9}, "calibration_fraction must be at least 0 and leave groups for training"),
        ({"activation": "relu"}, "unknown activation 'relu'"),
    ],
)
def test_options_are_validated(changes, message):
    with pytest.raises(ValueError, match=message):
        AttachedTraining(**changes)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("attached")
    target = save_target(root / "target")
    save_head(root / "drafter", target)
    save_head(root / "other", target, seed=9)
    spec = routing_spec_of(target)
    write_store(root / "traces", make_arrays([20] * 16, spec=spec))
    write_store(root / "tuning", make_arrays([14] * 4, groups=[f"t{i}" for i in range(4)], seed=1, spec=spec))
    run_verb("train-attached", _training(root, root / "attached"))
    return root


def _training(root, out, **changes):
    values = {"target": root / "target", "drafter": root / "drafter", "traces": root / "traces", "out": out}
    values |= {"epochs": 2, "rank": 8, "calibration_fraction": 0} | changes
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def _report(root, out, **changes):
    values = {"target": root / "target", "traces": root / "tuning", "predictor": root / "attached", "out": out}
    values |= {"baseline_traces": root / "traces", "drafter": root / "drafter", "depth": 2} | changes
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def _parts(root):
    model = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32).eval()
    drafter = Eagle3Drafter.from_pretrained(root / "drafter", model)
    return TargetModel(model, routing_spec_of(root / "target")), drafter


def test_report_shows_it_at_every_level(files, tmp_path):
    """The report's overlap at each level is that of scores made here from the drafter's states, token by token."""
    run_verb("report-overlap", _report(files, tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    target, drafter = _parts(files)
    heads = DrafterAttachedPredictor.from_pretrained(files / "attached")
    for level in range(3):
        hits = total = 0
        for row in open_stores([files / "tuning"])[0].iter_sequences(["experts"]):
            ids = torch.tensor(row.token_ids[: row.num_processed].astype(np.int64))
            before = text_states(target, drafter, ids, depth=2)[level]
            scores = heads.score_states(torch.cat((drafter.token_states(ids), before), dim=-1)).numpy()
            found = np.argsort(scores, axis=-1)[..., -TOP_K:]
            true = np.asarray(row.experts).reshape(-1, LAYERS, TOP_K)
            hits += (found[..., None] == true[..., None, :]).sum()
            total += true.size
        assert report["predictors"][f"attached@{level}"]["overlap"]["mean"] == pytest.approx(hits / total)
    assert "attached@3" not in report["predictors"]
    assert "NAME@d scores each token as a node d levels below the root" in report["notes"][-1]


def test_the_trained_bundle_decodes_losslessly(files):
    target, drafter = _parts(files)
    predictor = DrafterAttachedPredictor.from_pretrained(files / "attached", require_spec=target.spec)
    assert predictor.heads.up.weight.shape == (LAYERS * EXPERTS, 8)
    assert predictor.heads.down.weight.shape == (8, 2 * HIDDEN)
    prompt = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(0))
    plain = DecodingLoop(target, None, None, make_policy("autoregressive")).generate(prompt, 16)
    found = DecodingLoop(target, drafter, predictor, make_policy("ecospec")).generate(prompt, 16)
    check = LosslessCheck(target.model)
    check.compare(prompt.tolist(), plain.tokens, found.tokens)
    assert check.summary()["mismatches"] == 0


def _refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert "\n" not in error
    return error


def test_reports_refuse_the_wrong_drafter(files, tmp_path, capsys):
    error = _refused(["report-overlap", *_report(files, tmp_path / "a", drafter=None)], capsys)
    assert "predictor attached reads the hidden states of a drafter; name it with --drafter" in error
    error = _refused(["report-overlap", *_report(files, tmp_path / "b", drafter=files / "other")], capsys)
    assert "the predictor reads the hidden states of another drafter: state fingerprint" in error
    error = _refused(["report-overlap", *_report(files, tmp_path / "c", depth=-1)], capsys)
    assert "--depth must be at least 0, got -1" in error


def test_decoding_refuses_the_wrong_drafter(files, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2 w3 w4 w5", "group_id": "p"}\n')
    arguments = ["--target", files / "target", "--drafter", files / "other", "--predictor", files / "attached"]
    arguments += ["--policies", "autoregressive,ecospec", "--levels", "bare", "--widening-factor", 1, "--number", 1]
    arguments += ["--prompts", tmp_path / "prompts.jsonl", "--allow-load", "--out", tmp_path / "out"]
    error = _refused(["benchmark-decoding", *map(str, arguments)], capsys)
    assert "the predictor reads the hidden states of another drafter: state fingerprint" in error


def test_training_refuses_what_does_not_fit(files, tmp_path, capsys):
    save_target(tmp_path / "stranger", seed=5)
    error = _refused(["train-attached", *_training(files, tmp_path / "a", target=tmp_path / "stranger")], capsys)
    assert "target_fingerprint" in error
    error = _refused(["train-attached", *_training(files, files / "attached")], capsys)
    assert "is not empty; name a new folder" in error
    error = _refused(["train-attached", *_training(files, tmp_path / "b", drafter=tmp_path / "none")], capsys)
    assert "none does not exist; give a folder with config.json" in error
    error = _refused(["train-attached", *_training(files, tmp_path / "c", validation_fraction=0.001)], capsys)
    assert "the validation split is empty" in error
