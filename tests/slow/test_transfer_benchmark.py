"""The benchmark of how far a predictor carries runs on a tiny target, in parts, and goes on where it was."""

from __future__ import annotations

import json

import pytest

from ecospec.cli.collect_traces import CollectTracesConfig
from ecospec.cli.collect_traces import run as collect_traces
from tests.slow.test_trace_benchmarks import run
from tests.tiny_files import save_predictor, save_prompts, save_target

pytestmark = pytest.mark.slow

BACKBONE = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 1, "
BACKBONE += "num_key_value_heads: 1, head_dim: 32}"


def test_predictor_transfer(tmp_path):
    target = save_target(tmp_path / "target")
    stores = {}
    for seed, name in enumerate(("training", "test")):
        prompts = save_prompts(tmp_path / f"{name}.jsonl", 16, seed, length=(60, 90), layout="text")
        stores[name] = tmp_path / name
        collect_traces(
            CollectTracesConfig(target=target, prompts=str(prompts), mode="teacher_forced", out=stores[name])
        )
    questions = save_prompts(tmp_path / "questions.jsonl", 40, 9)
    out, work = tmp_path / "out", tmp_path / "work"
    shared = ("--target", target, "--work", work, "--backbone", BACKBONE, "--steps", 4, "--batch-tokens", 128,
              "--stores", stores["training"], "--test-stores", stores["test"], "--long-stores", stores["training"],
              "--long-test-stores", stores["test"], "--prompts", f"questions={questions}", "--new-tokens", 8,
              "--context-length", 32, "--lengths", "[16,64]", "--least-length", 40, "--windows", "[4,16]",
              "--predictor", save_predictor(tmp_path / "predictor", target), "--positions", 50)  # fmt: skip
    results, page = run("predictor_transfer", out, *shared, "--parts", "matrix,length")
    kinds = ["set0", "set1", "questions"]
    assert list(results["matrix"]["training"]) == [*kinds, "all"]
    assert {name: one["steps"] for name, one in results["matrix"]["training"].items()} == dict.fromkeys(
        [*kinds, "all"], 4
    )
    for what in ("network", "bigram_table"):
        assert all(0 < results["matrix"][what][a][b]["mean"] < 1 for a in [*kinds, "all"] for b in kinds)
    assert list(results["length"]["overlap"]) == ["bigram_table", "16", "64"]
    assert "Less context" not in page
    assert (out / "predictor_transfer.svg").stat().st_size > 1000
    checkpoint = work / "runs" / "all" / "checkpoints" / "best.ckpt"
    before = checkpoint.stat().st_mtime_ns
    again, page = run("predictor_transfer", out, *shared)
    assert checkpoint.stat().st_mtime_ns == before
    assert list(again) == ["matrix", "length", "window"]
    assert again["matrix"]["network"] == results["matrix"]["network"]
    assert again["window"]["positions"] == 50
    assert "Less context" in page
    assert "Train on one kind of text" in page
    used = json.loads((work / "prompts" / "questions" / "train.jsonl").read_text().splitlines()[0])
    assert used["dataset"] == "questions"
