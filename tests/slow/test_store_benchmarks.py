"""The benchmarks of stores run on a tiny target and write what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store_rows import write

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["trace_size", "trace_reading"])
def test_store_benchmark(tmp_path, script):
    traces = write(tmp_path / "traces", range(40))
    options = ["--traces", traces, "--out", tmp_path / "out", "--allow-load", "--repeats", "1"]
    if script == "trace_size":
        options += ["--uniform-tokens", "512", "--uniform-layers", "2"]
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{script}.py", *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    results = json.loads((tmp_path / "out" / f"{script}.json").read_text())["results"]
    assert results["tokens"] > 500
    if script == "trace_size":
        for table in ("demo", "uniform"):
            assert results["default"][table] in {row["codec"] for row in results[table]}
        assert results["entropy_bytes"]["plug_in"] <= results["entropy_bytes"]["chao_shen"]
    else:
        assert {row["reader"] for row in results["readers"]} >= {"training reader", "pandas, Python loop"}
    assert "| codec |" in (page := (tmp_path / "out" / f"{script}.md").read_text()) or "| reader |" in page
