"""The benchmarks of trace collection run on a tiny target and write what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_files import save_prompts, save_target

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(script, out, *options):
    """Results of a script and the page it wrote."""
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{script}.py", "--out", out, "--allow-load", *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return json.loads((out / f"{script}.json").read_text())["results"], (out / f"{script}.md").read_text()


def test_trace_memory(tmp_path):
    target = save_target(tmp_path / "target")
    prompts = save_prompts(tmp_path / "texts.jsonl", 3, 0, length=(80, 90), layout="text")
    options = ("--target", target, "--prompts", prompts, "--tokens", "[100,1000]", "--max-length", 50)
    results, page = run("trace_memory", tmp_path / "out", *options)
    assert [row["tokens"] for row in results["runs"]] == [100, 1000]  # documents come again, the last is cut
    assert all(row["peak_rss_bytes"] > 1e8 for row in results["runs"])
    assert results["holds"] == (results["runs"][1]["ratio"] <= results["bound"])
    assert "peak memory, MiB" in page


def test_hook_overhead(tmp_path):
    target = save_target(tmp_path / "target")
    shape = {"sequences": 2, "tokens": 8, "forwards": 2, "rounds": 3}
    cases = [{"target": "demo", "batch": "read", **shape}, {"target": "widened", "batch": "step", **shape}]
    options = ("--target", target, "--cases", json.dumps(cases), "--kept-tokens", 64)
    results, page = run("hook_overhead", tmp_path / "out", *options)
    assert [entry["case"] for entry in results["times"]] == cases
    for entry in results["times"]:
        assert set(entry["seconds"]) == {"plain", "recorded", "router_logits"}
        assert entry["ratio_to_plain"]["recorded"]["groups"] == 3
    (memory,) = results["memory"]
    assert set(memory["peak_bytes"]) == {"plain", "recorded", "router_logits"}
    assert "recorded / plain" in page
