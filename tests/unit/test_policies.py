"""Selection policies against literal re-implementations, the prefix-closure lemma, the registry."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec.decoding.policies import POLICIES, SelectionContext, make_policy
from ecospec.decoding.policies.base import path_probabilities, probability_order
from ecospec.decoding.tree import DraftTree, is_prefix_closed
from tests.decoding_fakes import random_tree

LAYERS, EXPERTS, TOP_K = 3, 8, 2
CONTEXT = SelectionContext(budget=4, position=17)
CURVE = (1.0, 1.25, 1.6, 1.8, 2.4, 2.5, 2.6, 2.7)
OPTIONS = {"evict": {"mean_curve": CURVE}}


def random_sets(size, rng):
    sets = torch.zeros(size, LAYERS, EXPERTS, dtype=torch.bool)
    for node in range(size):
        for layer in range(LAYERS):
            sets[node, layer, rng.sample(range(EXPERTS), TOP_K)] = True
    return sets


def literal_paths(tree, sets):
    """E_traj of every node as a Python set of (layer, expert)."""
    pairs = [{(layer, expert) for layer, expert in node.nonzero().tolist()} for node in sets]
    paths: list[set[tuple[int, int]]] = []
    for node, parent in enumerate(tree.parents.tolist()):
        paths.append(pairs[node] | (paths[parent] if parent >= 0 else set()))
    return paths


def literal_ecospec(tree, sets, budget, epsilon, buffer_init):
    """The rule as it is written in the paper, node by node, without a word about prefix closure."""
    paths, depths = literal_paths(tree, sets), tree.depths.tolist()
    probability = path_probabilities(tree).tolist()
    constant = epsilon * LAYERS * TOP_K
    buffer = set(paths[0]) if buffer_init == "root" else set()
    selected = [0]
    while len(selected) < min(budget, len(tree)):
        best: tuple[tuple[float, ...], int] = ((-1.0,), 0)
        for node in range(1, len(tree)):
            if node in selected:
                continue
            score = probability[node] / (len(paths[node] - buffer) + constant)
            key = (score, -depths[node], probability[node], -node)
            if key > best[0]:
                best = (key, node)
        selected.append(best[1])
        buffer |= paths[best[1]]
    return sorted(selected)


def literal_static(tree, sets, budget, epsilon):
    paths, depths = literal_paths(tree, sets), tree.depths.tolist()
    probability = path_probabilities(tree).tolist()
    constant = epsilon * LAYERS * TOP_K

    def key(node):
        return (-probability[node] / (len(paths[node]) + constant), depths[node], -probability[node], node)

    return sorted([0, *sorted(range(1, len(tree)), key=key)[: budget - 1]])


def literal_probability(tree, budget):
    logprobs, depths = tree.logprobs.tolist(), tree.depths.tolist()
    order = sorted(range(len(tree)), key=lambda node: (-logprobs[node], depths[node], node))
    return sorted(order[:budget])


def literal_evict(tree, budget, curve):
    logprobs, depths = tree.logprobs.tolist(), tree.depths.tolist()
    order = sorted(range(len(tree)), key=lambda node: (-logprobs[node], depths[node], node))[:budget]
    value = [
        sum(math.exp(logprobs[node]) for node in order[: count + 1]) / curve[count] for count in range(len(order))
    ]
    return sorted(order[: value.index(max(value)) + 1])


@pytest.mark.parametrize("buffer_init", ["root", "empty"])
def test_ecospec_equals_the_literal_rule_on_1000_trees(buffer_init):
    rng = random.Random(1)
    differs_from_probability = 0
    for case in range(1000):
        tree = random_tree(rng.randint(1, 15), rng, ties=case % 3 == 0)
        sets = random_sets(len(tree), rng)
        budget, epsilon = rng.randint(1, 8), rng.choice([0.03, 0.25, 1.0])
        context = SelectionContext(budget, case)
        wanted = literal_ecospec(tree, sets, budget, epsilon, buffer_init)
        for name in ("ecospec", "ecospec_oracle"):
            policy = make_policy(name, epsilon=epsilon, buffer_init=buffer_init)
            assert policy.select(tree, sets, context).tolist() == wanted
        differs_from_probability += wanted != literal_probability(tree, budget)
    assert differs_from_probability > 100  # else the test would show nothing


def test_other_policies_equal_their_literal_rules_on_1000_trees():
    rng = random.Random(2)
    for case in range(1000):
        tree = random_tree(rng.randint(1, 15), rng, ties=case % 3 == 0)
        sets = random_sets(len(tree), rng)
        budget, epsilon = rng.randint(1, 8), rng.choice([0.03, 0.25, 1.0])
        context = SelectionContext(budget, case)
        static = make_policy("ecospec_static", epsilon=epsilon).select(tree, sets, context)
        assert static.tolist() == literal_static(tree, sets, budget, epsilon)
        probability = make_policy("probability").select(tree, None, context)
        assert probability.tolist() == literal_probability(tree, budget)
        evict = make_policy("evict", mean_curve=CURVE).select(tree, None, context)
        assert evict.tolist() == literal_evict(tree, budget, CURVE)
        assert make_policy("autoregressive").select(tree, None, context).tolist() == [0]


@st.composite
def trees_with_sets(draw):
    size = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    # Few distinct steps, zero among them: equal probabilities of parent and child are the hard case.
    steps = [draw(st.sampled_from([0.0, 1e-7, 0.1, 0.7, 5.0, 60.0])) for _ in range(size)]
    logprobs, depths = [0.0], [0]
    for node in range(1, size):
        logprobs.append(logprobs[parents[node]] - steps[node])
        depths.append(depths[parents[node]] + 1)
    tree = DraftTree(
        torch.arange(size), torch.tensor(parents), torch.tensor(logprobs, dtype=torch.float32), torch.tensor(depths)
    )
    return tree, random_sets(size, random.Random(draw(st.integers(0, 2**16))))


@settings(max_examples=150, deadline=None)
@given(case=trees_with_sets(), budget=st.integers(1, 8), epsilon=st.floats(1e-3, 10))
def test_every_policy_is_prefix_closed_and_within_budget(case, budget, epsilon):
    """The lemma: P falls and E_traj grows along a path, so no rule for closure is needed."""
    tree, sets = case
    for name in POLICIES:
        options = dict(OPTIONS.get(name, {})) | ({"epsilon": epsilon} if "ecospec" in name else {})
        kept = make_policy(name, **options).select(tree, sets, SelectionContext(budget, 5))
        assert kept.dtype == torch.int64
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert is_prefix_closed(tree, kept)
        assert len(kept) <= budget
        if name not in ("evict", "autoregressive"):
            assert len(kept) == min(budget, len(tree))


def test_scores_prefer_the_candidate_that_shares_experts():
    # Nodes 1 and 2 hang on the root; 1 is likelier, 2 touches what the root touches.
    tree = DraftTree(
        torch.tensor([1, 2, 3]),
        torch.tensor([-1, 0, 0]),
        torch.tensor([0.5, 0.3, 0.25]).log(),
        torch.tensor([0, 1, 1]),
    )
    tree = DraftTree(tree.tokens, tree.parents, tree.logprobs - tree.logprobs[0], tree.depths)
    sets = torch.zeros(3, 1, 8, dtype=torch.bool)
    sets[0, 0, :2] = sets[2, 0, :2] = sets[1, 0, 4:6] = True
    context = SelectionContext(2, 0)
    assert make_policy("probability").select(tree, None, context).tolist() == [0, 1]
    assert make_policy("ecospec").select(tree, sets, context).tolist() == [0, 2]
    # A large ε makes cost irrelevant.
    assert make_policy("ecospec", epsilon=1e6).select(tree, sets, context).tolist() == [0, 1]


def test_root_stays_first_in_probability_order_when_a_child_is_certain():
    tree = DraftTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]), torch.zeros(3), torch.tensor([0, 1, 2]))
    assert probability_order(tree).tolist() == [0, 1, 2]


def test_random_depends_on_seed_and_position_only():
    tree = random_tree(11, random.Random(0))
    policy = make_policy("random", seed=3)
    first = [policy.select(tree, None, SelectionContext(4, position)).tolist() for position in range(40)]
    again = [make_policy("random", seed=3).select(tree, None, SelectionContext(4, p)).tolist() for p in range(40)]
    assert first == again
    assert len({tuple(kept) for kept in first}) > 5
    other = [make_policy("random", seed=4).select(tree, None, SelectionContext(4, p)).tolist() for p in range(40)]
    assert first != other


def test_evict_verifies_less_where_tokens_are_dear():
    tree = random_tree(11, random.Random(0))
    cheap = make_policy("evict", mean_curve=(1.0,) * 8).select(tree, None, SelectionContext(8, 0))
    dear = make_policy("evict", mean_curve=tuple(3.0**n for n in range(8))).select(
        tree, None, SelectionContext(8, 0)
    )
    assert len(cheap) == 8
    assert dear.tolist() == [0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ecospeck", {}, "unknown policy 'ecospeck'; did you mean 'ecospec'"),
        ("zzz", {}, "allowed: autoregressive, probability"),
        ("probability", {"epsilon": 1.0}, "policy 'probability' has no option 'epsilon'; allowed: none"),
        ("evict", {}, "policy 'evict' needs the option 'mean_curve'"),
        ("evict", {"mean_curve": ()}, "evict: mean_curve must list the positive seconds"),
        ("evict", {"mean_curve": (1.0, -2.0)}, "evict: mean_curve must list the positive seconds"),
        ("ecospec", {"epsilon": 0.0}, "ecospec: epsilon must be positive"),
        ("ecospec_static", {"epsilon": math.inf}, "ecospec_static: epsilon must be positive"),
        ("ecospec_oracle", {"buffer_init": "full"}, "ecospec_oracle: buffer_init is 'full', allowed: root, empty"),
    ],
)
def test_wrong_names_and_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, **options)


def test_missing_sets_and_short_curves():
    tree = random_tree(5, random.Random(0))
    for name in ("ecospec", "ecospec_static"):
        with pytest.raises(ValueError, match=f"policy {name} needs expert sets"):
            make_policy(name).select(tree, None, CONTEXT)
    with pytest.raises(ValueError, match="mean_curve covers 2 tokens, the budget is 4"):
        make_policy("evict", mean_curve=(1.0, 2.0)).select(tree, None, CONTEXT)
