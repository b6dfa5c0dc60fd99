"""``summary.json``: its keys are pinned, and everything else is refused."""

from __future__ import annotations

import copy
import json

import pytest

from ecospec.eval.demo_page import result_table, summary, validate_summary

PREDICTORS = (
    "predictor", "demo_run_predictor", "random", "frequency", "token_table", "bigram_table", "last_token"
)  # fmt: skip
POLICIES = ("autoregressive", "probability", "ecospec", "evict", "ecospec_oracle")
STAGES = ("predict", "draft", "select", "verify", "total")


def _interval(mean):
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "groups": 9}


def _policy(name):
    return {
        "speedup": 0.9, "speedup_low": 0.8, "speedup_high": 1.0, "accepted": 2.2, "experts": 11.0,
        "achievable": name != "ecospec_oracle", "tokens": 7, "nodes": 4.0,
        "step_ms": {stage: {"mean": 2.0, "p50": 2.0, "p95": 3.0} for stage in (*STAGES, "other")},
    }  # fmt: skip


@pytest.fixture
def reports():
    overlap = {
        "predictors": {name: {"overlap": _interval(0.5), "recall": {}} for name in PREDICTORS},
        "gain_over_best_table": {n: {"best_table": "bigram_table"} | _interval(0.1) for n in PREDICTORS[:2]},
        "tokens": 1000,
        "groups": 9,
    }
    level = {
        "reference": "autoregressive",
        "policies": {n: _policy(n) for n in (*POLICIES, "transformers_generate")},
    }
    decoding = {
        "levels": {"bare": level, "ballast": level},
        "lossless": {"runs": 10, "tokens": 80, "mismatches": 0, "ties": 0, "failures": []},
    }
    return overlap, decoding


def _paths(data, prefix=""):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_exactly_these_keys(reports):
    found = summary(*reports)
    expected = {f"overlap.{name}.{part}" for name in PREDICTORS for part in ("mean", "low", "high")}
    expected |= {f"overlap.gain_over_best_table.{part}" for part in ("mean", "low", "high")} | {"overlap.tokens"}
    for level in ("bare", "ballast"):
        for policy in POLICIES:
            at = f"decoding.{level}.{policy}."
            expected |= {at + part for part in ("speedup", "speedup_low", "speedup_high", "accepted", "experts")}
            expected |= {f"{at}step_ms.{stage}" for stage in STAGES}
    expected |= {f"lossless.{part}" for part in ("runs", "tokens", "mismatches", "ties")}
    assert set(_paths(found)) == expected
    validate_summary(json.loads(json.dumps(found)))


def test_values_come_from_the_reports(reports):
    overlap, decoding = reports
    overlap["predictors"]["predictor"]["overlap"] = _interval(0.88)
    decoding["levels"]["bare"]["policies"]["evict"]["step_ms"]["verify"]["mean"] = 41.5
    found = summary(overlap, decoding)
    assert found["overlap"]["predictor"] == {"mean": 0.88, "low": pytest.approx(0.87), "high": pytest.approx(0.89)}
    assert found["decoding"]["bare"]["evict"]["step_ms"]["verify"] == 41.5


def _without(data, path):
    *parents, last = path
    place = data
    for key in parents:
        place = place[key]
    del place[last]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("overlap",), "summary.json: key 'overlap' is missing"),
        (("overlap", "random"), "summary.json: overlap: key 'random' is missing"),
        (("overlap", "predictor", "low"), "summary.json: overlap.predictor: key 'low' is missing"),
        (("decoding", "ballast"), "summary.json: decoding: key 'ballast' is missing"),
        (("decoding", "bare", "evict", "step_ms"), "summary.json: decoding.bare.evict: key 'step_ms' is missing"),
        (("decoding", "bare", "evict", "step_ms", "total"), "decoding.bare.evict.step_ms: key 'total' is missing"),
        (("lossless", "ties"), "summary.json: lossless: key 'ties' is missing"),
    ],
)
def test_missing_keys_are_named(reports, path, message):
    data = copy.deepcopy(summary(*reports))
    _without(data, path)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        validate_summary(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("extra",), 1, "unknown key 'extra'"),
        (("overlap", "predictor", "groups"), 9, "overlap.predictor: unknown key 'groups'"),
        (("overlap", "tokens"), 1.5, "overlap.tokens must be an integer"),
        (("overlap", "random", "mean"), None, "overlap.random.mean must be a number, got None"),
        (("decoding", "bare", "evict", "speedup"), "fast", "evict.speedup must be a number, got 'fast'"),
        (("decoding", "bare"), {}, "decoding.bare must be an object with one entry per policy"),
        (("lossless", "mismatches"), -1, "lossless.mismatches must be an integer of at least 0"),
        (("lossless",), [], "lossless must be a JSON object, got list"),
    ],
)
def test_wrong_values_are_named(reports, path, value, message):
    data = copy.deepcopy(summary(*reports))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        validate_summary(data)


def test_missing_intervals_are_null(reports):
    data = summary(*reports)
    data["overlap"]["predictor"] |= {"low": None, "high": None}
    data["decoding"]["bare"]["evict"] |= {"speedup_low": None, "speedup_high": None}
    validate_summary(data)


def test_a_report_that_lacks_a_predictor_is_refused(reports):
    overlap, decoding = reports
    del overlap["predictors"]["demo_run_predictor"]
    with pytest.raises(ValueError, match="the reports lack 'demo_run_predictor'"):
        summary(overlap, decoding)


def test_one_table_shows_it_all(reports):
    overlap, decoding = reports
    overlap["routing"] = {}
    text = result_table(overlap, decoding).markdown()
    for name in (*PREDICTORS, *POLICIES):
        assert name in text
    assert "ballast: ecospec_oracle *, ×" in text
    assert "not achievable" in text
