"""Draft trees: construction, ancestors, selection of nodes."""

import random

import pytest
import torch

from ecospec.decoding.tree import DraftTree, ancestor_mask, depths_of, is_prefix_closed, root_only, select_nodes
from tests.decoding_fakes import random_tree


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 8, 11, 20, 65])
def test_ancestor_mask_is_the_path_to_the_root(size):
    tree = random_tree(min(size, 60), random.Random(size))
    parents = tree.parents.tolist()
    expected = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        expected[node, path_to(parents, node)] = True
    assert torch.equal(ancestor_mask(tree.parents), expected)
    assert torch.equal(depths_of(tree.parents), tree.depths)


def test_ancestor_mask_of_a_long_chain():
    chain = torch.arange(-1, 40)
    assert torch.equal(ancestor_mask(chain), torch.ones(41, 41).tril().bool())


def test_select_nodes_renumbers_parents_and_keeps_paths():
    rng = random.Random(3)
    for _ in range(50):
        tree = random_tree(12, rng)
        parents = tree.parents.tolist()
        kept = {0}
        for node in rng.sample(range(1, 12), 4):
            kept |= set(path_to(parents, node))
        chosen = torch.tensor(sorted(kept))
        selected = select_nodes(tree, chosen)
        selected.validate()
        for new, old in enumerate(sorted(kept)):
            wanted = [int(tree.tokens[node]) for node in path_to(parents, old)]
            got = [int(selected.tokens[node]) for node in path_to(selected.parents.tolist(), new)]
            assert got == wanted
        assert torch.equal(selected.ancestors, ancestor_mask(selected.parents))
        assert is_prefix_closed(tree, chosen)


def test_prefix_closure_check():
    tree = DraftTree(
        torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]), torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0, 1, 2])
    )
    assert not is_prefix_closed(tree, torch.tensor([0, 2]))
    assert not is_prefix_closed(tree, torch.tensor([1]))


def test_root_only():
    tree = root_only(torch.tensor([7]))
    tree.validate()
    assert len(tree) == 1
    assert tree.ancestors.tolist() == [[True]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(0, dtype=torch.int64)}, r"tokens must have shape \[N\]"),
        ({"parents": torch.zeros(3, dtype=torch.int64)}, "parents must be torch.int64"),
        ({"logprobs": torch.zeros(2, dtype=torch.float64)}, "logprobs must be torch.float32"),
        ({"depths": torch.zeros(2)}, "depths must be torch.int64"),
    ],
)
def test_shapes_and_dtypes_are_checked(change, message):
    fields = {
        "tokens": torch.tensor([1, 2]),
        "parents": torch.tensor([-1, 0]),
        "logprobs": torch.tensor([0.0, -1.0]),
        "depths": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        DraftTree(**(fields | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": torch.tensor([0, 0])}, "node 0 must be the root"),
        ({"parents": torch.tensor([-1, 1])}, r"parents\[1\] is 1, allowed: 0 to 0"),
        ({"depths": torch.tensor([0, 2])}, r"depths\[1\] is 2"),
        ({"logprobs": torch.tensor([0.0, 0.5])}, "above its parent's"),
    ],
)
def test_validate_checks_contents(change, message):
    fields = {
        "tokens": torch.tensor([1, 2]),
        "parents": torch.tensor([-1, 0]),
        "logprobs": torch.tensor([0.0, -1.0]),
        "depths": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        DraftTree(**(fields | change)).validate()
