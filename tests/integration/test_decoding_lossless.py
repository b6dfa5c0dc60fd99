"""The decoding loop: in float64 every policy emits exactly what plain decoding and transformers' generate emit."""

import pytest
import torch

from ecospec.decoding import POLICIES, DecodingLoop, LosslessCheck, TargetModel, make_policy
from ecospec.decoding.drafters import Drafter
from tests.decoding_fakes import VOCAB, ScriptedDrafter, TablePredictor, tiny_target

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
OPTIONS = {"evict": {"mean_curve": (1.0, 1.1, 1.25, 1.35, 1.5, 1.6, 1.7, 1.8)}}
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def targets():
    return {family: TargetModel(tiny_target(family)) for family in FAMILIES}


def prompt_of(seed, length=7):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def loop_of(target, name, script, *, hit_rate=0.7, aux_layers=(0, 1), **options):
    drafter = ScriptedDrafter(script, aux_layers, hit_rate)
    predictor = TablePredictor(target.num_layers, target.num_experts, target.top_k)
    policy = make_policy(name, **OPTIONS.get(name, {}))
    return DecodingLoop(target, drafter, predictor, policy, **options), drafter, predictor


def plain(target, prompt, new_tokens=NEW_TOKENS, eos=()):
    return DecodingLoop(target, None, None, make_policy("autoregressive")).generate(prompt, new_tokens, eos)


def transformers_greedy(target, prompt, eos=None):
    """Greedy decoding by transformers, which without a mask takes prompt tokens equal to the pad id for padding."""
    ids = prompt[None]
    options = {"do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_emits_what_generate_emits(targets, family):
    target = targets[family]
    check = LosslessCheck(target.model)
    for seed in range(2):
        prompt = prompt_of(seed)
        generated = transformers_greedy(target, prompt)
        assert plain(target, prompt).tokens == generated
        for name in POLICIES:
            loop, _, _ = loop_of(target, name, [*prompt.tolist(), *generated])
            result = loop.generate(prompt, NEW_TOKENS)
            check.compare(prompt.tolist(), generated, result.tokens)
            assert sum(step.emitted for step in result.steps) == NEW_TOKENS - 1
            if name != "autoregressive":
                assert 1.2 < result.tokens_per_step < 4, name  # else the comparison would show little
    assert check.summary() == {
        "runs": 2 * len(POLICIES),
        "tokens": 2 * len(POLICIES) * NEW_TOKENS,
        "mismatches": 0,
        "ties": 0,
    }
    assert check.passed


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "autoregressive"])
def test_drafter_and_predictor_learn_exactly_what_the_target_processed(targets, name, monkeypatch):
    target, prompt = targets["qwen3_moe"], prompt_of(11)
    reference = plain(target, prompt)
    script = [*prompt.tolist(), *reference.tokens]
    loop, drafter, predictor = loop_of(target, name, script)
    snapshots = []
    monkeypatch.setattr(drafter, "reset", lambda: snapshots.append((drafter.processed, drafter.aux)))
    assert isinstance(drafter, Drafter)
    result = loop.generate(prompt, NEW_TOKENS)
    processed, aux = snapshots[-1]
    # The last step may have gone past the limit; up to it everything but the last emitted token was processed.
    assert processed[: len(script) - 1] == script[: len(processed)][: len(script) - 1]
    assert len(processed) >= len(script) - 1
    with torch.no_grad():
        states = target.model(torch.tensor([processed]), output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(torch.cat(aux), torch.cat([states[1][0], states[2][0]], dim=-1), rtol=0, atol=1e-10)
    if loop._parts.policy.needs_predictor:
        assert predictor.context == processed
        assert torch.cat(predictor.experts).shape == (len(processed), target.num_layers, target.top_k)
        assert predictor.closed
    assert result.tokens == reference.tokens


@pytest.mark.parametrize("name", ["probability", "ecospec", "evict", "autoregressive"])
def test_end_of_text_and_limit_cut_like_plain_decoding(targets, name):
    target, prompt = targets["qwen3_moe"], prompt_of(5)
    reference = plain(target, prompt).tokens
    script = [*prompt.tolist(), *reference]
    for limit in (1, 2, 5, 17):
        loop, _, _ = loop_of(target, name, script, hit_rate=1.0)
        result = loop.generate(prompt, limit)
        assert (result.tokens, result.finish_reason) == (reference[:limit], "length")
    for eos in dict.fromkeys(reference[:20]):
        loop, _, _ = loop_of(target, name, script, hit_rate=1.0)
        result = loop.generate(prompt, NEW_TOKENS, [eos, VOCAB + 1])
        assert result.tokens == reference[: reference.index(eos) + 1]
        assert result.finish_reason == "eos"
        assert plain(target, prompt, eos=[eos]).tokens == result.tokens
        assert transformers_greedy(target, prompt, eos) == result.tokens


def test_budgets_and_tree_shapes_do_not_change_the_output(targets):
    target, prompt = targets["gpt_oss"], prompt_of(3, length=12)
    reference = plain(target, prompt).tokens
    for budget, depth, top_k, beam in ((1, 3, 2, 2), (2, 1, 2, 1), (7, 4, 3, 2), (64, 3, 2, 2)):
        loop, _, _ = loop_of(
            target, "ecospec", [*prompt.tolist(), *reference], budget=budget, depth=depth, top_k=top_k, beam=beam
        )
        result = loop.generate(prompt, NEW_TOKENS)
        assert result.tokens == reference
        assert all(step.nodes <= budget for step in result.steps)
        if budget == 64:
            assert all(step.nodes == step.candidates + 1 == 11 for step in result.steps)


def test_step_records_say_what_happened(targets):
    target, prompt = targets["deepseek_v3"], prompt_of(1)
    reference = plain(target, prompt)
    assert len(reference.steps) == NEW_TOKENS - 1
    for step in reference.steps:
        assert (step.emitted, step.accepted, step.candidates, step.nodes) == (1, 0, 0, 1)
        assert step.unique_experts == (target.top_k,) * target.num_layers
        assert step.draft == step.predict == step.select == step.oracle == 0.0
        assert 0 < step.verify <= step.total
    loop, _, _ = loop_of(target, "ecospec", [*prompt.tolist(), *reference.tokens])
    for step in loop.generate(prompt, NEW_TOKENS).steps:
        assert 1 <= step.emitted <= step.accepted + 1 <= step.nodes == 4
        assert step.candidates == 10
        assert all(target.top_k <= count <= min(8, 4 * target.top_k) for count in step.unique_experts)
        parts = step.predict + step.draft + step.select + step.verify
        assert 0.9 * step.total < parts <= step.total
    loop, _, _ = loop_of(target, "ecospec_oracle", [*prompt.tolist(), *reference.tokens])
    steps = loop.generate(prompt, NEW_TOKENS).steps
    assert all(step.oracle > 0 for step in steps)
    assert all(step.predict + step.draft + step.select + step.verify <= step.total for step in steps)


def test_ecospec_touches_fewer_experts_than_probability_when_it_knows_them(targets):
    target = targets["qwen3_moe"]
    touched = dict.fromkeys(("probability", "ecospec_oracle"), 0.0)
    for seed in range(3):
        prompt = prompt_of(seed)
        script = [*prompt.tolist(), *plain(target, prompt).tokens]
        for name in touched:
            loop, _, _ = loop_of(target, name, script)
            touched[name] += loop.generate(prompt, NEW_TOKENS).mean_unique_experts
    assert touched["ecospec_oracle"] < touched["probability"]


def test_streaming_and_timing_switch(targets):
    target, prompt = targets["qwen3_moe"], prompt_of(2)
    reference = plain(target, prompt).tokens
    loop, _, _ = loop_of(target, "probability", [*prompt.tolist(), *reference], timing=False)
    pieces: list[list[int]] = []
    result = loop.generate(prompt[None], NEW_TOKENS, on_tokens=pieces.append)
    assert [token for piece in pieces for token in piece] == result.tokens == reference
    assert all(step.verify == 0.0 < step.total for step in result.steps)


def test_missing_and_foreign_parts_are_refused(targets):
    target = targets["qwen3_moe"]
    drafter, prompt = ScriptedDrafter([]), prompt_of(0)
    with pytest.raises(ValueError, match="policy probability needs a drafter"):
        DecodingLoop(target, None, None, make_policy("probability"))
    with pytest.raises(ValueError, match="policy ecospec needs a predictor"):
        DecodingLoop(target, drafter, None, make_policy("ecospec"))
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        DecodingLoop(target, drafter, None, make_policy("probability"), budget=0)
    with pytest.raises(ValueError, match="made for another target: num_layers is 5 there, 3 here"):
        DecodingLoop(target, drafter, TablePredictor(5, 8, 2), make_policy("ecospec"))
    loop = DecodingLoop(target, None, None, make_policy("autoregressive"))
    with pytest.raises(ValueError, match="decode one sequence at a time"):
        loop.generate(torch.zeros(2, 3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="at least one token"):
        loop.generate(torch.zeros(0, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        loop.generate(prompt, 0)
    for wrong, message in (
        (
            torch.tensor([3, -1]),
            f"token id -1, the target has ids 0 to {VOCAB - 1}; use the target's own tokenizer",
        ),
        (torch.tensor([3, VOCAB]), f"token id {VOCAB}, the target has ids 0 to {VOCAB - 1}"),
        (torch.tensor([3.0]), "token ids of an integer type .int64., got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.generate(wrong, 4)
    with pytest.raises(ValueError, match=r"max_new_tokens must be a whole number, got 2.5"):
        loop.generate(prompt, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"budget must be a whole number, got 4.0"):
        DecodingLoop(target, drafter, None, make_policy("probability"), budget=4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exceeds the target's 256 positions"):
        loop.generate(prompt, 250)


def test_sampling_seam_gets_absolute_positions(targets):
    """A chooser whose noise depends on the position alone: every policy still emits what plain decoding emits."""
    target, prompt = targets["qwen3_moe"], prompt_of(8)

    class Noisy:
        def choose(self, logits, positions):
            rows = [
                torch.rand(VOCAB, generator=torch.Generator().manual_seed(int(position)), dtype=torch.float64)
                for position in positions
            ]
            return (logits.log_softmax(-1) - torch.stack(rows).log().neg().log()).argmax(-1)

    loop = DecodingLoop(target, None, None, make_policy("autoregressive"), chooser=Noisy())
    reference = loop.generate(prompt, NEW_TOKENS).tokens
    assert reference != plain(target, prompt).tokens
    for name in ("probability", "ecospec", "evict", "random"):
        loop, _, _ = loop_of(target, name, [*prompt.tolist(), *reference], chooser=Noisy())
        assert loop.generate(prompt, NEW_TOKENS).tokens == reference


def test_runs_repeat_exactly(targets):
    target, prompt = targets["qwen3_moe"], prompt_of(9)
    script = [*prompt.tolist(), *plain(target, prompt).tokens]
    for name in ("random", "ecospec"):
        loop, _, _ = loop_of(target, name, script)
        first, second = (loop.generate(prompt, NEW_TOKENS) for _ in range(2))
        assert first.tokens == second.tokens
        shape = [(step.emitted, step.nodes, step.unique_experts) for step in first.steps]
        assert shape == [(step.emitted, step.nodes, step.unique_experts) for step in second.steps]
