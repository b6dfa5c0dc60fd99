"""A tiny run of the recipe's head stage, its data, and the acceptance replay against the decoding loop."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoints.recipe import head as stage
from checkpoints.recipe.head_acceptance import Acceptance, measure_acceptance, opening_prompts, replay
from checkpoints.recipe.head_data import (
    DataConfig,
    build_cache,
    continue_prompts,
    continued_prompts,
    draft_vocabulary,
    random_windows,
)
from checkpoints.recipe.head_training import HeadTraining, train_head
from checkpoints.recipe.settings import Settings
from checkpoints.recipe.stages import STAGES
from ecospec.decoding.drafters import Eagle3Config, Eagle3Drafter, Eagle3Head
from ecospec.decoding.loop import DecodingLoop
from ecospec.decoding.policies import Probability
from ecospec.decoding.target import TargetModel
from ecospec.trace_collection.groups_manifest import SPLITS, Group, GroupsManifest
from ecospec.trace_collection.stdlib_corpus import Document


def tiny_target(vocab_size=2048, dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    model = Qwen3MoeForCausalLM(config).to(dtype).eval().requires_grad_(requires_grad=False)
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def no_progress(what, done, total):
    assert 0 < done <= total, what


@pytest.fixture
def settings(tmp_path, checkpoints, monkeypatch):
    """An output folder with the demo tokenizer, a random target, and two documents per split."""
    settings = Settings(tmp_path / "out", tmp_path / "work", threads=1, seed=0)
    settings.target.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoints / "target" / name, settings.target / name)
    tiny_target().save_pretrained(settings.target)
    ids = {split: [f"{number:015x}{copy}" for copy in range(2)] for number, split in enumerate(SPLITS)}
    groups = [Group(i, "file", f"{i}.py", split, 9) for split in SPLITS for i in ids[split]]
    GroupsManifest("3.11.7", 0, tuple(groups)).save(settings.manifest)

    def documents_of(manifest, split, datasets=None):
        return [Document("stdlib_code", i, f"{i}.py", f"import {split}\nx = {i!r} + y\n" * 8) for i in ids[split]]

    monkeypatch.setattr(stage, "documents_of", documents_of)
    return settings


PLAN = stage.HeadPlan(
    data=DataConfig(length=24, text_windows=8, continued=8, prompt_lengths=(10, 16), batch=3),
    held_out=DataConfig(length=24, text_windows=2, continued=2, prompt_lengths=(10,)),
    training=HeadTraining(
        epochs=3, batch=4, warmup_steps=2, validate_every=6, checkpoint_every=2, learning_rate=1e-2
    ),
    draft_vocab_size=64,
    intermediate_size=16,
    aux_layers=(0, 1, 2),
    acceptance_files=2,
    acceptance_prompt=12,
    acceptance_tokens=9,
)


def test_the_stage_runs_and_is_then_complete(settings, capsys):
    assert not STAGES["head"].complete(settings)
    stage.make_head(settings, PLAN)
    assert STAGES["head"].complete(settings)
    assert "tokens per step on the report split" in capsys.readouterr().out
    raw = json.loads((settings.drafter / "config.json").read_text())
    assert raw["draft_vocab_size"] == 64
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert set(raw["ecospec"]) == {"tokenizer_fingerprint", "target_fingerprint"}
    target = stage.load_target(settings.target)
    drafter = Eagle3Drafter.from_pretrained(settings.drafter, target)
    assert drafter.head.dtype == torch.bfloat16
    assert drafter.head.shares_embedding
    card = (settings.drafter / "README.md").read_text()
    for words in ("tokens per step** (bonus token included", "Held-out loss", "12 steps of 4 sequences", "covers"):
        assert words in card
    assert "{" not in card.replace("{parameters", "")


def test_a_killed_run_continues_to_the_same_head(settings, monkeypatch):
    stage.make_head(settings, PLAN)
    whole = (settings.drafter / "model.safetensors").read_bytes()
    shutil.rmtree(settings.drafter)
    shutil.rmtree(settings.work)

    def killed(*args):
        train_head(*args, stop_after=5)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "train_head", killed)
    with pytest.raises(KeyboardInterrupt):
        stage.make_head(settings, PLAN)
    assert not (settings.drafter / "model.safetensors").exists()
    monkeypatch.setattr(stage, "train_head", train_head)
    stage.make_head(settings, PLAN)
    assert (settings.drafter / "model.safetensors").read_bytes() == whole


def test_training_lowers_the_loss(settings):
    plan = dataclasses.replace(PLAN, training=dataclasses.replace(PLAN.training, epochs=12))
    stage.make_head(settings, plan)
    source = stage.load_source(settings)
    target = source.model
    folder = next((settings.work / "head").glob("target_train-*"))
    cache = build_cache(target, np.zeros((0, 0), np.int32), plan.aux_layers, folder, no_progress)
    trained = Eagle3Drafter.from_pretrained(settings.drafter, target, dtype=torch.float32).head
    untrained = stage.new_head(source, plan, cache.tokens)
    after, _ = stage.held_out_losses(trained, cache, target, 3)
    before, _ = stage.held_out_losses(untrained, cache, target, 3)
    assert all(a < 0.8 * b for a, b in zip(after, before, strict=True))


def test_stages_before_are_needed(tmp_path):
    settings = Settings(tmp_path, tmp_path / "work", threads=1, seed=0)
    with pytest.raises(ValueError, match="run stage `manifest` first"):
        stage.make_head(settings)
    with pytest.raises(ValueError, match="run stage `target` first"):
        stage.load_target(settings.target)


def test_greedy_continuation_equals_generate():
    model = tiny_target(64, torch.float64)
    prompts = torch.randint(0, 64, (3, 5))
    expected = model.generate(prompts, do_sample=False, max_new_tokens=7, min_new_tokens=7, pad_token_id=0)
    assert torch.equal(continue_prompts(model, prompts, 7), expected)
    mixed = continue_prompts(model, prompts, 7, temperature=torch.tensor([0.0, 5.0, 0.0]), seed=3)
    assert torch.equal(mixed[::2], expected[::2])
    assert not torch.equal(mixed[1], expected[1])
    assert torch.equal(
        mixed, continue_prompts(model, prompts, 7, temperature=torch.tensor([0.0, 5.0, 0.0]), seed=3)
    )


def test_sampling_follows_the_target_s_distribution():
    model = tiny_target(64, torch.float64)
    prompts = torch.randint(0, 64, (1, 4)).expand(4000, 4)
    drawn = continue_prompts(model, prompts, 1, temperature=torch.full((4000,), 2.0), seed=0)[:, -1]
    expected = (model(prompts[:1]).logits[0, -1] / 2).softmax(-1)
    assert float((drawn.bincount(minlength=64) / 4000 - expected).abs().sum()) < 0.12


def test_training_data_is_fixed_and_keeps_its_prompts():
    model = tiny_target(64)
    texts = [np.arange(size, dtype=np.int32) % 64 for size in (5, 30, 40)]
    config = DataConfig(length=20, continued=7, prompt_lengths=(6, 12), batch=2)
    rows = continued_prompts(model, texts, config, 1, no_progress)
    assert rows.shape == (7, 20)
    assert np.array_equal(rows, continued_prompts(model, texts, config, 1, no_progress))
    assert np.array_equal(rows[0, :6], np.arange(6))  # the beginning of a document
    windows = random_windows(texts, 8, 50, 0)
    stream = np.concatenate(texts)
    assert all(any(np.array_equal(w, stream[i : i + 8]) for i in range(len(stream))) for w in windows)


def test_draft_vocabulary_is_the_most_frequent():
    tokens = np.array([[5, 5, 2], [9, 2, 5], [1, 1, 9]])
    assert draft_vocabulary(tokens, 12, 3).tolist() == [1, 2, 5]
    assert draft_vocabulary(tokens, 12, 6).tolist() == [0, 1, 2, 3, 5, 9]


def test_cache_holds_layer_outputs_and_resumes(tmp_path):
    model = tiny_target(64)
    tokens = np.random.default_rng(0).integers(0, 64, (50, 6)).astype(np.int32)
    cache = build_cache(model, tokens, (0, 2), tmp_path, no_progress, batch=1)
    states = []
    handle = model.model.layers[2].register_forward_hook(lambda _m, _i, out: states.append(out))
    output = model.model(torch.from_numpy(tokens.astype(np.int64)), output_hidden_states=True)
    handle.remove()
    rows = cache.rows(np.arange(50))
    torch.testing.assert_close(rows["aux"][..., :16], output.hidden_states[1], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(rows["aux"][..., 16:], states[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(rows["final"], output.last_hidden_state, rtol=2e-3, atol=2e-3)
    assert torch.equal(rows["greedy"], model.lm_head(output.last_hidden_state).argmax(-1))
    (tmp_path / "progress.json").write_text('{"done": 40}')
    aux = np.lib.format.open_memmap(tmp_path / "aux.npy", mode="r+")
    aux[30], aux[45] = 7.0, 7.0
    aux.flush()
    again = build_cache(model, tokens[:0], (0, 2), tmp_path, no_progress, batch=1)
    assert np.all(again.aux[30] == 7.0)  # done before, so left alone
    assert np.allclose(again.aux[45], rows["aux"][45], atol=2e-3)


def trained_enough(model, own_drafts):
    """A head whose output layer favours the tokens the target emits, so that some drafts are accepted."""
    config = Eagle3Config(16, 16, 16, 2, 1, 8, 64, 24, (0, 1, 2))
    torch.manual_seed(1)
    head = Eagle3Head(config, model.get_input_embeddings()).double()
    head.set_draft_vocabulary(torch.from_numpy(draft_vocabulary(own_drafts, 64, 24)))
    return Eagle3Drafter(head)


@pytest.mark.parametrize("new_tokens", [13, 24])
def test_replay_counts_what_the_decoding_loop_does(new_tokens):
    """Same steps, same emitted tokens, with and without end-of-text, in float64."""
    model = tiny_target(64, torch.float64)
    prompts = np.random.default_rng(2).integers(0, 64, (6, 5)).astype(np.int32)
    continuations = continue_prompts(model, torch.from_numpy(prompts.astype(np.int64)), new_tokens)
    drafter = trained_enough(model, continuations[:, 5:].numpy())
    loop = DecodingLoop(TargetModel(model), drafter, None, Probability(), budget=4)
    for eos in (None, int(continuations[0, 12])):
        steps, emitted, accepted = 0, 0, [0] * 4
        for prompt in prompts:
            stop = () if eos is None else (eos,)
            result = loop.generate(torch.from_numpy(prompt.astype(np.int64)), new_tokens, stop)
            steps += len(result.steps)
            emitted += sum(step.emitted for step in result.steps)
            for step in result.steps:
                accepted[min(step.accepted, 3)] += 1
        found = measure_acceptance(model, drafter, prompts, new_tokens=new_tokens, eos=eos)
        assert (found.steps, found.emitted) == (steps, emitted)
        assert found.at_least(1) > 0, "nothing accepted: the comparison would say little"
        assert abs(sum(found.accepted[1:]) - sum(accepted[1:])) <= len(prompts)  # the last step may go past the end


def test_acceptance_by_hand():
    """Accept 3 of 3, then cut at the end."""

    class Oracle:
        required_aux_layers = ()

        def reset(self):
            self.at = 0

        def prefill(self, ids, aux):
            self.at += len(ids)

        extend = prefill

        def draft(self, root_token, *, depth=3, top_k=2, beam=2):
            from ecospec.decoding.tree import DraftTree

            tokens = torch.tensor([int(root_token), *range(self.at + 1, self.at + 6)])
            order = torch.arange(6)
            return DraftTree(tokens, order - 1, -order.float(), order)

    ids = torch.arange(12)
    found = replay(Oracle(), ids, torch.zeros(12, 0), 3)
    assert found == Acceptance(steps=2, emitted=8, accepted=(0, 0, 0, 2), in_tree=(2, 2, 2, 2, 1))
    assert found.mean == 4.0
    assert found.at_least(3) == 1.0
    total = found.plus(Acceptance(1, 1, (1,), ()))
    assert total == Acceptance(3, 9, (1, 0, 0, 2), (2, 2, 2, 2, 1))


def test_opening_prompts_are_spread():
    texts = [np.full(size, size, dtype=np.int32) for size in (3, 9, 4, 9, 8, 7)]
    assert opening_prompts(texts, 7, 2).tolist() == [[9] * 7, [7] * 7]
    assert len(opening_prompts(texts, 7, 64)) == 4


def test_the_tokenizer_has_the_end_of_text_that_prompts_begin_with(checkpoints):
    assert AutoTokenizer.from_pretrained(checkpoints / "target").eos_token_id is not None
