"""A collection with a real model, killed at random moments; `test_store_robustness` kills writers alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.collect import collect
from ecospec.trace_collection.plan import CollectConfig
from tests.collect_targets import VOCAB, make_target, make_tokenizer, texts
from tests.killing import kill_until_same

SPEC = RoutingSpec(2, (0, 1), 8, 2, VOCAB, "0" * 64, "tiny", "1" * 64)


@pytest.mark.slow
def test_collection_killed_at_50_random_moments(tmp_path):
    torch.set_num_threads(1)
    model, tokenizer = make_target(), make_tokenizer()
    prompts = texts([3 + number % 20 for number in range(40)])
    prompts.append(dataclasses.replace(prompts[0], text="w1 " * 200, group_id="too long"))  # listed as skipped
    config = CollectConfig(max_new_tokens=16, batch_size=4, temperature=1.0)

    def work(path, *, resume):
        collect(model, tokenizer, prompts, config, path, spec=SPEC, resume=resume, tokens_per_shard=60)

    kill_until_same(work, tmp_path, moments=50)
