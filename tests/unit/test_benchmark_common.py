"""The benchmarks' common part, and the cost command's options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import common
from ecospec.cli.calibrate_cost import CalibrateCostConfig, run
from ecospec.decoding.measurement import (
    available_bytes,
    hardware_string,
    interleaved,
    load_average,
    measure_seconds,
    pin_threads,
    require_quiet,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a script."""

    size: int = 3
    """A number."""
    where: Path = Path("a/b")
    """A path."""
    loud_one: bool = False
    """A switch."""

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"--size must be at least 1, got {self.size}")


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr("ecospec.decoding.measurement.load_average", lambda: 0.31)
    with pytest.raises(ValueError, match=r"load average is 0.31, above 0.3.*add --allow-load"):
        require_quiet()
    assert require_quiet(allow_load=True) == 0.31
    with pytest.raises(ValueError, match="load average"):
        common.prepare()
    assert "not for quoting" in common.prepare(allow_load=True).line


def test_a_quiet_machine_and_an_unknown_load_pass(monkeypatch):
    monkeypatch.setattr("ecospec.decoding.measurement.load_average", lambda: 0.3)
    assert require_quiet() == 0.3

    def unknown():
        raise OSError

    monkeypatch.undo()
    monkeypatch.setattr("os.getloadavg", unknown)
    assert str(load_average()) == "nan"
    conditions = common.prepare()
    assert conditions.load_average is None
    assert "load average unknown" in conditions.line
    assert "not for quoting" not in conditions.line


def test_threads_are_pinned():
    pin_threads(1)
    assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="--threads must be at least 1, got 0"):
        pin_threads(0)


def test_every_round_runs_every_job_in_its_own_order():
    jobs = list(range(20))
    order = list(interleaved(jobs, 3, seed=1))
    rounds = [order[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(part) == jobs for part in rounds)
    assert len({tuple(part) for part in rounds}) == 3
    assert order == list(interleaved(jobs, 3, seed=1))
    assert order != list(interleaved(jobs, 3, seed=2))


def test_the_machine_is_described():
    cpu = torch.device("cpu")
    assert "cores" in hardware_string(cpu)
    free = available_bytes(cpu)
    assert free is None or free > 2**20
    calls = []
    assert measure_seconds(lambda: calls.append(1), cpu) >= 0.0
    assert calls == [1]


def test_json_has_stable_keys_and_is_whole(tmp_path):
    conditions = common.Conditions(1, 0.1, False, "a processor", "2026-01-01 00:00 UTC")
    data = common.result("x", conditions, Options(), {"seconds": 1.0})
    path = tmp_path / "deep" / "x.json"
    common.write_json(path, data)
    read = json.loads(path.read_text())
    assert list(read) == ["benchmark", "format_version", "conditions", "provenance", "options", "results"]
    assert read["options"] == {"size": 3, "where": "a/b", "loud_one": False}
    assert set(read["provenance"]) >= {"git_sha", "versions", "argv"}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        common.write_json(path, {"seconds": float("nan")})


def test_markdown(tmp_path):
    table = common.markdown_table(["name", "ms"], [["a", 1.5], ["b", 2]])
    assert table.splitlines() == ["| name | ms |", "|---|--:|", "| a | 1.5 |", "| b | 2 |"]
    assert common.markdown_table(["name"], []).splitlines() == ["| name |", "|---|"]
    with pytest.raises(ValueError, match="a table of 2 columns has a row of 1"):
        common.markdown_table(["a", "b"], [["x"]])
    conditions = common.Conditions(1, None, False, "a processor", "2026-01-01 00:00 UTC")
    common.write_page(tmp_path / "page.md", "Title", conditions, [table])
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Title\n\na processor, 1 thread(s), load average unknown before")
    assert text.endswith("| b | 2 |\n")


@pytest.mark.parametrize(
    ("argv", "status", "seen"),
    [
        (["--size", "5"], 0, 5),
        ([], 0, 3),
        (["--size", "0"], 2, None),
        (["--size", "many"], 2, None),
        (["--colour", "red"], 2, None),
        (["--loud-one"], 0, 3),
        (["--loud-one", "--size=4"], 0, 4),
        (["--loud_one", "false", "--size", "4"], 0, 4),
    ],
)
def test_scripts_take_their_options_from_a_dataclass(argv, status, seen, capsys):
    got = []
    with pytest.raises(SystemExit) as stop:
        common.run_script(Options, lambda options: got.append(options.size), argv)
    assert stop.value.code == status
    assert got == ([] if seen is None else [seen])
    if status:
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"threads": 0}, "--threads must be at least 1"),
        ({"context_length": 0}, "--context-length must be at least 1"),
        ({"contexts": 0}, "--contexts must be at least 1"),
        ({"ballast_ratio": 2.0}, "use --level ballast and no --ballast-bytes"),
        ({"level": "ballast", "ballast_ratio": 2.0, "ballast_bytes": 1}, "use --level ballast and no"),
        ({"level": "ballast", "ballast_ratio": 1.0}, "--ballast-ratio must be above 1"),
        ({"step_overhead": -1.0}, "--step-overhead must not be negative"),
    ],
)
def test_options_of_calibrate_cost(change, message):
    with pytest.raises(ValueError, match=message):
        CalibrateCostConfig(**{"target": Path("t"), "out": Path("o")} | change)


def test_calibrate_cost_overwrites_nothing(tmp_path):
    out = tmp_path / "cost.json"
    out.write_text("{}")
    with pytest.raises(FileExistsError, match=r"--out .*cost.json exists"):
        run(CalibrateCostConfig(target=tmp_path, out=out, allow_load=True))
    assert out.read_text() == "{}"
