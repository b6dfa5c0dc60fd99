"""Recorded trees: against forwards of every path written out, against the loop, and replayed offline."""

import random

import pytest
import torch

from ecospec.decoding import DecodingLoop, Greedy, RecordedTree, TargetModel, make_policy, record_text, record_tree
from ecospec.decoding.drafters import Eagle3Config, Eagle3Drafter, Eagle3Head
from ecospec.decoding.policies import SelectionContext
from ecospec.decoding.tree import ancestor_mask, chain, graft, select_nodes
from ecospec.decoding.verify import accepted_path
from ecospec.trace_collection.hooks import RoutingRecorder
from tests.decoding_fakes import VOCAB, WINDOW, ScriptedDrafter, random_tree, tiny_target

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
PROMPT, NEW_TOKENS = 9, 22  # the window of GPT-OSS lies inside


@pytest.fixture(scope="module")
def targets():
    return {family: TargetModel(tiny_target(family)) for family in FAMILIES}


def prompt_of(seed, length=PROMPT):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy_text(target, prompt, new_tokens=NEW_TOKENS):
    """Prompt and greedy continuation, from forwards of the whole text."""
    ids = prompt
    if new_tokens:
        for _ in range(new_tokens):
            logits = target.model(input_ids=ids[None], use_cache=False).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None]])
    return ids


def eagle_drafter(target, seed=1):
    """A random head in float64 that reads the target's states; it hits the target's tokens by chance only."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layers=(0, 1, 2),
    )
    head = Eagle3Head(config, target.model.get_input_embeddings()).double().eval()
    return Eagle3Drafter(head)


def paths(tree):
    """Node indices from the root to every node."""
    result = [[0]]
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        result.append([*result[parent], node])
    return result


def plain(model, ids):
    """Logits and experts of the last token, by a forward without cache or masks of ours."""
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        return logits, recorder.last_experts


def check_tree(target, text, recorded):
    """Every node against its path written out, and the accepted nodes against the greedy continuation."""
    tree = recorded.tree
    tolerance = 1e-5 if "Deepseek" in type(target.model).__name__ else 1e-6  # stored as float32
    for node, path in enumerate(paths(tree)):
        logits, experts = plain(target.model, torch.cat([text[: recorded.position], tree.tokens[path]]))
        assert torch.equal(recorded.experts[node].long(), experts[-1])
        assert recorded.emitted[node] == logits[-1].argmax()
        given = 0.0 if node == 0 else float(logits[-2].log_softmax(-1)[tree.tokens[node]])
        assert float(recorded.target_logprobs[node]) == pytest.approx(given, abs=tolerance, rel=1e-6)
    own = greedy_text(target, text[: recorded.position + 1], new_tokens=int(tree.depths.max()))
    for node, path in enumerate(paths(tree)):
        expected = own[recorded.position : recorded.position + len(path)]
        assert bool(recorded.accepted[node]) == torch.equal(tree.tokens[path], expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafts", ["scripted", "eagle"])
def test_every_node_equals_its_path_written_out(targets, family, drafts):
    target = targets[family]
    text = greedy_text(target, prompt_of(1))
    drafter = ScriptedDrafter(text.tolist(), (0, 1)) if drafts == "scripted" else eagle_drafter(target)
    recorded = record_text(target, drafter, text, range(PROMPT, len(text)), trees_per_forward=7)
    assert [tree.position for tree in recorded] == list(range(PROMPT, len(text)))
    assert all(tree.tree.tokens[0] == text[tree.position] and len(tree.tree) == 11 for tree in recorded)
    assert PROMPT < WINDOW < len(text)
    for tree in recorded[:: 4 if drafts == "scripted" else 9]:
        check_tree(target, text, tree)
    if drafts == "scripted":
        depths = [int(tree.tree.depths[tree.accepted].max()) for tree in recorded]
        assert {0, 1, 2} <= set(depths)  # else little was shown


def test_text_the_target_did_not_write(targets):
    """Off the target's path too: a random text, from its second token on."""
    target = targets["gpt_oss"]
    text = prompt_of(4, WINDOW + 6)
    recorded = record_text(target, eagle_drafter(target), text, range(1, len(text)), depth=2, top_k=3, beam=1)
    assert len(recorded) == len(text) - 1
    for tree in recorded[::4]:
        check_tree(target, text, tree)


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_trees_of_one_forward_do_not_see_each_other(targets, batch):
    target = targets["qwen3_moe"]
    text = greedy_text(target, prompt_of(2))
    whole = record_text(target, eagle_drafter(target), text, range(PROMPT, len(text)))
    other = record_text(target, eagle_drafter(target), text, range(PROMPT, len(text)), trees_per_forward=batch)
    for mine, yours in zip(whole, other, strict=True):
        assert_same(mine, yours)


def assert_same(mine, yours):
    assert mine.position == yours.position
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(mine.tree, name), getattr(yours.tree, name)), name
    torch.testing.assert_close(mine.tree.logprobs, yours.tree.logprobs, rtol=1e-6, atol=1e-7)
    for name in ("experts", "emitted", "accepted"):
        assert torch.equal(getattr(mine, name), getattr(yours, name)), name
    torch.testing.assert_close(mine.target_logprobs, yours.target_logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_a_run_are_the_trees_of_their_positions(targets, family):
    """A tree is a function of the prefix: whatever a policy verified before, and however the text was processed."""
    target, prompt = targets[family], prompt_of(3)
    text = greedy_text(target, prompt)
    scripted, eagle = ScriptedDrafter(text.tolist(), (0, 1)), eagle_drafter(target)
    for drafter, policy in ((scripted, "random"), (scripted, "ecospec_oracle"), (eagle, "probability")):
        steps: list[RecordedTree] = []
        loop = DecodingLoop(target, drafter, None, make_policy(policy), on_tree=steps.append)
        result = loop.generate(prompt, NEW_TOKENS)
        assert result.tokens == text[PROMPT:].tolist()
        assert len(steps) == len(result.steps)
        positions = [PROMPT]
        for step in result.steps:
            positions.append(positions[-1] + step.accepted + 1)
        assert [tree.position for tree in steps] == positions[:-1]
        everywhere = record_text(target, drafter, text, range(PROMPT, len(text)))
        for tree in steps:
            assert_same(tree, everywhere[tree.position - PROMPT])
        assert all(step.oracle > 0 for step in result.steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_offline_replay_reproduces_the_live_run(targets, family):
    """`probability` chosen on recorded trees accepts, and touches, at every step what the loop did."""
    target, prompt, policy = targets[family], prompt_of(6), make_policy("probability")
    text = greedy_text(target, prompt)
    drafter = ScriptedDrafter(text.tolist(), (0,))
    trees = {t.position: t for t in record_text(target, drafter, text, range(PROMPT, len(text)))}
    for budget in (2, 4, 11):
        live = DecodingLoop(target, drafter, None, policy, budget=budget).generate(prompt, NEW_TOKENS)
        position, emitted, experts = PROMPT, [], []
        while position < len(text) - 1:
            recorded = trees[position]
            kept = policy.select(recorded.tree, None, SelectionContext(budget, position))
            chosen = select_nodes(recorded.tree, kept)
            path = accepted_path(chosen.tokens.tolist(), chosen.parents.tolist(), recorded.emitted[kept].tolist())
            emitted.append(min(len(path), len(text) - 1 - position))  # the limit cuts the last step
            verified = recorded.experts[kept].transpose(0, 1).flatten(1).tolist()
            experts.append(tuple(len(set(layer)) for layer in verified))
            position += len(path)
        assert emitted == [step.emitted for step in live.steps]
        assert experts == [step.unique_experts for step in live.steps]
        assert max(emitted) > 1


def test_graft_keeps_every_path():
    """Against paths followed node by node, over trees of different sizes, the root alone among them."""
    rng = random.Random(0)
    trees = [random_tree(size, rng) for size in (5, 1, 8, 2)]
    joint = graft(trees)
    joint.validate()
    assert len(joint) == 4 + 4 + 0 + 7 + 1
    roots = [int(tree.tokens[0]) for tree in trees]
    expected = [roots[: row + 1] for row in range(4)]
    for row, tree in enumerate(trees):
        expected += [[*roots[:row], *tree.tokens[path].tolist()] for path in paths(tree)[1:]]
    assert [joint.tokens[path].tolist() for path in paths(joint)] == expected
    assert joint.depths.tolist() == [len(path) - 1 for path in expected]
    text = chain(torch.tensor([4, 5, 6]))
    text.validate()
    assert torch.equal(ancestor_mask(text.parents), torch.ones(3, 3, dtype=torch.bool).tril())
    assert torch.equal(graft([random_tree(1, rng) for _ in range(3)]).parents, text.parents)


def test_recording_one_tree_leaves_no_trace(targets):
    target, tree = targets["gpt_oss"], random_tree(9, random.Random(3))
    prefix = prompt_of(5, WINDOW)
    with target.session() as session:
        session.extend(prefix)
        first = record_tree(session, tree, Greedy())
        assert session.length == WINDOW
        assert_same(first, record_tree(session, tree, Greedy()))
    check_tree(target, torch.cat([prefix, tree.tokens[:1]]), first)


def test_wrong_positions_are_refused(targets):
    target = targets["qwen3_moe"]
    text = prompt_of(0, 12)
    drafter = ScriptedDrafter([])
    for positions in (range(12), range(3, 13), range(5, 5), range(1, 9, 2)):
        with pytest.raises(ValueError, match="positions must be consecutive, from 1 to at most 11"):
            record_text(target, drafter, text, positions)
    with pytest.raises(ValueError, match="trees_per_forward must be at least 1, got 0"):
        record_text(target, drafter, text, range(1, 9), trees_per_forward=0)
    long = prompt_of(0, 254)
    record_text(target, drafter, long[:253], range(250, 253), depth=3)
    with pytest.raises(ValueError, match=r"\+ tree depth \(3\) = 257 exceeds the target's 256 positions"):
        record_text(target, drafter, long, range(250, 254), depth=3)
