"""``benchmark-decoding`` from files to files, tuning of ε', the choice of prompts, and every refusal."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from ecospec.cli.main import main, run_verb
from ecospec.decoding.cost_model import CostModel, CostRow
from ecospec.decoding.policies import make_policy
from ecospec.decoding.records import StepRecord
from ecospec.decoding.target import TargetModel
from ecospec.eval.benchmark_prompts import select_prompts
from ecospec.eval.decoding_benchmark import BenchmarkPrompt, BenchmarkSettings
from ecospec.eval.tuning import modelled_seconds, tune_epsilon
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.prompts import Prompt
from tests.decoding_fakes import ScriptedDrafter, TablePredictor, tiny_target
from tests.tiny_files import save_head, save_predictor, save_prompts, save_target


def _cost(spec, level, ballast=0, factor=2):
    rows = tuple(
        CostRow(n, (2.0, 8.0) if n > 1 else (2.0,), (0.001 * n, 0.004 * n) if n > 1 else (0.001,))
        for n in range(1, 5)
    )
    return CostModel(
        level=level, widening_factor=factor, ballast_bytes_per_layer=ballast, ballast_target_ratio=None, spec=spec,
        device="cpu", dtype="float32", threads=1, hardware="elsewhere", experts_implementation="eager",
        context_length=8, repeats=1, load_average=0.0, table=rows, workload="drafted",
        mean_curve=(1.0, 1.3, 1.6, 1.9), mean_unique=(2.0, 3.0, 4.0, 5.0), provenance={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    target = save_target(root / "target")
    save_head(root / "drafter", target)
    save_predictor(root / "predictor", target)
    save_prompts(root / "report.jsonl", 6, 1)
    save_prompts(root / "tuning.jsonl", 4, 2)
    spec = routing_spec_of(target)
    _cost(spec, "bare").save(root / "bare.json")
    _cost(spec, "ballast", ballast=2**14).save(root / "ballast.json")
    return root


def _arguments(files, out, **changes):
    values = {
        "target": files / "target",
        "drafter": files / "drafter",
        "predictor": files / "predictor",
        "cost": f"{files / 'bare.json'},{files / 'ballast.json'}",
        "prompts": files / "report.jsonl",
        "tuning_prompts": files / "tuning.jsonl",
        "number": 3,
        "max_new_tokens": 8,
        "allow_load": "true",
        "dtype": "float64",
        "out": out,
    } | changes
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def test_report_of_all_policies_at_both_levels_with_tuning(files, tmp_path, capsys):
    run_verb("benchmark-decoding", _arguments(files, tmp_path / "out", tune="true", tuning_number=2))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["levels"]) == ["bare", "ballast"]
    for level in report["levels"].values():
        assert set(level["policies"]) == {
            "autoregressive", "transformers_generate", "probability", "ecospec", "evict", "ecospec_oracle"
        }  # fmt: skip
        assert level["cost"]["widening_factor"] == 2
    assert report["levels"]["ballast"]["cost"]["ballast_bytes_per_layer"] == 2**14
    assert report["lossless"]["runs"] == 3 * 5 * 2
    assert report["lossless"]["mismatches"] == report["lossless"]["ties"] == 0
    tuned = report["inputs"]["epsilon"]
    assert tuned["prompts"] == 2
    assert report["levels"]["bare"]["cost"]["epsilon"] == tuned["best"]["bare"]
    assert any("was measured on elsewhere" in note for note in report["notes"])
    assert report["provenance"]["threads"] == 1
    assert report["provenance"]["load_at_start"] is not None
    shown = capsys.readouterr().out
    assert "ecospec_oracle" in shown
    assert "0 mismatches" in shown


def test_one_level_and_few_policies_without_cost_tables(files, tmp_path):
    changes = {"cost": None, "levels": "bare", "policies": "autoregressive,probability", "widening_factor": 1}
    run_verb("benchmark-decoding", _arguments(files, tmp_path / "out", **changes))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["levels"]) == ["bare"]
    assert report["levels"]["bare"]["cost"] == {
        "widening_factor": 1, "ballast_bytes_per_layer": 0, "epsilon": 0.25
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "nowhere/drafter"}, "nowhere/drafter"),
        ({"predictor": "nowhere/predictor"}, "nowhere/predictor"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"cost": "nowhere.json"}, "no cost table at nowhere.json"),
        ({"cost": None}, "evict needs a cost table of level 'bare' and of level 'ballast'; measure with"),
        ({"cost": None, "policies": "autoregressive,ecospec", "tune": "true"}, "--tune needs a cost table"),
        ({"policies": "autoregressive,ecospeck"}, "did you mean 'ecospec'"),
        ({"policies": "probability"}, "lacks autoregressive"),
        ({"levels": "bare,heavy"}, "heavy"),
        ({"levels": ","}, "--levels is empty"),
        ({"widening_factor": 4}, "measured at widening factor 2, --widening-factor is 4"),
        ({"prompt_tokens": 2}, "none of the 6 prompts has a length of 1 to 2 tokens"),
        ({"number": 0}, "--number must be at least 1"),
        ({"max_new_tokens": 1}, "--max-new-tokens must be at least 2"),
        ({"max_minutes": 0}, "--max-minutes must be above 0"),
        ({"max_minutes": ".inf"}, "--max-minutes must be above 0 and finite, got inf"),
        ({"depth": 0}, "--depth must be at least 1"),
        ({"epsilon": 0}, "--epsilon must be above 0"),
        ({"widening_factor": 3}, "--widening-factor must be a power of two"),
        ({"buffer_init": "rot"}, "--buffer-init names unknown 'rot'; did you mean 'root'"),
        ({"dtype": "int8"}, "--dtype must be one of"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(files, tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as stop:
        main(["benchmark-decoding", *_arguments(files, tmp_path / "out", **changes)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2
    assert message in error


def test_parts_of_other_targets_are_refused(files, tmp_path, capsys):
    other = save_target(tmp_path / "other", seed=9)
    for name, path in (
        ("drafter", save_head(tmp_path / "drafter", other)),
        ("predictor", save_predictor(tmp_path / "predictor", other)),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["benchmark-decoding", *_arguments(files, tmp_path / "out", **{name: path})])
        assert stop.value.code == 2
        assert "another target" in capsys.readouterr().err or name == "drafter"
    _cost(routing_spec_of(other), "bare").save(tmp_path / "bare.json")
    with pytest.raises(ValueError, match=r"cost table .*bare.json was made for another target"):
        run_verb("benchmark-decoding", _arguments(files, tmp_path / "out", cost=tmp_path / "bare.json"))


def test_cost_tables_must_fit_together(files, tmp_path):
    spec = routing_spec_of(files / "target")
    _cost(spec, "ballast", factor=4).save(tmp_path / "ballast.json")
    with pytest.raises(ValueError, match=r"widen differently .*bare 2, ballast 4"):
        run_verb(
            "benchmark-decoding",
            _arguments(files, tmp_path / "out", cost=f"{files / 'bare.json'},{tmp_path / 'ballast.json'}"),
        )
    _cost(spec, "bare").save(tmp_path / "bare.json")
    with pytest.raises(ValueError, match="two tables of level 'bare'"):
        run_verb(
            "benchmark-decoding",
            _arguments(files, tmp_path / "out", cost=f"{files / 'bare.json'},{tmp_path / 'bare.json'}"),
        )


def test_a_busy_machine_is_refused(files, tmp_path, monkeypatch):
    monkeypatch.setattr("ecospec.decoding.measurement.load_average", lambda: 2.0)
    for name in ("drafter", "predictor", "prompts", "cost"):  # these are found out before anybody waits
        changes = {name: tmp_path / "nowhere.jsonl", "allow_load": "false"}
        with pytest.raises(FileNotFoundError, match="nowhere"):
            run_verb("benchmark-decoding", _arguments(files, tmp_path / "out", **changes))
    with pytest.raises(ValueError, match=r"load average is 2.00, above 0.3"):
        run_verb("benchmark-decoding", _arguments(files, tmp_path / "out", allow_load="false"))


def test_tuning_on_the_reported_prompts_is_refused(files, tmp_path):
    changes = {"tune": "true", "tuning_prompts": files / "report.jsonl", "tuning_number": 6, "number": 6}
    with pytest.raises(
        ValueError, match=r"6 of the 6 groups of the prompts .* are among the 6 groups of .*--tuning-prompts"
    ):
        run_verb("benchmark-decoding", _arguments(files, tmp_path / "out", **changes))


def test_tuning_takes_the_least_modelled_time():
    model = tiny_target("qwen3_moe")
    target = TargetModel(model)
    generator = torch.Generator().manual_seed(0)
    prompts = [BenchmarkPrompt(tuple(torch.randint(0, 64, (9,), generator=generator).tolist()), "g", "d")]
    spec = TablePredictor(3, 8, 2).spec
    rows = tuple(CostRow(n, (2.0, 8.0), (0.001, 0.008)) for n in range(1, 5))
    cost = dataclasses.replace(_cost(spec, "bare"), table=rows)
    found = tune_epsilon(
        target,
        ScriptedDrafter(list(prompts[0].ids)),
        TablePredictor(3, 8, 2),
        prompts,
        {"bare": cost},
        settings=BenchmarkSettings(max_new_tokens=16),
        grid=(2.0, 0.01, 0.25),
    )
    assert [trial.epsilon for trial in found.trials] == [0.01, 0.25, 2.0]
    least = min(trial.seconds_per_token["bare"] for trial in found.trials)
    assert found.best == {
        "bare": next(t.epsilon for t in found.trials if t.seconds_per_token["bare"] == least)
    }  # fmt: skip
    assert found.to_dict()["prompts"] == 1
    with pytest.raises(ValueError, match="tuning needs prompts, cost tables and a grid, got 1, 1 and 0"):
        tune_epsilon(
            target,
            ScriptedDrafter([]),
            TablePredictor(3, 8, 2),
            prompts,
            {"bare": cost},
            settings=BenchmarkSettings(),
            grid=(),
        )


def test_modelled_seconds_adds_up():
    spec = TablePredictor(3, 8, 2).spec
    cost = _cost(spec, "bare")
    zeros = dict.fromkeys(("predict", "draft", "select", "verify", "total", "oracle"), 0.0)
    steps = [StepRecord(2, 1, 10, 4, (2, 8, 5), **zeros), StepRecord(1, 0, 10, 1, (2, 2, 2), **zeros)]
    assert modelled_seconds(steps, cost) == pytest.approx((0.004 + 0.016) / 2 + 0.001)


class _Words:
    """Token ids are word lengths."""

    bos_token_id = None

    def __call__(self, text, **_):
        return {"input_ids": [len(word) for word in text.split()]}


def test_prompts_are_spread_over_datasets_and_groups():
    prompts = [
        Prompt(f"set{i % 3}", f"g{i // 2}", text=" ".join("x" * (j + 1) for j in range(20)), document=True)
        for i in range(60)
    ]
    found = select_prompts(prompts, _Words(), number=9, max_tokens=5, seed=1)
    assert len(found) == len({p.group_id for p in found}) == 9
    assert sorted(p.dataset for p in found) == sorted(["set0", "set1", "set2"] * 3)
    assert all(len(p.ids) == 5 and list(p.ids) == list(range(p.ids[0], p.ids[0] + 5)) for p in found)
    assert len({p.ids for p in found}) > 1
    assert found == select_prompts(prompts, _Words(), number=9, max_tokens=5, seed=1)
    assert found != select_prompts(prompts, _Words(), number=9, max_tokens=5, seed=2)
    assert len(select_prompts(prompts, _Words(), number=1000, max_tokens=5)) == 30


def test_whole_prompts_are_not_cut():
    prompts = [Prompt("d", "a", text="one two three"), Prompt("d", "b", text="one two three four")]
    found = select_prompts(prompts, _Words(), number=5, max_tokens=3)
    assert [(p.group_id, p.ids) for p in found] == [("a", (3, 3, 5))]
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 3"):
        select_prompts(prompts, _Words(), number=0, max_tokens=3)


def test_policies_get_their_options(files):
    from ecospec.cli.benchmark_parts import BenchmarkDecodingConfig, benchmark_policy

    config = BenchmarkDecodingConfig(
        target=files, drafter=files, predictor=files, out=files, buffer_init="empty", seed=5
    )
    cost = _cost(routing_spec_of(files / "target"), "bare")
    assert benchmark_policy(config, "ecospec", 0.5, None) == make_policy(
        "ecospec", epsilon=0.5, buffer_init="empty"
    )
    assert benchmark_policy(config, "ecospec_static", 0.5, None) == make_policy("ecospec_static", epsilon=0.5)
    assert benchmark_policy(config, "evict", 0.5, cost) == make_policy("evict", mean_curve=cost.mean_curve)
    assert benchmark_policy(config, "random", 0.5, None) == make_policy("random", seed=5)
