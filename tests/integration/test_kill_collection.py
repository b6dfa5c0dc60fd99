"""Collecting and replaying with a real model, killed at random; `test_store_robustness` kills writers alone."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.collect import collect, open_engine
from ecospec.trace_collection.engine import TargetEngine
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.replay import compare_stores, replay
from ecospec.trace_collection.store import TraceStore
from tests.collect_targets import VOCAB, make_target, make_tokenizer, texts
from tests.killing import kill_until_same

SPEC = RoutingSpec(2, (0, 1), 8, 2, VOCAB, "0" * 64, "tiny", "1" * 64)


@pytest.mark.slow
@pytest.mark.parametrize("uses_host", [True, False])
def test_collection_killed_at_50_random_moments(uses_host, tmp_path, monkeypatch):
    """Shards are written between batches, and beside them as for a target on a GPU."""
    torch.set_num_threads(1)
    monkeypatch.setattr(TargetEngine, "uses_host", property(lambda _: uses_host, lambda *_: None), raising=False)
    model, tokenizer = make_target(), make_tokenizer()
    prompts = texts([3 + number % 20 for number in range(40)])
    prompts.append(dataclasses.replace(prompts[0], text="w1 " * 200, group_id="too long"))  # listed as skipped
    config = CollectConfig(max_new_tokens=16, batch_size=4, temperature=1.0)

    def work(path, *, resume):
        collect(model, tokenizer, prompts, config, path, spec=SPEC, resume=resume, tokens_per_shard=60)

    kill_until_same(work, tmp_path, moments=50)


@pytest.mark.slow
def test_replay_killed_at_20_random_moments(tmp_path):
    """Store and report of a resumed replay are those of one that nobody killed.

    The re-run is by another model of the same shapes, so that the sets differ and the counts say something.
    """
    torch.set_num_threads(1)
    tokenizer, other = make_tokenizer(), make_target()
    prompts = texts([3 + number % 20 for number in range(40)])
    made = CollectConfig(max_new_tokens=16, batch_size=4)
    source = collect(make_target(), tokenizer, prompts, made, tmp_path / "source", spec=SPEC)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    config = CollectConfig(mode="replay", batch_size=3)

    def work(path, *, resume):
        with open_engine(other, tokenizer, config, spec=SPEC) as engine:
            report = replay(engine, source, path, config, spec=SPEC, resume=resume, tokens_per_shard=60)
        reports = path.parent / "reports"
        reports.mkdir(exist_ok=True)
        (reports / f"{path.name}.json").write_text(json.dumps(report.to_dict()))

    stores = tmp_path / "stores"
    stores.mkdir()
    kill_until_same(work, stores, moments=20)
    reports = {file.stem: json.loads(file.read_text()) for file in (stores / "reports").iterdir()}
    assert len(reports) > 1
    assert set(map(json.dumps, reports.values())) == {json.dumps(reports["whole"])}
    # Both stores row by row, as nothing was counted on the way.
    apart = compare_stores(source.iter_sequences(), TraceStore(stores / "whole"), source.manifest.collection)
    assert apart.to_dict()["total"] == reports["whole"]["total"]
    assert reports["whole"]["total"]["tokens"] == source.num_tokens
    assert 0.05 < reports["whole"]["total"]["identical_share"] < 0.95
