"""``fit-baselines`` from traces to bundles, and the bundles in reports and in decoding."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ecospec.cli.main import main, run_verb
from ecospec.predictor.bundle import load_predictor
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.arrays import open_stores, read_arrays
from ecospec.train.baselines import mean_overlap
from ecospec.train.splits import TRAINING, VALIDATION, SplitConfig, split_arrays
from tests.tiny_files import EXPERTS, LAYERS, VOCAB, save_head, save_prompts, save_target

KINDS = {
    "random": "random",
    "frequency": "frequency",
    "token_table": "token_ranking",
    "bigram_table": "bigram_ranking",
    "last_token": "last_token",
    "mlp": "mlp",
}
SMALL = ("--hidden_size", "32", "--epochs", "10", "--batch_tokens", "128", "--learning_rate", "1e-2")


def _write_store(path, target, numbers, seed):
    """Routing by the token, the one before it, and the one before that."""
    rng = np.random.default_rng(seed)
    with TraceStoreWriter(path, routing_spec_of(target)) as writer:
        for number in numbers:
            tokens = rng.integers(0, VOCAB, 60, dtype=np.int32)
            before = np.stack([np.roll(tokens, back) for back in range(LAYERS)], axis=1)
            experts = np.stack([tokens[:, None].repeat(LAYERS, 1) % 4, 4 + before % 4], axis=-1).astype(np.uint8)
            assert experts.max() < EXPERTS
            trace = RoutingTrace(
                f"s{number}",
                f"{number:016x}",
                "d",
                "",
                tokens,
                len(tokens),
                "teacher_forced",
                experts,
                None,
                "text",
            )
            writer.append([trace])
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("baselines")
    target = save_target(root / "target")
    save_head(root / "drafter", target)
    save_prompts(root / "prompts.jsonl", 2, 1)
    _write_store(root / "traces", target, range(30), 1)
    _write_store(root / "report", target, range(100, 108), 2)
    run_verb("fit-baselines", _arguments(root, root / "fitted"))
    return root


def _arguments(files, out, **changes):
    values = {"target": files / "target", "traces": files / "traces", "out": out} | changes
    return [part for name, value in values.items() for part in (f"--{name}", str(value))] + list(SMALL)


def test_every_bundle_was_fitted_on_the_training_split(files, tmp_path, capsys):
    run_verb("fit-baselines", _arguments(files, tmp_path / "out", cache=tmp_path / "arrays"))
    shown = " ".join(capsys.readouterr().out.split())
    arrays = read_arrays(open_stores([files / "traces"]))
    codes = split_arrays(arrays, SplitConfig(calibration_fraction=None))
    training, validation = (arrays.subset(codes == code) for code in (TRAINING, VALIDATION))
    assert f"{len(training.tokens):,} tokens of {len(training.lengths)} groups" in shown
    assert "mlp: epoch 10/10" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(KINDS)
    embedding = load_target_embedding(files / "target", dtype=torch.float32)
    overlaps = {}
    for name, kind in KINDS.items():
        predictor = load_predictor(tmp_path / "out" / name, target_embedding=embedding)
        assert predictor.config.kind == kind
        overlaps[name] = mean_overlap(predictor, validation)
        assert predictor.config.metrics["val_overlap"] == pytest.approx(overlaps[name], abs=1e-6)
        assert f"out/{name}: validation overlap {overlaps[name]:.4f}" in shown
        assert "argv" in predictor.config.provenance
        if name != "random":
            assert predictor.config.training_data["fingerprint"] == training.fingerprint()
            assert predictor.config.training_data["group_ids"] == sorted(set(training.group_ids))
    assert overlaps["mlp"] > overlaps["bigram_table"] > overlaps["token_table"] > overlaps["random"]
    again = load_predictor(files / "fitted" / "mlp", target_embedding=embedding)
    assert torch.equal(again.score_sequence(torch.arange(9)), predictor.score_sequence(torch.arange(9)))


def test_options_reach_what_is_fitted(files, tmp_path):
    changes = {"mlp": "false", "full_tables": "true", "max_tokens": 600, "validation_fraction": 0.5, "seed": 3}
    run_verb("fit-baselines", _arguments(files, tmp_path / "out", **changes))
    assert not (tmp_path / "out" / "mlp").exists()
    for kind in ("token_table", "bigram_table"):
        table = load_predictor(tmp_path / "out" / kind)
        assert table.config.kind == kind
        assert 0 < table.config.training_data["tokens"] <= 600
    assert load_predictor(tmp_path / "out" / "random").config.options == {"seed": 3}


def test_the_overlap_report_reads_them_as_baselines_and_as_predictors(files, tmp_path):
    run_verb(
        "report-overlap",
        ["--target", str(files / "target"), "--traces", str(files / "report"), "--predictor",
         f"mine={files / 'fitted' / 'mlp'},tokens={files / 'fitted' / 'token_table'}",
         "--baselines", str(files / "fitted"), "--out", str(tmp_path / "out")],
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = {name: entry["overlap"]["mean"] for name, entry in report["predictors"].items()}
    assert set(found) == {*KINDS, "mine", "tokens"}
    assert found["mine"] == found["mlp"]
    assert found["tokens"] == found["token_table"]
    embedding = load_target_embedding(files / "target", dtype=torch.float32)
    arrays = read_arrays(open_stores([files / "report"]))
    expected = mean_overlap(load_predictor(files / "fitted" / "mlp", target_embedding=embedding), arrays)
    assert found["mlp"] == pytest.approx(expected, abs=1e-6)
    assert set(report["gain_over_best_table"]) == {"mine", "tokens"}
    assert report["predictors"]["mlp"]["calibration_error"] is not None


@pytest.mark.parametrize("name", ["mlp", "last_token"])
def test_the_benchmark_decodes_with_them(files, tmp_path, name):
    run_verb(
        "benchmark-decoding",
        ["--target", str(files / "target"), "--drafter", str(files / "drafter"), "--predictor",
         str(files / "fitted" / name), "--prompts", str(files / "prompts.jsonl"), "--number", "2",
         "--max_new_tokens", "6", "--levels", "bare", "--widening_factor", "1", "--policies",
         "autoregressive,ecospec", "--allow_load", "true", "--dtype", "float64", "--out", str(tmp_path / "out")],
    )  # fmt: skip
    lossless = json.loads((tmp_path / "out" / "report.json").read_text())["lossless"]
    assert (lossless["runs"], lossless["mismatches"], lossless["ties"]) == (4, 0, 0)


def test_the_embedding_of_the_loaded_target_serves_as_well(files):
    model = AutoModelForCausalLM.from_pretrained(files / "target", dtype=torch.float32)
    table = load_target_embedding(files / "target", dtype=torch.float32)
    one, other = (
        load_predictor(files / "fitted" / "mlp", target_embedding=embedding).score_sequence(torch.arange(12))
        for embedding in (model.get_input_embeddings(), table)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": ","}, "--traces ',' names no trace store"),
        ({"traces": "nowhere"}, "nowhere"),
        ({"validation_fraction": 1.5}, "--validation-fraction must lie between 0 and 1, got 1.5"),
        ({"calibration_fraction": 0.9}, "--calibration-fraction must be at least 0 and leave groups for training"),
        ({"hidden_layers": 4}, "hidden_layers must be 1 or 2, got 4"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
        ({"hold_out_dataset": "e"}, "--hold_out_dataset names 'e', which does not occur; did you mean|datasets of"),
        ({"device": "tpu"}, "--device 'tpu' is not supported"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(files, tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as stopped:
        main(["fit-baselines", *_arguments(files, tmp_path / "out", **changes)])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert any(part in lines[0] for part in message.split("|"))
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_other_targets_are_refused(files, tmp_path):
    with pytest.raises(ValueError, match=r"--out .*fitted is not empty; name a new folder"):
        run_verb("fit-baselines", _arguments(files, files / "fitted"))
    other = save_target(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match="target_fingerprint"):
        run_verb("fit-baselines", _arguments(files, tmp_path / "out", target=other))
