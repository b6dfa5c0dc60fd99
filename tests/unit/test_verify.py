"""Tree verification: masks against per-path forwards, acceptance, compaction, refusals."""

import random

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from ecospec.decoding.capability import mask_plan, require_positions
from ecospec.decoding.expert_sets import sets_from_ids, sets_from_scores, unique_experts
from ecospec.decoding.oracle import true_experts
from ecospec.decoding.target import TargetModel
from ecospec.decoding.verify import accepted_path, tree_attention_mask
from ecospec.trace_collection.hooks import RoutingRecorder
from tests.decoding_fakes import VOCAB, WINDOW, random_tree, tiny_target
from tests.unit.test_tree import path_to


@pytest.fixture(scope="module")
def targets():
    return {family: TargetModel(tiny_target(family)) for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")}


def prompt_of(length, seed=0):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def tolerance(target):
    """DeepSeek-V3 routes in float32 whatever the dtype."""
    return 1e-5 if "Deepseek" in type(target.model).__name__ else 1e-10


def plain(model, ids):
    """Logits and experts of every token by a forward without cache or masks of ours."""
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        return logits, recorder.last_experts


def check_tree(target, session, prefix, tree):
    """Every node's logits and experts equal those of its path written out."""
    output = session.verify(tree)
    parents = tree.parents.tolist()
    for node in range(len(tree)):
        path = path_to(parents, node)[::-1]
        logits, experts = plain(target.model, torch.cat([prefix, tree.tokens[path]]))
        torch.testing.assert_close(output.logits[node], logits[-1], rtol=0, atol=tolerance(target))
        assert torch.equal(output.experts[node], experts[-1])
    return output


CONTEXTS = [*range(WINDOW - 12, WINDOW + 13), 4 * WINDOW]


@pytest.mark.parametrize(
    ("family", "context"),
    [("gpt_oss", context) for context in CONTEXTS]
    + [(f, c) for f in ("qwen3_moe", "deepseek_v3") for c in (1, 20)],
)
def test_tree_equals_per_path_forwards(targets, family, context):
    target = targets[family]
    prefix = prompt_of(context)
    with target.session() as session:
        session.extend(prefix)
        check_tree(target, session, prefix, random_tree(11, random.Random(context)))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_compaction_keeps_the_accepted_path(targets, family):
    """Several verified trees in a row, each keeping a random path: the cache must be that of the tokens kept."""
    target, rng = targets[family], random.Random(4)
    prefix = prompt_of(9)
    with target.session(aux_layers=(1, 0)) as session:
        session.extend(prefix)
        for _ in range(5):
            tree = random_tree(8, rng)
            output = check_tree(target, session, prefix, tree)
            path = path_to(tree.parents.tolist(), rng.randrange(8))[::-1]
            session.keep(path)
            prefix = torch.cat([prefix, tree.tokens[path]])
            assert session.length == len(prefix)
            with torch.no_grad():
                states = target.model(
                    input_ids=prefix[None], output_hidden_states=True, use_cache=False
                ).hidden_states
            aux = torch.cat([states[layer + 1][0, -len(path) :] for layer in (1, 0)], dim=-1)
            torch.testing.assert_close(output.aux[path], aux, rtol=0, atol=tolerance(target))
        output = session.extend(torch.tensor([3]))
        logits, experts = plain(target.model, torch.cat([prefix, torch.tensor([3])]))
        torch.testing.assert_close(output.logits[0], logits[-1], rtol=0, atol=tolerance(target))
        assert torch.equal(output.experts[0], experts[-1])


def test_oracle_sees_all_candidates_and_leaves_no_trace(targets):
    target, rng = targets["gpt_oss"], random.Random(2)
    prefix, tree = prompt_of(WINDOW), random_tree(11, rng)
    with target.session() as session:
        session.extend(prefix)
        experts = true_experts(session, tree)
        assert session.length == WINDOW
        output = check_tree(target, session, prefix, tree)
        assert torch.equal(experts, output.experts)


def test_full_mask_on_a_sliding_layer_would_be_wrong(targets):
    """The trap that the two masks avoid, so that the test above is known to be able to fail."""
    target, tree = targets["gpt_oss"], random_tree(11, random.Random(1))
    prefix = prompt_of(WINDOW + 4)
    outputs = []
    for masks in (
        target.plan.masks(tree, len(prefix), torch.float64),
        tree_attention_mask(tree, len(prefix), torch.float64),
    ):
        with target.session() as session:
            session.extend(prefix)
            outputs.append(session._forward(tree.tokens, len(prefix) + tree.depths, masks, logits_to_keep=0).logits)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_mask_by_hand():
    tree = random_tree(1, random.Random(0))
    assert tree_attention_mask(tree, 3, torch.float32).tolist() == [[[[0.0] * 4]]]
    low = torch.finfo(torch.float32).min
    assert tree_attention_mask(tree, 3, torch.float32, window=2).tolist() == [[[[low, low, 0.0, 0.0]]]]


def test_hooks_are_removed(targets):
    target = targets["qwen3_moe"]

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())

    before = hooks()
    with target.session(aux_layers=(0,)) as session:
        session.extend(prompt_of(3))
        assert hooks() > before
    assert hooks() == before


def test_accepted_path_stops_where_the_target_disagrees():
    parents = [-1, 0, 0, 1, 1, 3]
    tokens = [9, 4, 5, 6, 7, 8]
    assert accepted_path(tokens, parents, [4, 6, 0, 8, 0, 1]) == [0, 1, 3, 5]
    assert accepted_path(tokens, parents, [5, 6, 6, 8, 0, 1]) == [0, 2]
    assert accepted_path(tokens, parents, [6, 6, 6, 8, 0, 1]) == [0]
    # Two children with one token: the first counts.
    assert accepted_path([9, 4, 4], [-1, 0, 0], [4, 1, 1]) == [0, 1]


def test_expert_sets():
    scores = torch.tensor([[[0.1, 0.9, 0.5, 0.0]], [[3.0, 0.0, 2.0, 1.0]]])
    sets = sets_from_scores(scores, 2)
    assert sets.tolist() == [[[False, True, True, False]], [[True, False, True, False]]]
    ids = torch.tensor([[[1, 2]], [[0, 2]]])
    assert torch.equal(sets_from_ids(ids, 4), sets)
    assert unique_experts(ids, 4).tolist() == [3]


def test_linear_attention_is_refused():
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    with pytest.raises(ValueError, match="draft trees need attention over keys and values in every layer"):
        TargetModel(model)
    # Also when the config does not say so: by what the model does with tree and cache.
    model.config.layer_types = ["full_attention"] * 4
    with pytest.raises(
        ValueError, match="Qwen3NextForCausalLM cannot verify draft trees: draft trees need attention"
    ):
        TargetModel(model)


def test_training_mode_and_attention_kind_are_refused():
    model = tiny_target("qwen3_moe")
    with pytest.raises(ValueError, match=r"training mode; call model.eval\(\)"):
        TargetModel(model.train())
    model.eval().config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2 attention, which takes no tree masks"):
        TargetModel(model)


def test_uniform_sliding_window():
    """One mask for all layers where the model takes one: Qwen3-MoE with its window switched on."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        initializer_range=0.4, use_sliding_window=True, sliding_window=6,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).double().eval()
    model.set_experts_implementation("eager")
    target = TargetModel(model)
    assert target.plan.window == 6
    prefix = prompt_of(9)
    with target.session() as session:
        session.extend(prefix)
        check_tree(target, session, prefix, random_tree(9, random.Random(1)))


def test_positions_and_rotary_embeddings():
    model = tiny_target("qwen3_moe")
    require_positions(model, 200, 53, 3)
    with pytest.raises(ValueError, match=r"\+ tree depth \(3\) = 257 exceeds the target's 256 positions"):
        require_positions(model, 200, 54, 3)
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 100}
    require_positions(model, 50, 40, 3)
    require_positions(model, 120, 40, 3)
    with pytest.raises(ValueError, match="longrope rotary embedding changes past 100 positions"):
        require_positions(model, 90, 40, 3)
    model.config.rope_parameters = {"rope_type": "dynamic", "original_max_position_embeddings": 100}
    with pytest.raises(ValueError, match="dynamic rotary embedding changes past 100 positions"):
        require_positions(model, 120, 40, 3)
    model.config.rope_parameters = {"rope_type": "yarn", "original_max_position_embeddings": 100}
    require_positions(model, 120, 40, 3)


def test_aux_layers_out_of_range(targets):
    with pytest.raises(ValueError, match="aux layer 7 does not exist; the target has decoder layers 0 to 2"):
        targets["qwen3_moe"].session(aux_layers=(7,))


def test_mask_plan_of_mixed_layers(targets):
    plan = mask_plan(targets["gpt_oss"].model)
    assert set(plan.masks(random_tree(3, random.Random(0)), 5, torch.float64)) == {
        "full_attention",
        "sliding_attention",
    }
