"""Stages: reuse, resume after a kill, and what is made anew when something changed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ecospec.cli.stages import Stage, StageRunner, file_digest


class _Pipeline:
    """Two stages, ``a`` resumable and ``b`` built on it; counts how they were run."""

    def __init__(self, out):
        self.out, self.calls, self.said = out, [], []
        self.input = out.parent / "input.txt"
        self.input.write_text("one")
        self.fail = ""

    def _work(self, name, output, resume):
        self.calls.append((name, resume))
        output.mkdir(exist_ok=True)
        (output / f"part-{len(list(output.iterdir()))}").write_text("x")
        if self.fail == name:
            raise KeyboardInterrupt

    def stages(self, **options):
        a, b = self.out / "a", self.out / "b"
        return [
            Stage("a", "do a", options, lambda r: self._work("a", a, r), a, [self.input], resumable=True),
            Stage("b", "do b", {}, lambda r: self._work("b", b, r), b, after=["a"]),
        ]

    def run(self, **options):
        self.calls, self.said = [], []
        StageRunner(self.out, self.said.append).run(self.stages(**options))


@pytest.fixture
def pipeline(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    return _Pipeline(out)


def test_a_second_run_reuses_everything_and_says_so(pipeline):
    pipeline.run(x=1)
    assert pipeline.calls == [("a", False), ("b", False)]
    pipeline.run(x=1)
    assert pipeline.calls == []
    assert [("reused" in line, line.split()[0]) for line in pipeline.said] == [(True, "1/2"), (True, "2/2")]


def test_changed_options_or_inputs_make_dependents_anew(pipeline):
    pipeline.run(x=1)
    pipeline.run(x=2)
    assert pipeline.calls == [("a", False), ("b", False)]
    assert any("made with other options or inputs" in line for line in pipeline.said)
    assert len(list((pipeline.out / "a").iterdir())) == 1
    pipeline.input.write_text("two")
    pipeline.run(x=2)
    assert pipeline.calls == [("a", False), ("b", False)]


def test_a_resumable_stage_goes_on_after_a_kill(pipeline):
    pipeline.fail = "a"
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(x=1)
    pipeline.fail = ""
    pipeline.run(x=1)
    assert pipeline.calls == [("a", True), ("b", False)]
    assert len(list((pipeline.out / "a").iterdir())) == 2


def test_any_other_stage_starts_from_nothing_and_earlier_ones_stay(pipeline):
    pipeline.fail = "b"
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(x=1)
    kept = file_digest(pipeline.out / "a")
    pipeline.fail = ""
    pipeline.run(x=1)
    assert pipeline.calls == [("b", False)]
    assert any("what a killed run left" in line for line in pipeline.said)
    assert file_digest(pipeline.out / "a") == kept
    assert len(list((pipeline.out / "b").iterdir())) == 1


def test_partial_output_of_other_options_is_not_resumed(pipeline):
    pipeline.fail = "a"
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(x=1)
    pipeline.fail = ""
    pipeline.run(x=2)
    assert pipeline.calls == [("a", False), ("b", False)]


def test_output_that_was_removed_is_made_again_with_what_is_built_on_it(pipeline):
    pipeline.run(x=1)
    mark = pipeline.out / "stages" / "a.json"
    old = json.loads(mark.read_text())
    for file in (pipeline.out / "a").iterdir():
        file.unlink()
    (pipeline.out / "a").rmdir()
    pipeline.run(x=1)
    assert ("a", False) in pipeline.calls
    if json.loads(mark.read_text())["finished"] != old["finished"]:
        assert ("b", False) in pipeline.calls


def test_a_damaged_mark_counts_as_none(pipeline):
    pipeline.run(x=1)
    (pipeline.out / "stages" / "b.json").write_text("{")
    pipeline.run(x=1)
    assert pipeline.calls == [("b", False)]


def test_missing_inputs_are_named(pipeline):
    stage = dataclasses.replace(pipeline.stages()[0], inputs=[pipeline.out / "nothing"])
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        StageRunner(pipeline.out, pipeline.said.append).run([stage])
