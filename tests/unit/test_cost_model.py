"""The cost model's contract, and calibration with a clock that counts experts instead of seconds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from typing import Any

import pytest
import torch

from ecospec.decoding.calibration import CalibrationConfig, calibrate, suggest_ballast
from ecospec.decoding.cost_model import CostModel, CostRow
from ecospec.decoding.forced_routing import ForcedRouting, forced_routes, unique_grid
from ecospec.decoding.target import TargetModel
from ecospec.decoding.widening import Ballast, CostLevel
from ecospec.decoding.workload import Workload, drafted_workload, nested_trees, text_workload
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.hooks import RoutingRecorder, find_moe_layers
from tests.decoding_fakes import VOCAB, ScriptedDrafter, random_tree, tiny_target

SPEC = RoutingSpec(3, (0, 1, 2), 8, 2, VOCAB, "0" * 64, "tiny", "1" * 64)


def cost_model(**changes):
    values: dict[str, Any] = {
        "level": "bare",
        "widening_factor": 64,
        "ballast_bytes_per_layer": 0,
        "ballast_target_ratio": None,
        "spec": SPEC,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "hardware": "a processor",
        "experts_implementation": "ecospec_grouped",
        "context_length": 128,
        "repeats": 7,
        "load_average": 0.1,
        "table": (
            CostRow(1, (2.0,), (1.0,)),
            CostRow(2, (2.0, 4.0), (1.5, 2.5)),
            CostRow(4, (2.0, 4.0, 8.0), (2.0, 3.0, 5.0)),
        ),
        "workload": "text",
        "mean_curve": (1.0, 2.0, 2.5, 3.0),
        "mean_unique": (2.0, 3.5, 4.5, 5.0),
        "provenance": {"git_sha": "unknown"},
    }
    return CostModel(**values | changes)


def test_interpolation():
    model = cost_model()
    assert model.time(1, 2) == 1.0
    assert model.time(2, 3) == 2.0
    assert model.time(4, 6) == 4.0
    assert model.time(3, 4) == pytest.approx((2.5 + 3.0) / 2)
    assert model.time(1.5, 2) == pytest.approx(1.25)


def test_interpolation_is_clamped():
    model = cost_model()
    assert model.time(0, 2) == 1.0
    assert model.time(1, 50) == 1.0
    assert model.time(4, 1) == 2.0
    assert model.time(40, 50) == 5.0


def test_mean_curve():
    model = cost_model()
    assert [model.mean_time(n) for n in (1, 2, 3, 4)] == [1.0, 2.0, 2.5, 3.0]
    for tokens in (0, 5):
        with pytest.raises(ValueError, match=rf"C\({tokens}\) was not measured, only C\(1\) to C\(4\)"):
            model.mean_time(tokens)


def test_round_trip(tmp_path):
    model = cost_model(ballast_target_ratio=2.0, load_average=None)
    path = model.save(tmp_path / "deep" / "cost.json")
    assert CostModel.load(path) == model
    assert [entry.name for entry in path.parent.iterdir()] == ["cost.json"]
    with pytest.raises(FileExistsError, match="exists; remove it or name another file"):
        model.save(path)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no cost table at .*absent.json; measure one with calibrate-cost"):
        CostModel.load(tmp_path / "absent.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad.json is not JSON"):
        CostModel.load(bad)
    bad.write_text("[]")
    with pytest.raises(ValueError, match=r"bad.json: CostModel must be a JSON object, got list"):
        CostModel.load(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version is 2, this version reads 1"),
        ({"level": ""}, "level must be a non-empty string"),
        ({"hardware": 3}, "hardware must be a non-empty string"),
        ({"widening_factor": 0}, "widening_factor must be an integer of at least 1"),
        ({"threads": True}, "threads must be an integer of at least 1"),
        ({"repeats": 1.5}, "repeats must be an integer of at least 1"),
        ({"ballast_bytes_per_layer": -1}, "ballast_bytes_per_layer must be an integer of at least 0"),
        ({"workload": "dreamt"}, "workload must be one of drafted, text"),
        ({"table": []}, "table must list ascending numbers of tokens"),
        ({"table": 3}, "table must be a list of rows"),
        ({"mean_curve": [1.0, -1.0]}, "mean_curve must be positive"),
        ({"mean_curve": "fast"}, "mean_curve must be a list of numbers"),
        ({"mean_unique": [1.0]}, "mean_unique 1"),
        ({"load_average": -1}, "load_average must be null or a number"),
        ({"provenance": "me"}, "provenance must be an object"),
        ({"spec": {}}, "RoutingSpec field 'format_version' is missing"),
        ({"table": [{"tokens": 1, "unique": [2.0], "seconds": [0.0]}]}, "seconds must be positive"),
        ({"table": [{"tokens": 1, "unique": [2.0, 2.0], "seconds": [1.0, 1.0]}]}, "positive and ascending"),
        ({"table": [{"tokens": 1, "unique": [2.0], "seconds": []}]}, "unique has 1 entries, seconds 0"),
        (
            {"table": [{"tokens": 0, "unique": [2.0], "seconds": [1.0]}]},
            "CostRow.tokens must be a positive integer",
        ),
        ({"table": [{"tokens": 1, "unique": [9.0], "seconds": [1.0]}]}, "more unique experts at 1 tokens"),
        ({"table": [{"tokens": 1, "unique": [2.0]}]}, "CostModel.table: field 'seconds' is missing"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_every_wrong_field_is_named_with_its_file(tmp_path, change, message):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(cost_model().to_dict() | change))
    with pytest.raises(ValueError, match=message) as error:
        CostModel.load(path)
    assert str(error.value).startswith(str(path))


def test_a_missing_field_is_named(tmp_path):
    data = cost_model().to_dict()
    del data["mean_curve"]
    (tmp_path / "cost.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"cost.json: CostModel: field 'mean_curve' is missing"):
        CostModel.load(tmp_path / "cost.json")


@pytest.mark.parametrize(("tokens", "unique"), [(1, 2), (3, 2), (3, 5), (3, 6), (9, 8)])
def test_forced_routes_touch_exactly_u_experts(tokens, unique):
    route = forced_routes(tokens, 2, unique, 8, torch.Generator().manual_seed(0))
    assert route.shape == (tokens, 2)
    assert len(set(route.flatten().tolist())) == unique
    assert all(len(set(row)) == 2 for row in route.tolist())


def test_unique_grid_spans_the_possible_range():
    for tokens in range(1, 12):
        grid = unique_grid(tokens, 4, 64, 5)
        assert grid[0] == 4
        assert grid[-1] == min(64, 4 * tokens)
        assert grid == sorted(set(grid))
        assert len(grid) <= 5


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_forced_routing_reaches_the_experts_and_ends(family):
    model = tiny_target(family)
    ids = torch.randint(0, VOCAB, (1, 3))
    layers = find_moe_layers(model)
    forced = ForcedRouting(layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), forced.active(), RoutingRecorder(model, source="experts") as recorder:
        own = model(input_ids=ids).logits
        routes = [forced_routes(3, 2, 4, 8, generator) for _ in layers]
        forced.set(routes)
        assert not torch.equal(model(input_ids=ids).logits, own)
        executed = recorder.last_experts
        for slot, route in enumerate(routes):
            assert torch.equal(executed[:, slot], route.sort(dim=-1).values)
        forced.set(None)
        assert torch.equal(model(input_ids=ids).logits, own)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, own)


class ExpertClock:
    """A stopwatch whose seconds are 1 + 0.5 per token + the mean of unique experts per layer, plus ballast."""

    def __init__(self, model, ballast_per_call=0.0):
        self.model = model
        self.ballast = ballast_per_call
        self.calls = 0

    def __call__(self, run, device):
        assert device.type == "cpu"
        with RoutingRecorder(self.model, source="experts") as recorder:
            run()
            experts = recorder.last_experts
        self.calls += 1
        unique = sum(len(set(layer.flatten().tolist())) for layer in experts.unbind(1)) / experts.shape[1]
        extra = sum(block.weight_bytes for block in self.model.modules() if isinstance(block, Ballast))
        return 1.0 + 0.5 * experts.shape[0] + unique + self.ballast * extra


@pytest.fixture
def target():
    return TargetModel(tiny_target("qwen3_moe", torch.float32))


def prompts(count=2, length=40):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for _ in range(count)]


def test_calibration_measures_what_it_says(target):
    clock = ExpertClock(target.model)
    seen = []
    config = CalibrationConfig(max_tokens=5, points_per_row=4, repeats=2, curve_repeats=2)
    workload = text_workload(prompts(), context_length=16, nodes=5)
    model = calibrate(
        target,
        SPEC,
        CostLevel("bare", 1),
        workload,
        config,
        provenance={"a": 1},
        stopwatch=clock,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [row.tokens for row in model.table] == [1, 2, 3, 4, 5]
    for row in model.table:
        assert row.unique == tuple(map(float, unique_grid(row.tokens, 2, 8, 4)))
        for unique, seconds in zip(row.unique, row.seconds, strict=True):
            assert seconds == pytest.approx(1.0 + 0.5 * row.tokens + unique)
    for tokens in range(1, 6):
        expected = 1.0 + 0.5 * tokens + model.mean_unique[tokens - 1]
        assert model.mean_time(tokens) == pytest.approx(expected)
        assert 2.0 <= model.mean_unique[tokens - 1] <= 8.0
    assert model.mean_unique[0] == 2.0
    total = seen[0][1]
    assert [done for done, _ in seen] == list(range(1, total + 1))
    assert (model.context_length, model.workload, model.dtype, model.threads) == (16, "text", "float32", 1)
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_calibration_refuses_small_trees(target):
    workload = text_workload(prompts(), context_length=16, nodes=3)
    with pytest.raises(ValueError, match="a tree of 3 nodes cannot measure 5 tokens; lower --max-tokens"):
        calibrate(target, SPEC, CostLevel("bare", 1), workload, CalibrationConfig(max_tokens=5), provenance={})


@pytest.mark.parametrize("field", ["max_tokens", "points_per_row", "repeats", "curve_repeats"])
def test_calibration_config_is_validated(field):
    with pytest.raises(ValueError, match=f"CalibrationConfig.{field} must be at least"):
        dataclasses.replace(CalibrationConfig(), **{field: 0})


def test_nested_trees_grow_in_order_of_probability():
    tree = random_tree(7, random.Random(0))
    workload = Workload((torch.zeros(3, dtype=torch.int64),), (tree,), "drafted")
    nested = nested_trees(workload, 7)[0]
    assert [len(part) for part in nested] == [1, 2, 3, 4, 5, 6, 7]
    for small, large in itertools.pairwise(nested):
        assert float(large.logprobs.sum()) <= float(small.logprobs.sum())
        large.validate()


def test_short_prompts_are_left_out_or_refused():
    workload = text_workload([*prompts(1, 40), *prompts(1, 10)], context_length=16, nodes=4)
    assert len(workload.contexts) == 1
    with pytest.raises(ValueError, match=r"no prompt has 104 tokens \(the longest has 40\); shorten the context"):
        text_workload(prompts(), context_length=100, nodes=4)


def test_ballast_is_sized_to_the_ratio(target):
    # Ballast adds 1e-6 seconds a byte to any step, so the ratio can be solved by hand.
    clock = ExpertClock(target.model, ballast_per_call=1e-6)
    workload = text_workload(prompts(), context_length=16, nodes=4)
    found = suggest_ballast(
        target, workload, target_ratio=1.5, tokens=4, trial_bytes=2**20, repeats=1, stopwatch=clock
    )
    assert found.bare_ratio > 1.5
    assert found.bytes_per_layer % 2**20 == 0
    # Rounding to MiB of three layers moves a step by at most 1.6 seconds.
    assert found.ratio == pytest.approx(1.5, abs=0.35)
    assert not any(isinstance(module, Ballast) for module in target.model.modules())


def test_no_ballast_is_suggested_where_none_is_needed(target):
    clock = ExpertClock(target.model)
    workload = text_workload(prompts(), context_length=16, nodes=4)
    found = suggest_ballast(target, workload, target_ratio=50.0, stopwatch=clock)
    assert found.bytes_per_layer == 0
    assert found.ratio == found.bare_ratio
    with pytest.raises(ValueError, match=r"the ratio never falls to 1.1; choose a higher ratio"):
        suggest_ballast(target, workload, target_ratio=1.1, trial_bytes=2**20, repeats=1, stopwatch=clock)


def test_drafted_workload_takes_its_trees_from_the_drafter(target):
    drafter = ScriptedDrafter([1, 2, 3], aux_layers=(0, 2))
    texts = [*prompts(2, 20), *prompts(1, 4)]
    workload = drafted_workload(target, drafter, texts, context_length=12)
    assert workload.origin == "drafted"
    assert [len(tree) for tree in workload.trees] == [11, 11]
    assert [int(tree.tokens[0]) for tree in workload.trees] == [int(ids[12]) for ids in texts[:2]]
    assert drafter.processed == texts[1][:12].tolist()
    assert drafter.aux[0].shape == (12, 64)
    config = CalibrationConfig(max_tokens=11, points_per_row=2, repeats=1, curve_repeats=1)
    clock = ExpertClock(target.model)
    model = calibrate(target, SPEC, CostLevel("bare", 1), workload, config, provenance={}, stopwatch=clock)
    assert len(model.mean_curve) == 11
    assert all(small <= large for small, large in itertools.pairwise(model.mean_unique))
