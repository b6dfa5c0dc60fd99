"""``report-overlap`` from files to files, and every refusal."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from ecospec.cli.main import main, run_verb
from ecospec.cli.report_overlap import named_paths
from ecospec.predictor.bundle import ExpertPredictor
from ecospec.predictor.checkpoint_files import load_target_embedding
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.model import RoutingPredictorModel
from ecospec.trace_collection.groups_manifest import Group, GroupsManifest
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.arrays import open_stores, read_arrays
from ecospec.train.baselines import fit_baselines, save_baselines
from tests.tiny_files import EXPERTS, VOCAB, save_target

LAYERS = 2  # the synthetic routing below has two layers


def _group(number):
    return f"{number:016x}"


def _write_store(path, target, numbers, seed):
    rng = np.random.default_rng(seed)
    with TraceStoreWriter(path, routing_spec_of(target)) as writer:
        for number in numbers:
            tokens = rng.integers(0, VOCAB, int(rng.integers(10, 40)), dtype=np.int32)
            first = np.stack([tokens % EXPERTS, (tokens + np.roll(tokens, 1)) % EXPERTS], axis=1)
            experts = np.sort(np.stack([first, (first + 3) % EXPERTS], axis=-1), axis=-1).astype(np.uint8)
            trace = RoutingTrace(
                f"s{number}-{seed}", _group(number), f"set{number % 2}", "", tokens, len(tokens), "teacher_forced",
                experts, None, "text",
            )  # fmt: skip
            writer.append([trace])
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("overlap")
    target = save_target(root / "target", 0, layers=LAYERS)
    _write_store(root / "training", target, range(20), 1)
    _write_store(root / "report", target, range(100, 112), 2)
    torch.manual_seed(3)
    embedding = load_target_embedding(target, dtype=torch.float32)
    backbone = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    backbone |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "vocab_size": VOCAB}
    model = RoutingPredictorModel(
        routing_spec_of(target), backbone=backbone, embedding_size=16, target_embedding=embedding
    )
    ExpertPredictor.from_model(model.eval()).save_pretrained(root / "predictor")
    groups = [Group(_group(n), "file", f"{n}.py", "predictor_train" if n < 106 else "report", 10) for n in
              (*range(20), *range(100, 112))]  # fmt: skip
    GroupsManifest("3.11.7", 0, tuple(groups)).save(root / "groups.json")
    return root


def _arguments(files, out, **changes):
    values = {
        "target": files / "target",
        "traces": files / "report",
        "predictor": files / "predictor",
        "baseline_traces": files / "training",
        "out": out,
    } | changes
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def test_report_is_written_and_shown(files, tmp_path, capsys):
    run_verb("report-overlap", _arguments(files, tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["predictors"]) == {
        "random", "predictor", "frequency", "token_table", "bigram_table", "last_token"
    }  # fmt: skip
    assert report["groups"] == 12
    assert list(report["gain_over_best_table"]) == ["predictor"]
    # Layer 0 depends on the token, layer 1 on the pair: tables know layer 0.
    tables = report["predictors"]["token_table"]["per_layer"]
    assert tables[0]["mean"] > 0.9 > tables[1]["mean"]
    assert any("was trained on other traces" in note for note in report["notes"])
    assert {"git_sha", "versions", "argv"} <= set(report["provenance"])
    shown = capsys.readouterr().out
    assert "bigram_table" in shown
    assert "written to" in shown


def test_batches_of_the_neural_predictor_do_not_matter(files, tmp_path):
    for name, batch in (("one", 1), ("many", 4096)):
        run_verb("report-overlap", _arguments(files, tmp_path / name, batch_tokens=batch))
    one, many = (json.loads((tmp_path / n / "report.json").read_text()) for n in ("one", "many"))
    assert one["predictors"]["predictor"]["per_layer"] == many["predictors"]["predictor"]["per_layer"]


def test_split_filter_names_and_fitted_baselines(files, tmp_path):
    arrays = read_arrays(open_stores([files / "training"]))
    for name, predictor in fit_baselines(arrays).items():
        predictor.save_pretrained(tmp_path / "tables" / name)
    predictors = f"first={files / 'predictor'},second={files / 'predictor'}"
    changes = {"groups": files / "groups.json", "predictor": predictors, "baseline_traces": None}
    run_verb("report-overlap", _arguments(files, tmp_path / "out", baselines=tmp_path / "tables", **changes))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["groups"] == 6
    assert list(report["gain_over_best_table"]) == ["first", "second"]
    assert report["gain_over_best_table"]["first"] == report["gain_over_best_table"]["second"]


def _tables(files, folder, training="training"):
    save_baselines(fit_baselines(read_arrays(open_stores([files / training]))), folder)
    return folder


def test_compact_tables_give_the_same_report_and_their_origin(files, tmp_path):
    """Tables that are read instead of fitted, reduced to rankings."""
    tables = _tables(files, tmp_path / "tables")
    arrays = read_arrays(open_stores([files / "training"]))
    mine = tmp_path / "mine"
    embedding = load_target_embedding(files / "target", dtype=torch.float32)
    predictor = ExpertPredictor.from_pretrained(files / "predictor", target_embedding=embedding)
    ExpertPredictor.from_model(
        predictor.model, training_data={"fingerprint": arrays.fingerprint(), "tokens": len(arrays.tokens)}
    ).save_pretrained(mine)
    predictors = f"mine={mine},other={files / 'predictor'}"
    run_verb("report-overlap", _arguments(files, tmp_path / "fitted", predictor=predictors))
    changes = {"predictor": predictors, "baseline_traces": None, "baselines": tables}
    run_verb("report-overlap", _arguments(files, tmp_path / "read", **changes))
    fitted, read = (json.loads((tmp_path / n / "report.json").read_text()) for n in ("fitted", "read"))
    for name in ("frequency", "token_table", "bigram_table", "last_token", "random"):
        overlaps = [report["predictors"][name]["overlap"]["mean"] for report in (fitted, read)]
        assert overlaps[0] == pytest.approx(overlaps[1], abs=0.005)  # ties
    assert read["predictors"]["bigram_table"]["calibration_error"] is None
    assert read["inputs"]["baselines"] == str(tables)
    assert read["inputs"]["baseline_tokens"] == len(arrays.tokens)
    assert f"fitted on {len(arrays.tokens):,} tokens, the very traces that mine was trained on" in read["notes"][0]
    assert [note.split(" was")[0] for note in read["notes"][1:]] == ["Predictor other"]
    assert "without probabilities" in (tmp_path / "read" / "report.md").read_text()


def test_tables_are_refused_where_a_leak_cannot_be_ruled_out(files, tmp_path):
    tables = _tables(files, tmp_path / "tables")
    leak = _write_store(tmp_path / "leak", files / "target", [3, 4, 200], 5)
    changes = {"baseline_traces": None, "baselines": tables}
    with pytest.raises(
        ValueError, match=r"2 of the 3 groups of .*leak are among the 20 groups of the training trac"
    ):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", traces=leak, **changes))
    run_verb("report-overlap", _arguments(files, tmp_path / "out2", traces=leak, allow_leak="true", **changes))
    assert (tmp_path / "out2" / "report.json").exists()
    config = json.loads((tables / "last_token" / "config.json").read_text())
    del config["training_data"]["group_ids"]
    (tables / "last_token" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"last_token does not record the groups it was fitted on"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out3", **changes))
    shutil.rmtree(tables / "token_table")
    _tables(files, tmp_path / "others", "report")
    shutil.copytree(tmp_path / "others" / "token_table", tables / "token_table")
    with pytest.raises(ValueError, match=r"token_table was fitted on other traces than .*; fit them together"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out4", **changes))
    shutil.rmtree(tables / "frequency")
    with pytest.raises(FileNotFoundError, match="frequency"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out5", **changes))


def test_training_groups_in_the_report_are_refused_unless_told(files, tmp_path):
    leak = _write_store(tmp_path / "leak", files / "target", [3, 4, 200], 5)
    with pytest.raises(ValueError, match=r"2 of the 3 groups of .*leak are among the 20 groups of"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", traces=leak))
    assert not (tmp_path / "out" / "report.json").exists()
    run_verb("report-overlap", _arguments(files, tmp_path / "out2", traces=leak, allow_leak="true"))
    assert (tmp_path / "out2" / "report.json").exists()


def test_other_targets_are_refused(files, tmp_path):
    other = save_target(tmp_path / "other", 9, layers=LAYERS)
    store = _write_store(tmp_path / "store", other, [200, 201], 5)
    with pytest.raises(ValueError, match=r"traces .* made for another target than target"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", traces=store))
    with pytest.raises(ValueError, match=r"traces .* made for another target"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", baseline_traces=store))
    with pytest.raises(ValueError, match="made for another target"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", target=other, traces=store))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": "nowhere"}, "nowhere"),
        ({"traces": "a,,b"}, "traces 'a,,b' holds an empty entry"),
        ({"predictor": "nowhere/predictor"}, "nowhere/predictor"),
        ({"target": "nowhere"}, "nowhere"),
        ({"baseline_traces": None}, "give either --baseline-traces"),
        ({"predictor": "a,a"}, "two predictors are named 'a'"),
        ({"predictor": "random=a"}, "is the name of a baseline"),
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"batch_tokens": 0}, "--batch-tokens must be at least 1"),
        ({"threads": 0}, "--threads must be at least 1"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(files, tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as stop:
        main(["report-overlap", *_arguments(files, tmp_path / "out", **changes)])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert message in error


def test_a_full_folder_is_kept(files, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="is not empty"):
        run_verb("report-overlap", _arguments(files, out))
    run_verb("report-overlap", _arguments(files, out, resume="true"))
    assert (out / "mine.txt").read_text() == "keep"
    shutil.rmtree(out)


def test_unknown_split_and_empty_split(files, tmp_path):
    changes = {"groups": files / "groups.json"}
    with pytest.raises(ValueError, match=r"--split must be one of"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", split="test", **changes))
    with pytest.raises(ValueError, match=r"none of the 12 groups of .* is in split 'tuning'"):
        run_verb("report-overlap", _arguments(files, tmp_path / "out", split="tuning", **changes))


def test_empty_entries_are_refused():
    with pytest.raises(ValueError, match="holds an empty entry"):
        named_paths("a,,b")
    with pytest.raises(ValueError, match="holds an empty entry"):
        named_paths("a=")
