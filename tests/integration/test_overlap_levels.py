"""Checkpoints kept at levels of the validation overlap: once, with their own overlap, killed, by processes."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from ecospec.cli.main import main, run_verb
from ecospec.predictor import ExpertPredictor, load_target_embedding, routing_spec_of
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.fit import train_predictor
from ecospec.train.levels import kept_overlaps, look_is_due
from ecospec.train.module import RoutingPredictorModule
from ecospec.train.run_data import prepare_data
from tests.integration.test_train_predictor import EXPERTS, SMALL, TOP_K, save_target, synthetic_traces
from tests.integration.test_training_resume import killed
from tests.processes import run_processes

LEVELS = "0.65,0.55,0.999,0.75"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("models") / "target", 0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory, target):
    """Routing that depends on the token alone, so that overlap rises within the first epoch; text is short."""
    path = tmp_path_factory.mktemp("traces") / "store"
    with TraceStoreWriter(path, routing_spec_of(target)) as writer:
        for trace in synthetic_traces(80, 0):
            first = np.stack([trace.token_ids % EXPERTS, (trace.token_ids * 3 + 1) % EXPERTS], axis=1)
            experts = np.sort(np.stack([first, (first + 1) % EXPERTS], axis=-1), axis=-1).astype(np.uint8)
            writer.append([dataclasses.replace(trace, experts=experts)])
    return path


@pytest.fixture
def config(target, traces, tmp_path):
    return TrainPredictorConfig(
        target=target,
        traces=str(traces),
        out=tmp_path / "run",
        backbone=SMALL | {"num_hidden_layers": 1},
        context_length=64,  # no sequence is cut
        batch_tokens=128,
        max_epochs=2,
        learning_rate=1e-2,
        token_dropout=0.02,
        calibration_fraction=0.1,
        threads=1,
    )


def level_file(config, level):
    return config.out / "checkpoints" / f"overlap-{level}.ckpt"


def read(path):
    return torch.load(path, weights_only=True)


def assert_same_weights(one, two):
    for name, value in read(one)["state_dict"].items():
        assert torch.equal(read(two)["state_dict"][name], value), name


@pytest.fixture
def seen(monkeypatch):
    """Every overlap that was looked at, in order, with the step it was looked at after."""
    found = []
    close = RoutingPredictorModule._close_validation

    def spy(module):
        values = close(module)
        found.append((module.global_step, float(values["val_overlap"])))
        return values

    monkeypatch.setattr(RoutingPredictorModule, "_close_validation", spy)
    return found


def test_a_level_is_kept_at_the_first_look_that_reaches_it_and_training_does_not_notice(config, tmp_path, seen):
    plain = train_predictor(config)
    ends = seen.copy()
    assert len(ends) == 2
    seen.clear()
    levels = dataclasses.replace(config, out=tmp_path / "levels", keep_overlap=LEVELS, overlap_looks=5)
    result = train_predictor(levels)
    assert len(seen) == 10, "a level is ahead to the end, and the fifth look of an epoch is its validation"
    assert [entry for entry in seen if entry in ends] == ends
    assert_same_weights(plain.last, result.last)
    assert_same_weights(plain.best, result.best)
    assert read(plain.best)["ecospec"]["temperature"] == read(result.best)["ecospec"]["temperature"]
    assert read(plain.best)["ecospec"]["metrics"] == read(result.best)["ecospec"]["metrics"]
    reached = {}
    for level in (0.55, 0.65, 0.75):
        kept = read(level_file(levels, f"{level:.2f}"))
        assert "optimizer_states" not in kept
        first = next(entry for entry in seen if entry[1] >= level)
        reached[level] = (kept["global_step"], kept["ecospec"]["metrics"]["val_overlap"])
        assert reached[level] == first
    assert reached[0.55][0] < ends[0][0], "within the first epoch"
    assert not level_file(levels, "0.999").exists()
    kept_files = kept_overlaps(levels.out / "checkpoints", levels.overlap_levels())
    assert list(kept_files.values()) == [overlap for _, overlap in reached.values()]


def test_looks_end_with_the_last_level(config, seen):
    train_predictor(dataclasses.replace(config, max_epochs=1, keep_overlap="0.45", overlap_looks=1000))
    first = next(index for index, (_, overlap) in enumerate(seen) if overlap >= 0.45)
    assert [step for step, _ in seen[:-1]] == list(range(1, first + 2)), "more looks than steps: after each"


def test_the_exported_bundle_states_its_own_overlap(config, target, capsys, tmp_path):
    whole = dataclasses.replace(config, keep_overlap="0.55,0.999")
    options = ["--traces", whole.traces, "--context-length", "64", "--batch-tokens", "128", "--max-epochs", "2"]
    options += ["--backbone", json.dumps(whole.backbone), "--learning-rate", "1e-2", "--threads", "1"]
    options += ["--keep-overlap", whole.keep_overlap, "--target", str(target), "--out", str(whole.out)]
    run_verb("train-predictor", [*options, "--calibration-fraction", "0.1"])
    kept = level_file(whole, "0.55")
    shown = capsys.readouterr().out
    stated = read(kept)["ecospec"]["metrics"]["val_overlap"]
    assert f"kept {kept}, validation overlap {stated:.4f}\n1 of 2 levels were not reached\n" in shown
    bundle = tmp_path / "bundle"
    run_verb("export-predictor", ["--checkpoint", str(kept), "--target", str(target), "--out", str(bundle)])
    assert f"validation overlap {stated:.4f}" in capsys.readouterr().out
    embedding = load_target_embedding(target, dtype=torch.float32)
    predictor = ExpertPredictor.from_pretrained(bundle, target_embedding=embedding, dtype=torch.float32)
    assert predictor.config.metrics["val_overlap"] == stated >= 0.55
    assert read(whole.out / "checkpoints" / "best.ckpt")["ecospec"]["metrics"]["val_overlap"] > stated
    validation = prepare_data(whole, routing_spec_of(target)).module.validation
    hits = used = 0
    for sequence, length in enumerate(validation.lengths.tolist()):
        ids, experts = validation.window(sequence, 0, length)
        with torch.no_grad():
            scores = predictor.score_sequence(torch.from_numpy(ids.astype(np.int64))).numpy()
        found = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K]
        hits += int((found[..., None] == experts[..., None, :]).sum())
        used += experts.size
    assert hits / used == pytest.approx(stated, abs=2e-4)


def test_killed_and_resumed_keeps_what_an_uninterrupted_run_keeps(config, tmp_path):
    whole = dataclasses.replace(config, keep_overlap=LEVELS, overlap_looks=7)
    train_predictor(whole)
    steps = {level: read(level_file(whole, level))["global_step"] for level in ("0.55", "0.65", "0.75")}
    assert len(set(steps.values())) == 3
    broken = dataclasses.replace(
        whole, out=tmp_path / "broken", checkpoint_every_minutes=None, checkpoint_every_steps=4, resume=True
    )
    written: dict[str, tuple[int, int]] = {}
    # Before any last.ckpt; before and at the step that reaches the second level; an epoch later.
    per_epoch = read(whole.out / "checkpoints" / "last.ckpt")["global_step"] // 2
    for place in (2, steps["0.65"] - 1, steps["0.65"], per_epoch + 3):
        killed(broken, *divmod(place - 1, per_epoch))
        for level in steps:
            if level_file(broken, level).exists():
                stat = level_file(broken, level).stat()
                assert written.setdefault(level, (stat.st_mtime_ns, stat.st_ino)) == (stat.st_mtime_ns, stat.st_ino)
    train_predictor(broken)
    names = sorted(path.name for path in (whole.out / "checkpoints").iterdir())
    assert sorted(path.name for path in (broken.out / "checkpoints").iterdir()) == names
    for name in names:
        one, two = (run.out / "checkpoints" / name for run in (whole, broken))
        assert_same_weights(one, two)
        assert read(one)["ecospec"]["metrics"] == read(two)["ecospec"]["metrics"]
        assert read(one)["ecospec"]["temperature"] == read(two)["ecospec"]["temperature"]
    for level, stamp in written.items():
        stat = level_file(broken, level).stat()
        assert (stat.st_mtime_ns, stat.st_ino) == stamp, "not written again"
    with pytest.raises(ValueError, match=r"was trained with --keep_overlap 0\.65,.*, this run has 0\.5; resume"):
        train_predictor(dataclasses.replace(broken, keep_overlap="0.5"))
    with pytest.raises(ValueError, match=r"was trained with --keep_overlap 0\.65,.*, this run has none; resume"):
        train_predictor(dataclasses.replace(broken, keep_overlap=""))
    (broken.out / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"overlap-0\.65\.ckpt was trained with --seed 0, this run has 1; resume"):
        train_predictor(dataclasses.replace(broken, seed=1))
    with pytest.raises(ValueError, match="holds a training run; name a new folder, or resume"):
        train_predictor(dataclasses.replace(broken, resume=False))


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"strategy": "fsdp2"}], ids=["ddp-accumulate", "fsdp2"])
def test_several_processes_keep_what_one_keeps(config, tmp_path, changes):
    common = {"token_dropout": 0.0, "max_epochs": 1, "keep_overlap": "0.55,0.999", "overlap_looks": 6}
    several = dataclasses.replace(config, out=tmp_path / "several", devices=2, **common, **changes)
    one = dataclasses.replace(several, out=config.out, devices=1, strategy="auto")
    train_predictor(one)
    run_processes(train_predictor, several)
    first, second = (read(level_file(run, "0.55")) for run in (one, several))
    assert first["global_step"] == second["global_step"]
    assert second["ecospec"]["metrics"] == pytest.approx(first["ecospec"]["metrics"], abs=2e-5)
    assert second["ecospec"]["temperature"] == pytest.approx(first["ecospec"]["temperature"], rel=1e-3)
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][name], value, atol=1e-4, rtol=0, msg=name)
    assert not level_file(several, "0.999").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-overlap", "0.5,1"], "keep_overlap levels must lie between 0 and 1, got 1; write e.g. 0.5,0.6"),
        (["--keep-overlap", "0"], "keep_overlap levels must lie between 0 and 1, got 0"),
        (["--keep-overlap", "nan"], "keep_overlap levels must lie between 0 and 1, got nan"),
        (["--keep-overlap", "0.7,0.5,0.50"], "keep_overlap names 0.5 twice; name every level once"),
        (["--keep-overlap", "0.5,,0.6"], "keep_overlap '0.5,,0.6' must be numbers separated by commas, e.g. 0.5,"),
        (["--keep-overlap", "half"], "keep_overlap 'half' must be numbers separated by commas"),
        (["--overlap-looks", "0"], "overlap_looks must be at least 1, got 0"),
    ],
)
def test_levels_are_validated(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train-predictor", "--target", "target", "--traces", "traces", "--out", "run", *options])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"ecospec train-predictor: error: {message}")


@pytest.mark.parametrize(("total", "looks"), [(1, 1), (7, 3), (100, 20), (5, 9)])
def test_looks_are_spread_over_the_epoch(total, looks):
    due = [step for step in range(1, total + 1) if look_is_due(step, total, looks)]
    assert len(due) == min(total, looks)
    assert due[-1] == total
    gaps = np.diff([0, *due])
    assert gaps.max() - gaps.min() <= 1
