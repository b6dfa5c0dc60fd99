"""The EAGLE-3 drafter: trees against brute force and against training, purity in the prefix, ties, cache growth."""

import itertools

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ecospec.decoding.drafters import Drafter, Eagle3Config, Eagle3Drafter, Eagle3Head
from ecospec.decoding.drafters.eagle3_drafter import first_top_k
from tests.unit.test_eagle3_head import CONFIG, make_head


def context(length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (length,), generator=generator)
    return ids, torch.randn(length, 48, generator=generator, dtype=torch.float64)


def prefilled(head, ids, aux, **options):
    drafter = Eagle3Drafter(head, **options)
    drafter.prefill(ids, aux)
    return drafter


def assert_same_tree(a, b):
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.parents, b.parents)
    assert torch.equal(a.depths, b.depths)
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=1e-6, atol=1e-7)


def paths(tree):
    """Tokens from below the root to every node."""
    result = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        result.append((*result[parent], token))
    return result


def unrolled_logprobs(head, ids, aux, drafted):
    """Log-probabilities of a drafted chain below the last token of `ids`, from the training-time unrolling."""
    full = torch.cat((ids, torch.tensor(drafted[:-1], dtype=torch.int64)))  # the last one is predicted, never read
    steps = len(drafted)
    unread = torch.zeros(
        len(full) - len(aux), aux.shape[1], dtype=aux.dtype
    )  # only bases up to the prefix have states
    logits = head.unroll(full[None], torch.cat((aux, unread))[None], steps=steps)
    base = len(ids) - 2  # the feature before the root
    rows = [step_logits[0, base].log_softmax(-1) for step_logits in logits]
    index = {int(token): i for i, token in enumerate(head.draft_vocabulary)}
    return [row[index[token]] for row, token in zip(rows, drafted, strict=True)]


def test_satisfies_the_protocol():
    drafter = Eagle3Drafter(make_head())
    assert isinstance(drafter, Drafter)
    assert drafter.required_aux_layers == (0, 1, 3)


def test_shape_of_the_default_tree():
    ids, aux = context(12)
    tree = prefilled(make_head(), ids[:-1], aux[:-1]).draft(ids[-1])
    tree.validate()
    assert len(tree) == 11
    assert tree.depths.tolist() == [0] + [1] * 2 + [2] * 4 + [3] * 4
    assert tree.parents[:3].tolist() == [-1, 0, 0]
    assert sorted(set(tree.parents[3:7].tolist())) == [1, 2]
    assert len(set(tree.parents[7:].tolist())) == 2
    assert tree.tokens[0] == ids[-1]
    assert len(set(paths(tree))) == 11
    assert set(tree.tokens[1:].tolist()) <= set(make_head().draft_vocabulary.tolist())


@pytest.mark.parametrize(("depth", "top_k", "beam"), [(1, 3, 1), (3, 1, 1), (3, 2, 2), (4, 3, 2), (2, 4, 7)])
def test_tree_equals_brute_force_over_the_training_time_unrolling(depth, top_k, beam):
    """Every node's log-probability is what training sees for that path; the beam keeps a level's best nodes."""
    head = make_head(seed=3)
    ids, aux = context(9)
    tree = prefilled(head, ids[:-1], aux[:-1]).draft(ids[-1], depth=depth, top_k=top_k, beam=beam)
    all_paths, logprobs = paths(tree), tree.logprobs.tolist()
    with torch.no_grad():
        for path, logprob in zip(all_paths[1:], logprobs[1:], strict=True):
            assert logprob == pytest.approx(float(sum(unrolled_logprobs(head, ids, aux[:-1], path))), abs=1e-5)
    levels = [[i for i, d in enumerate(tree.depths.tolist()) if d == level] for level in range(depth + 1)]
    for upper, lower in itertools.pairwise(levels):
        expanded = list(dict.fromkeys(tree.parents[lower].tolist()))
        assert expanded == sorted(upper, key=lambda i: (-logprobs[i], i))[:beam]
        assert len(lower) == top_k * len(expanded)
        for parent in expanded:  # the children are the top_k continuations
            children = [i for i in lower if tree.parents[i] == parent]
            assert [logprobs[i] for i in children] == sorted((logprobs[i] for i in children), reverse=True)


def test_children_are_the_best_continuations():
    head = make_head(seed=4)
    ids, aux = context(6)
    tree = prefilled(head, ids[:-1], aux[:-1]).draft(ids[-1], depth=1, top_k=10)
    assert sorted(tree.tokens[1:].tolist()) == head.draft_vocabulary.tolist()
    assert float(tree.logprobs[1:].exp().sum()) == pytest.approx(1.0, abs=1e-6)
    assert bool((tree.logprobs[1:].diff() <= 0).all())


@pytest.mark.parametrize("capacity", [1, 512])
def test_tree_is_a_function_of_the_prefix(capacity):
    """Extending by any stretches, with or without drafting in between, gives the tree of a fresh prefill."""
    head = make_head(seed=5)
    ids, aux = context(40)
    incremental = prefilled(head, ids[:7], aux[:7], capacity=capacity)
    done = 7
    for stretch, drafts in ((1, True), (3, True), (2, False), (1, False), (4, True), (5, True), (1, True)):
        incremental.extend(ids[done : done + stretch], aux[done : done + stretch])
        done += stretch
        if drafts:
            fresh = prefilled(head, ids[:done], aux[:done])
            other_root = (ids[done] + 1) % 40  # a root that is then not taken leaves no trace
            incremental.draft(other_root, depth=2, beam=3)
            assert_same_tree(incremental.draft(ids[done]), fresh.draft(ids[done]))
            assert_same_tree(incremental.draft(ids[done : done + 1]), fresh.draft(ids[done]))
    assert incremental.length == done
    chunked = prefilled(head, ids[:5], aux[:5])
    chunked.prefill(ids[5:6], aux[5:6])
    chunked.prefill(ids[6:done], aux[6:done])
    assert_same_tree(chunked.draft(ids[done]), incremental.draft(ids[done]))


def test_the_tree_depends_on_every_target_state():
    head = make_head(seed=5)
    ids, aux = context(10)
    tree = prefilled(head, ids[:-1], aux[:-1]).draft(ids[-1])
    for position in range(9):
        changed = aux[:-1].clone()
        changed[position] += 1.0
        assert not torch.equal(prefilled(head, ids[:-1], changed).draft(ids[-1]).logprobs, tree.logprobs)


def test_inference_mode_may_come_and_go():
    head = make_head(seed=6)
    ids, aux = context(12)
    drafter = Eagle3Drafter(head, capacity=1)
    with torch.inference_mode():
        drafter.prefill(ids[:6], aux[:6])
        drafter.draft(ids[6])
    drafter.extend(ids[6:8], aux[6:8])
    drafter.draft(ids[8])
    with torch.inference_mode():
        drafter.extend(ids[8:11], aux[8:11])
        assert_same_tree(drafter.draft(ids[11]), prefilled(head, ids[:11], aux[:11]).draft(ids[11]))


def test_reset_forgets():
    head = make_head(seed=6)
    ids, aux = context(20)
    drafter = prefilled(head, ids[:15], aux[:15])
    drafter.extend(ids[15:17], aux[15:17])
    drafter.reset()
    assert drafter.length == 0
    with pytest.raises(ValueError, match="call prefill first"):
        drafter.draft(ids[0])
    drafter.prefill(ids[:4], aux[:4])
    assert_same_tree(drafter.draft(ids[4]), prefilled(head, ids[:4], aux[:4]).draft(ids[4]))


def test_one_processed_token_is_enough():
    ids, aux = context(2)
    assert len(prefilled(make_head(), ids[:1], aux[:1]).draft(ids[1])) == 11


def test_nothing_to_append():
    ids, aux = context(5)
    drafter = prefilled(make_head(), ids[:0], aux[:0])
    assert drafter.length == 0
    drafter.extend(ids, aux)
    drafter.extend(ids[:0], aux[:0])
    assert drafter.length == 5


def test_ties_go_to_the_lower_draft_id():
    head = make_head()
    nn.init.zeros_(head.lm_head.weight)
    ids, aux = context(4)
    tree = prefilled(head, ids[:-1], aux[:-1]).draft(ids[-1])
    low, high = head.draft_vocabulary[:2].tolist()
    assert tree.tokens[1:].tolist() == [low, high] * 5
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_first_top_k_is_a_stable_sort():
    values = torch.randint(0, 4, (200, 9), generator=torch.Generator().manual_seed(0)).float()
    best, indices = first_top_k(values, 4)
    ordered = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best, ordered.values[:, :4])
    assert torch.equal(indices, ordered.indices[:, :4])


@pytest.mark.parametrize(
    "options", [{"depth": 0}, {"beam": 0}, {"top_k": 0}, {"top_k": 11}], ids=lambda o: next(iter(o))
)
def test_refused_arguments(options):
    ids, aux = context(3)
    with pytest.raises(ValueError, match="top_k from 1 to 10"):
        prefilled(make_head(), ids, aux).draft(ids[0], **options)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        Eagle3Drafter(make_head(), capacity=0)


def test_wrong_hidden_states():
    ids, aux = context(3)
    with pytest.raises(ValueError, match=r"aux_hidden \[T, 48\] \(outputs of layers \[0, 1, 3\]"):
        Eagle3Drafter(make_head()).prefill(ids, aux[:, :32])


def test_bfloat16_drafts_the_same_shape():
    ids, aux = context(8)
    tree = prefilled(make_head(dtype=torch.bfloat16), ids[:-1], aux[:-1]).draft(ids[-1])
    tree.validate()
    assert tree.logprobs.dtype == torch.float32


def test_reads_nothing_back_from_the_device():
    """On the meta device there is nothing to read: any synchronisation raises."""
    head = make_head(dtype=torch.float32).to("meta")
    head._shared = (head._shared[0].to("meta"),)
    drafter = Eagle3Drafter(head)
    drafter.prefill(torch.zeros(7, dtype=torch.int64, device="meta"), torch.zeros(7, 48, device="meta"))
    drafter.extend(torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, 48, device="meta"))
    assert len(drafter.draft(torch.zeros((), dtype=torch.int64, device="meta"))) == 11


def tiny_target(vocab=40):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=16,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3MoeForCausalLM(config).eval()


def test_from_pretrained_with_a_target(tmp_path):
    target = tiny_target()
    head = Eagle3Head(CONFIG, target.get_input_embeddings())
    head.set_draft_vocabulary(torch.arange(10) * 4)
    head.save_pretrained(tmp_path)
    drafter = Eagle3Drafter.from_pretrained(tmp_path, target, dtype=torch.float32)
    assert drafter.head._shared[0] is target.get_input_embeddings()
    ids = torch.randint(0, 40, (1, 9))
    states = target(ids, output_hidden_states=True).hidden_states
    aux = torch.cat([states[layer + 1] for layer in drafter.required_aux_layers], -1)[0]
    drafter.prefill(ids[0, :-1], aux[:-1])
    assert set(drafter.draft(ids[0, -1]).tokens[1:].tolist()) <= set(range(0, 40, 4))
    with pytest.raises(ValueError, match=r"vocabulary 40, this target has 48; use the drafter that belongs"):
        Eagle3Drafter.from_pretrained(tmp_path, tiny_target(48))


def test_config_is_exported():
    assert Eagle3Config is type(CONFIG)
