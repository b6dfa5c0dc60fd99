"""Greedy losslessness on the demo checkpoints: 50 prompts x 64 tokens x every policy, in float64, no mismatch."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ecospec.decoding import POLICIES, DecodingLoop, LosslessCheck, TargetModel, make_policy
from ecospec.decoding.drafters import Eagle3Drafter
from ecospec.predictor import load_predictor, routing_spec_of
from ecospec.trace_collection.prompts import load_prompts

PROMPT_TOKENS, NEW_TOKENS = 48, 64
OPTIONS = {"evict": {"mean_curve": (1.0, 1.3, 1.5, 1.7)}}


@pytest.fixture(scope="module")
def parts(checkpoints: Path):
    """Target, drafter and predictor of the demo, all in float64."""
    for name in ("target", "drafter", "predictor"):
        if not (checkpoints / name / "model.safetensors").exists():
            pytest.skip(f"checkpoints/{name} is not there")
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target", dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # grouped_mm knows no float64
    target = TargetModel(model, routing_spec_of(checkpoints / "target"))
    drafter = Eagle3Drafter.from_pretrained(checkpoints / "drafter", model, dtype=torch.float64)
    embedding = model.get_input_embeddings()
    predictor = load_predictor(checkpoints / "predictor", target_embedding=embedding, dtype=torch.float64)
    return target, drafter, predictor


@pytest.fixture(scope="module")
def prompts(checkpoints: Path):
    """Windows from report documents, each starting in the middle of its text."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    windows = []
    for prompt in load_prompts("stdlib:report"):
        ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        middle = len(ids) // 2
        if len(ids) > middle + PROMPT_TOKENS:
            windows.append(torch.tensor(ids[middle : middle + PROMPT_TOKENS]))
    step = max(1, len(windows) // 50)
    return windows[::step][:50]


@pytest.mark.slow
def test_no_policy_changes_a_token(parts, prompts):
    target, drafter, predictor = parts
    assert len(prompts) == 50
    plain = DecodingLoop(target, None, None, make_policy("autoregressive"))
    loops = [
        DecodingLoop(target, drafter, predictor, make_policy(name, **OPTIONS.get(name, {})))
        for name in POLICIES
        if name != "autoregressive"
    ]
    check = LosslessCheck(target.model)
    for prompt in prompts:
        reference = plain.generate(prompt, NEW_TOKENS).tokens
        ids = prompt[None]
        generated = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        check.compare(prompt.tolist(), generated[0, len(prompt) :].tolist(), reference)
        for loop in loops:
            check.compare(prompt.tolist(), reference, loop.generate(prompt, NEW_TOKENS).tokens)
    runs = len(prompts) * len(POLICIES)
    assert check.summary() == {"runs": runs, "tokens": runs * NEW_TOKENS, "mismatches": 0, "ties": 0}
