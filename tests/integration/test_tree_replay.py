"""Replayed selection against the decoding loop itself, over files that the commands recorded; refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ecospec.cli.main import run_verb
from ecospec.decoding import TargetModel
from ecospec.decoding.drafters import Eagle3Drafter
from ecospec.decoding.loop import DecodingLoop
from ecospec.decoding.policies import make_policy
from ecospec.eval.tree_replay import replay_text, replay_texts
from ecospec.predictor import DrafterAttachedPredictor, load_predictor
from ecospec.predictor.attached import AttachedHeads
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStore
from tests.tiny_files import HIDDEN, save_head, save_predictor, save_prompts, save_tables, save_target

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    target = save_target(root / "target")
    save_head(root / "drafter", target)
    save_predictor(root / "neural", target)
    save_tables(root / "tables", target)
    save_prompts(root / "prompts.jsonl", 3, seed=1)
    common = ["--target", str(target), "--dtype", "float64", "--experts-implementation", "eager", "--out"]
    run_verb("collect-traces", [*common, str(root / "traces"), "--prompts", str(root / "prompts.jsonl"),
                                "--max-new-tokens", str(NEW_TOKENS)])  # fmt: skip
    run_verb("collect-trees", [*common, str(root / "trees"), "--traces", str(root / "traces"),
                               "--drafter", str(root / "drafter")])  # fmt: skip
    return root


@pytest.fixture(scope="module")
def recorded(place):
    """Texts, and their trees by sequence and position."""
    trees: dict[str, dict[int, TreeTrace]] = {}
    for tree in TreeStore(place / "trees").iter_trees():
        trees.setdefault(tree.sequence_id, {})[tree.position] = tree
    return list(TraceStore(place / "traces").iter_sequences(["experts"])), trees


@pytest.mark.parametrize("budget", [2, 4, 11])
def test_replay_takes_the_steps_of_the_loop(place, recorded, budget):
    texts, trees = recorded
    spec = routing_spec_of(place / "target")
    model = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    target, drafter = TargetModel(model, spec), Eagle3Drafter.from_pretrained(place / "drafter", model)
    load = {"target_embedding": model.get_input_embeddings(), "require_spec": spec, "dtype": torch.float64}
    bundles = {"neural": place / "neural", "bigram": place / "tables" / "bigram_table"}
    bundles["last"] = place / "tables" / "last_token"  # learns from what `commit` tells it
    predictors = {name: load_predictor(path, **load).eval() for name, path in bundles.items()}
    cases = [("probability", None), ("ecospec_oracle", None), *(("ecospec", name) for name in predictors)]
    found = {}
    for policy_name, name in cases:
        policy, predictor = make_policy(policy_name), None if name is None else predictors[name]
        loop = DecodingLoop(target, drafter, predictor, policy, budget=budget)
        by_group: dict[str, list[Any]] = {}
        for text in texts:
            prompt = torch.tensor(text.token_ids[: text.prompt_length], dtype=torch.int64)
            live = loop.generate(prompt, NEW_TOKENS)
            assert live.tokens == text.token_ids[text.prompt_length :].tolist()
            steps = [(step.emitted, step.nodes, step.unique_experts) for step in live.steps]
            by_group.setdefault(text.group_id, []).extend(steps)
        replayed = replay_texts(texts, trees, policy, predictor, spec, budget=budget)
        assert {
            group: [(step.emitted, step.nodes, step.unique_experts) for step in steps]
            for group, steps in replayed.items()
        } == by_group
        found[policy_name, name] = by_group
    assert budget == 11 or len({str(steps) for steps in found.values()}) > 2, "policies choose differently"


def test_refusals(place, recorded):
    texts, trees = recorded
    text, spec = texts[0], routing_spec_of(place / "target")
    own = trees[text.sequence_id]

    def replay(text=text, trees=own, policy="probability", predictor=None, spec=spec):
        return replay_text(text, trees, make_policy(policy), predictor, spec, budget=4)

    with pytest.raises(ValueError, match="cannot be replayed: it needs text that the target wrote and a tree at"):
        replay(text=dataclasses.replace(text, origin="teacher_forced", token_ids=text.token_ids[:-1]))
    with pytest.raises(ValueError, match="has no tree at position"):
        replay(trees={min(own): own[min(own)]})
    with pytest.raises(ValueError, match="policy ecospec needs a predictor; give one or use probability"):
        replay(policy="ecospec")
    attached = DrafterAttachedPredictor.from_heads(AttachedHeads(spec, 2 * HIDDEN, rank=4), "0" * 64)
    with pytest.raises(ValueError, match="a predictor that reads a drafter's hidden states cannot be replayed"):
        replay(policy="ecospec", predictor=attached)
    other = dataclasses.replace(spec, target_fingerprint="1" * 64)
    with pytest.raises(ValueError, match="target_fingerprint"):
        replay(policy="ecospec", predictor=load_predictor(place / "tables" / "bigram_table"), spec=other)


def test_replay_ends_where_the_trees_leave_the_text(place, recorded):
    texts, trees = recorded
    text, spec = texts[0], routing_spec_of(place / "target")
    whole = replay_text(text, trees[text.sequence_id], make_policy("probability"), None, spec, budget=4)
    assert sum(step.emitted for step in whole) == NEW_TOKENS - 1
    ids = text.token_ids.copy()
    place_of_change = text.prompt_length + 1 + sum(step.emitted for step in whole[:2])
    ids[place_of_change] = (ids[place_of_change] + 1) % spec.vocab_size
    other = dataclasses.replace(text, token_ids=ids)
    steps = replay_text(other, trees[text.sequence_id], make_policy("probability"), None, spec, budget=4)
    assert steps == whole[:2]
