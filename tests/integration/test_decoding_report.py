"""The decoding benchmark on a tiny target: what it runs, counts, compares, and how it is shown."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from ecospec.decoding.loop import DecodingLoop
from ecospec.decoding.lossless import LosslessCheck
from ecospec.decoding.policies import make_policy
from ecospec.decoding.records import StepRecord
from ecospec.decoding.target import TargetModel
from ecospec.decoding.widening import add_ballast_, remove_ballast_
from ecospec.eval.bootstrap import ratio_interval
from ecospec.eval.decoding_benchmark import (
    GENERATE,
    BenchmarkPrompt,
    BenchmarkResult,
    BenchmarkSettings,
    LevelPlan,
    Run,
    _compare,
    generate_reference,
    plan_blocks,
    run_benchmark,
    single_thread,
)
from ecospec.eval.decoding_report import decoding_report, write_decoding_report
from ecospec.eval.decoding_summary import STAGES, summarise_runs
from ecospec.eval.report_files import read_report
from tests.decoding_fakes import ScriptedDrafter, TablePredictor, tiny_target

NEW = 12
POLICIES = ("autoregressive", "probability", "ecospec", "evict", "ecospec_oracle")


def _policies(names=POLICIES):
    options = {"evict": {"mean_curve": (1.0, 1.2, 1.4, 1.6)}}
    return {name: make_policy(name, **options.get(name, {})) for name in names}


class _Ballast:
    """Counts how often the level is switched."""

    def __init__(self, model):
        self.model, self.switches = model, 0

    @contextlib.contextmanager
    def __call__(self):
        self.switches += 1
        add_ballast_(self.model, 16 * 2 * 32 * 8)
        try:
            yield
        finally:
            remove_ballast_(self.model)


@pytest.fixture(scope="module")
def bench():
    model = tiny_target("qwen3_moe")
    target = TargetModel(model)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        BenchmarkPrompt(tuple(torch.randint(0, 64, (9,), generator=generator).tolist()), f"g{i // 2}", "random")
        for i in range(5)
    ]
    plain = DecodingLoop(target, None, None, make_policy("autoregressive"))
    first = plain.generate(torch.tensor(prompts[0].ids), NEW).tokens
    drafter = ScriptedDrafter([*prompts[0].ids, *first], aux_layers=(0, 1, 2))
    predictor = TablePredictor(3, 8, 2)
    ballast = _Ballast(model)
    levels = {"bare": LevelPlan(_policies(), contextlib.nullcontext), "ballast": LevelPlan(_policies(), ballast)}
    settings = BenchmarkSettings(max_new_tokens=NEW, block=2)
    seen = []
    result = run_benchmark(
        model,
        prompts,
        levels,
        target=target,
        drafter=drafter,
        predictor=predictor,
        settings=settings,
        progress=lambda level, policy: seen.append((level, policy)),
    )
    report = decoding_report(
        result,
        prompts,
        settings,
        predictor.spec,
        levels={"bare": {"widening_factor": 64}, "ballast": {"ballast_bytes_per_layer": 2**25}},
        inputs={"target": "tiny"},
        provenance={"git_sha": "0" * 40},
        notes=["A caveat."],
    )
    return prompts, result, report, seen, ballast


def test_every_policy_ran_once_on_every_prompt_and_level(bench):
    _, result, _, seen, ballast = bench
    keys = [(run.prompt, run.level, run.policy) for run in result.runs]
    expected = {(i, level, p) for i in range(5) for level in ("bare", "ballast") for p in (*POLICIES, GENERATE)}
    assert len(keys) == len(set(keys)) == len(expected)
    assert set(keys) == expected
    assert sorted(seen) == sorted((level, policy) for _, level, policy in keys)
    assert ballast.switches == 3  # one per block of two prompts
    orders = {tuple(run.policy for run in result.runs if (run.prompt, run.level) == (i, "bare")) for i in range(5)}
    assert len(orders) > 1


def test_outputs_are_compared_and_lossless(bench):
    _, result, report, _, _ = bench
    tokens = {(run.prompt, run.tokens) for run in result.runs}
    assert len(tokens) == 5  # one output per prompt, whatever the policy and level
    assert report["lossless"] == {
        "runs": 5 * 2 * len(POLICIES),
        "tokens": 5 * 2 * len(POLICIES) * NEW,
        "mismatches": 0,
        "ties": 0,
        "failures": [],
    }


def test_speculation_really_happened(bench):
    report = bench[2]
    policies = report["levels"]["bare"]["policies"]
    assert policies["autoregressive"]["accepted"] == policies[GENERATE]["accepted"] == 1.0
    assert policies["autoregressive"]["experts"] == policies[GENERATE]["experts"] == 2.0
    assert policies["probability"]["accepted"] > 1.0
    assert policies["probability"]["nodes"] == 4.0
    assert policies["probability"]["experts"] > 2.0
    assert policies["ecospec_oracle"]["oracle_ms"] > 0.0
    assert [p for p in policies if not policies[p]["achievable"]] == ["ecospec_oracle"]
    assert policies["probability"]["step_ms"]["predict"]["mean"] == 0.0
    assert policies["ecospec"]["step_ms"]["predict"]["mean"] > 0.0


def _step(emitted, unique, **seconds):
    times = {"predict": 0.0, "draft": 0.0, "select": 0.0, "verify": 0.0, "oracle": 0.0} | seconds
    return StepRecord(emitted, emitted - 1, 10, 4, unique, total=0.01, **times)


def _run(prompt, policy, seconds, steps=(), prefill=1.0):
    return Run(prompt, "bare", policy, prefill, seconds, tuple(range(5)), tuple(steps))


def test_numbers_against_hand_computation():
    prompts = [BenchmarkPrompt((1,), group, "d") for group in ("a", "a", "b", "c")]
    loop, generate, own = [4.0, 4.0, 6.0, 5.0], [5.0, 5.0, 7.0, 6.0], [2.0, 3.0, 4.0, 6.0]
    steps = [_step(3, (4, 6), verify=0.006, draft=0.002), _step(1, (2, 2), verify=0.008)]
    runs = []
    for i in range(4):
        runs.append(_run(i, "autoregressive", loop[i], [_step(1, (2, 2), verify=0.01)] * 4))
        runs.append(_run(i, GENERATE, generate[i]))
        runs.append(_run(i, "probability", own[i], steps))
        runs.append(_run(i, "ecospec", own[i], [_step(2, (3, 3))] * 2))
    level = summarise_runs(runs, prompts, top_k=2)["bare"]
    assert level["reference"] == "autoregressive"
    found = level["policies"]["probability"]
    expected = ratio_interval([8.0, 6.0, 5.0], [5.0, 4.0, 6.0])
    assert found["speedup"] == pytest.approx(19 / 15)
    assert (found["speedup_low"], found["speedup_high"]) == pytest.approx((expected.low, expected.high))
    assert found["speedup_with_prefill"] == pytest.approx(23 / 19)
    assert found["groups"] == 3
    assert found["accepted"] == pytest.approx(2.0)
    assert found["experts"] == pytest.approx((5 + 2) / 2)
    assert found["tokens_per_second"] == pytest.approx(16 / 15)
    assert found["step_ms"]["verify"] == pytest.approx({"mean": 7.0, "p50": 7.0, "p95": 8.0})
    assert found["step_ms"]["other"]["mean"] == pytest.approx(2.0)
    assert found["step_ms"]["total"]["mean"] == pytest.approx(10.0)
    assert level["policies"][GENERATE]["step_ms"]["total"]["mean"] == pytest.approx(
        np.mean([1250, 1250, 1750, 1500])
    )
    comparison = level["comparisons"]["ecospec_over_probability"]
    assert comparison["experts"]["mean"] == pytest.approx(3.0 - 3.5)
    assert comparison["accepted"]["mean"] == pytest.approx(0.0)
    assert comparison["speedup"]["mean"] == pytest.approx(1.0)


def test_reference_is_the_faster_by_summed_time():
    prompts = [BenchmarkPrompt((1,), "a", "d"), BenchmarkPrompt((1,), "b", "d")]
    runs = [_run(i, "autoregressive", s, [_step(1, (2,))]) for i, s in enumerate([4.0, 4.0])]
    runs += [_run(i, GENERATE, s) for i, s in enumerate([1.0, 6.0])]
    level = summarise_runs(runs, prompts, top_k=2)["bare"]
    assert level["reference"] == GENERATE
    assert level["policies"]["autoregressive"]["speedup"] == pytest.approx(7 / 8)
    assert level["policies"][GENERATE]["speedup"] == pytest.approx(1.0)


def test_stages_add_up_to_the_step(bench):
    for level in bench[2]["levels"].values():
        for policy in level["policies"].values():
            times = policy["step_ms"]
            assert sum(times[s]["mean"] for s in (*STAGES, "other")) == pytest.approx(times["total"]["mean"])


def test_files_and_page(bench, tmp_path):
    report = bench[2]
    write_decoding_report(report, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert read_report(tmp_path / "report.json", "decoding") == json.loads(json.dumps(report))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img ") == 2
    assert not re.search(r"https?://", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))
    text = (tmp_path / "report.md").read_text()
    for content in (text, page):
        assert "ecospec_oracle (not achievable)" in content
        assert "bonus included" in content
        assert "with 32 MiB of ballast per MoE layer" in content
        assert "0 mismatches, 0 numerical ties" in content
        assert "A caveat." in content


def test_report_keys_are_stable(bench):
    report = bench[2]
    assert sorted(report) == [
        "format_version",
        "inputs",
        "kind",
        "levels",
        "load",
        "lossless",
        "notes",
        "prompts",
        "provenance",
        "runs",
        "settings",
        "spec",
    ]
    level = report["levels"]["ballast"]
    assert sorted(level) == ["comparisons", "cost", "policies", "reference"]
    keys = [sorted(policy) for policy in level["policies"].values()]
    assert all(k == keys[0] for k in keys)
    assert {"speedup", "speedup_low", "speedup_high", "accepted", "experts", "step_ms", "first_token_ms"} <= set(
        keys[0]
    )
    assert sorted(level["policies"]["ecospec"]["step_ms"]) == sorted((*STAGES, "other", "total"))


def test_a_mismatch_is_reported(bench):
    """A policy whose outputs differ is counted, named and listed."""
    prompts, result, _, _, _ = bench
    found = {run.policy: run for run in result.runs if (run.prompt, run.level) == (0, "bare")}
    wrong = list(found["ecospec"].tokens)
    wrong[3] = (wrong[3] + 1) % 64
    found["ecospec"] = dataclasses.replace(found["ecospec"], tokens=tuple(wrong))
    check, collected = LosslessCheck(tiny_target("qwen3_moe")), BenchmarkResult()
    _compare(check, prompts[0], found, collected)
    assert check.summary()["mismatches"] == 1
    assert [failure[:3] for failure in collected.failures] == [("bare", "ecospec", 0)]
    assert collected.failures[0][3].position == 3


def test_generate_reference_stops_at_eos_like_the_loop(bench):
    prompts = bench[0]
    model = tiny_target("qwen3_moe")
    plain = DecodingLoop(TargetModel(model), None, None, make_policy("autoregressive"))
    free = plain.generate(torch.tensor(prompts[1].ids), NEW).tokens
    stop = free[4]
    tokens, prefill, seconds = generate_reference(model, prompts[1].ids, NEW, [stop])
    assert tokens == plain.generate(torch.tensor(prompts[1].ids), NEW, [stop]).tokens
    assert tokens[-1] == stop
    assert prefill > 0
    assert seconds >= 0


def test_blocks_cover_everything_in_seeded_order():
    settings = BenchmarkSettings(block=3, seed=4)
    blocks = list(plan_blocks(8, ["bare", "ballast"], settings))
    assert [i for indices, _ in blocks for i in indices] == list(range(8))
    assert all(sorted(names) == ["ballast", "bare"] for _, names in blocks)
    assert blocks == list(plan_blocks(8, ["bare", "ballast"], settings))


def test_refusals(bench):
    prompts = bench[0]
    model = tiny_target("qwen3_moe")
    shared: dict[str, Any] = {
        "target": TargetModel(model),
        "drafter": None,
        "predictor": None,
        "settings": BenchmarkSettings(),
    }
    plan = {"bare": LevelPlan(_policies(["probability"]), contextlib.nullcontext)}
    with pytest.raises(ValueError, match="cost level bare lacks the policy autoregressive"):
        run_benchmark(model, prompts, plan, **shared)
    with pytest.raises(ValueError, match="got 0 and 1"):
        run_benchmark(model, [], plan, **shared)
    plan = {"bare": LevelPlan(_policies(["autoregressive", "probability"]), contextlib.nullcontext)}
    with pytest.raises(ValueError, match="policy probability needs a drafter"):
        run_benchmark(model, prompts, plan, **shared)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 2"):
        BenchmarkSettings(max_new_tokens=1)
    with pytest.raises(ValueError, match="max_seconds must be above 0"):
        BenchmarkSettings(max_seconds=0)
    with pytest.raises(ValueError, match="block must be at least 1"):
        BenchmarkSettings(block=0)
    with pytest.raises(ValueError, match="--threads must be at least 1"), single_thread(0):
        pass


def test_time_limit_ends_after_a_whole_block(bench):
    prompts = bench[0]
    model = tiny_target("qwen3_moe")
    settings = BenchmarkSettings(max_new_tokens=2, block=2, max_seconds=1e-9)
    plain = LevelPlan(_policies(["autoregressive"]), contextlib.nullcontext)
    levels = {"bare": plain, "ballast": plain}
    result = run_benchmark(
        model, prompts, levels, target=TargetModel(model), drafter=None, predictor=None, settings=settings
    )
    assert result.prompts == 2
    assert {(run.prompt, run.level) for run in result.runs} == {(i, n) for i in (0, 1) for n in levels}
    spec = TablePredictor(3, 8, 2).spec
    facts: dict[str, dict[str, Any]] = {"bare": {}, "ballast": {}}
    report = decoding_report(result, prompts, settings, spec, levels=facts, inputs={}, provenance={})
    assert report["prompts"]["number"] == 2
    assert report["notes"] == ["The time limit was reached after 2 of 5 prompts."]


def test_threads_are_restored():
    before = torch.get_num_threads()
    with single_thread(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
