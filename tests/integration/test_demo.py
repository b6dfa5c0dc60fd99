"""``ecospec demo`` on tiny checkpoints: every stage, page and summary, and what a second run reuses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ecospec.cli.demo import DemoConfig, stages
from ecospec.cli.main import main, run_verb
from ecospec.eval.demo_page import validate_summary
from ecospec.trace_collection.store import TraceStore
from tests.tiny_files import save_head, save_predictor, save_prompts, save_tables, save_target


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo") / "checkpoints"
    target = save_target(root / "target")
    save_head(root / "drafter", target)
    save_predictor(root / "predictor", target)
    save_tables(root / "tables", target)
    (root / "groups.json").write_text("{}")  # only read for stdlib: prompts
    for name, count, seed in (("train", 16, 1), ("report", 8, 2), ("tuning", 4, 3)):
        save_prompts(root.parent / f"{name}.jsonl", count, seed, length=(140, 150), layout="text")
    return root


def _arguments(checkpoints, out, **changes):
    values = {
        "checkpoints": checkpoints,
        "train_prompts": checkpoints.parent / "train.jsonl",
        "report_prompts": checkpoints.parent / "report.jsonl",
        "tuning_prompts": checkpoints.parent / "tuning.jsonl",
        "train_sequences": 24,
        "report_sequences": 12,
        "new_tokens": 8,
        "train_minutes": 0.02,
        "decode_prompts": 2,
        "decode_tokens": 6,
        "tuning_number": 1,
        "cost_repeats": 1,
        "widening_factor": 2,
        "ballast_bytes": 2**14,
        "threads": 1,
        "out": out,
    } | changes
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def finished(checkpoints, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "demo"
    run_verb("demo", _arguments(checkpoints, out))
    return out


def test_summary_page_and_folders(finished):
    summary = json.loads((finished / "summary.json").read_text())
    validate_summary(summary)
    assert set(summary["decoding"]["bare"]) == {
        "autoregressive", "probability", "ecospec", "evict", "ecospec_oracle"
    }  # fmt: skip
    assert summary["lossless"]["runs"] == 2 * 5 * 2
    assert summary["lossless"]["mismatches"] == 0
    page = (finished / "report.html").read_text()
    assert 'id="overlap"' in page
    assert 'id="decoding"' in page
    assert page.count("<img ") == 5
    assert not re.search(r"https?://", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "traces-train", "traces-report", "training", "predictor", "overlap", "cost", "decoding", "stages",
        "report.html", "summary.json",
    }  # fmt: skip


def test_tables_are_the_shipped_ones(checkpoints, finished):
    report = json.loads((finished / "overlap" / "report.json").read_text())
    assert report["inputs"]["baselines"] == str(checkpoints / "tables")
    assert report["inputs"]["baseline_tokens"] == 400
    assert report["predictors"]["bigram_table"]["calibration_error"] is None


def test_without_shipped_tables_the_demo_fits_its_own(checkpoints, finished, tmp_path):
    bare = tmp_path / "checkpoints"
    shutil.copytree(checkpoints, bare)
    shutil.rmtree(bare / "tables")
    out = tmp_path / "demo"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "overlap")
    config = DemoConfig(checkpoints=bare, out=out, threads=1)
    next(stage for stage in stages(config) if stage.name == "overlap").run(False)
    inputs = json.loads((out / "overlap" / "report.json").read_text())["inputs"]
    assert inputs["baseline_traces"] == str(out / "traces-train")
    assert "baselines" not in inputs


def test_groups_in_both_traces_are_refused(checkpoints, finished, tmp_path):
    out = tmp_path / "demo"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "traces-report")
    shutil.copytree(out / "traces-train", out / "traces-report")
    config = DemoConfig(checkpoints=checkpoints, out=out, threads=1)
    with pytest.raises(ValueError, match=r"groups of --report-prompts .* choose prompts of other groups"):
        next(stage for stage in stages(config) if stage.name == "overlap").run(False)


def test_a_second_run_reuses_all_stages(checkpoints, finished, capsys):
    before = (finished / "decoding" / "report.json").read_bytes()
    run_verb("demo", [*_arguments(checkpoints, finished), "--resume"])
    shown = capsys.readouterr().out
    assert shown.count(": reused, ") == 7
    assert "overlap of demo_run_predictor, %" in shown
    assert (finished / "decoding" / "report.json").read_bytes() == before


def test_a_damaged_stage_is_made_again_and_the_others_are_reused(checkpoints, finished, tmp_path, capsys):
    out = tmp_path / "demo"
    shutil.copytree(finished, out)
    (out / "stages" / "overlap.json").unlink()
    run_verb("demo", [*_arguments(checkpoints, out), "--resume"])
    shown = capsys.readouterr().out
    assert shown.count(": reused, ") == 6
    assert "5/7 report top-K overlap" in shown


def test_kill_in_the_middle_keeps_earlier_stages(checkpoints, tmp_path, capsys):
    out = tmp_path / "demo"
    code = "import sys; from ecospec.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "demo", *_arguments(checkpoints, out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "stages" / "training.started").exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert TraceStore(out / "traces-train").num_rows > 0
    before = (out / "traces-report" / "manifest.json").read_bytes()
    run_verb("demo", [*_arguments(checkpoints, out), "--resume"])
    assert capsys.readouterr().out.count(": reused, ") == 2
    assert (out / "traces-report" / "manifest.json").read_bytes() == before
    validate_summary(json.loads((out / "summary.json").read_text()))


def _refused(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_refusals(checkpoints, finished, tmp_path, capsys):
    assert "is not empty" in _refused(capsys, _arguments(checkpoints, finished))
    assert "does not exist; name the demo checkpoints' folder" in _refused(
        capsys, _arguments(tmp_path / "nowhere", tmp_path / "out")
    )
    assert "--decode-tokens must be at least 2" in _refused(
        capsys, _arguments(checkpoints, tmp_path / "out", decode_tokens=1)
    )
    assert "--train-minutes must be above 0" in _refused(
        capsys, _arguments(checkpoints, tmp_path / "out", train_minutes=0)
    )
    assert not (tmp_path / "out").exists()
