"""The benchmark of gain against predictor quality runs on a tiny target and writes what it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.slow.test_trace_benchmarks import ROOT, run
from tests.tiny_files import (
    EXPERTS,
    LAYERS,
    TOP_K,
    save_head,
    save_predictor,
    save_prompts,
    save_tables,
    save_target,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    root = tmp_path_factory.mktemp("quality")
    target = save_target(root / "target")
    head, tables = save_head(root / "drafter", target), root / "tables"
    save_tables(tables, target)
    bundles = f"neural={save_predictor(root / 'neural', target)},bigram={tables / 'bigram_table'}"
    prompts = save_prompts(root / "prompts.jsonl", 4, 1)
    return [
        *("--target", target, "--drafter", head, "--predictors", bundles, "--prompts", prompts),
        *("--work", root / "work", "--max-new-tokens", 8, "--texts", 3, "--number", 3, "--widening-factor", 2),
    ]


def test_predictor_quality(options, tmp_path):
    results, page = run("predictor_quality", tmp_path / "out", *options)
    rows = results["rows"]
    assert list(rows) == ["probability", "neural", "bigram", "ecospec_oracle"]
    assert (results["texts"], results["prompts"]) == (3, 3)
    assert results["trees"] == 3 * 8
    assert results["lossless"]["runs"] == 3 * 2 * 5
    assert results["lossless"]["mismatches"] == 0
    size = LAYERS * results["expert_bytes"]
    for name, row in rows.items():
        assert (row["tree_overlap"] is None) == (name in {"probability", "ecospec_oracle"})
        replayed = row["replay"]
        assert 1 <= replayed["accepted"]["mean"] <= 4
        assert TOP_K <= replayed["experts"]["mean"] <= min(EXPERTS, 4 * TOP_K)
        assert replayed["expert_bytes"] == pytest.approx(replayed["experts"]["mean"] * size)
        assert list(row["live"]) == ["bare", "ballast"]
        for live in row["live"].values():
            assert live["tokens_per_second"] > 0
            assert (live["over_probability"] is None) == (name == "probability")
            assert 1 <= live["accepted"] <= 4
        same = [(live["accepted"], live["experts"]) for live in row["live"].values()]
        assert same[0] == same[1], "a cost level changes no selection"
    assert rows["probability"]["replay"]["over_probability"]["experts"]["mean"] == 0
    assert rows["neural"]["live"]["bare"]["predict"] > rows["ecospec_oracle"]["live"]["bare"]["predict"]
    assert "ecospec, neural" in page
    assert "<svg" in (tmp_path / "out" / "predictor_quality.svg").read_text()
    again, _ = run("predictor_quality", tmp_path / "again", *options)
    assert [row["replay"] for row in again["rows"].values()] == [row["replay"] for row in rows.values()]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--predictors", "probability=x"), "--predictors: 'probability' is the name of a policy; write NAME=PATH"),
        (("--predictors", "mine=nowhere"), "nowhere"),
        (("--texts", "0"), "--texts must be at least 1, got 0"),
    ],
)
def test_refusals(options, more, message, tmp_path):
    script = ROOT / "benchmarks" / "predictor_quality.py"
    command = [sys.executable, script, "--out", tmp_path / "out", "--allow-load", *map(str, options), *more]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("predictor_quality.py: error: ")
    assert message in line
