r"""Draft trees: the candidates of one speculation step.

Node 0 is the root, the last emitted token, which the target has not processed yet; every other node is a candidate.
A node's parent has a lower index than the node itself::

    index    0     1     2     3     4            0 (root)
    parents -1     0     0     1     1           / \
    depths   0     1     1     2     2          1   2
                                               / \
    logprobs are cumulative from the root     3   4

Shapes: N nodes (root included), M kept nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """One draft tree. All tensors lie on one device.

    Attributes:
        tokens: int64 ``[N]``, target token ids; ``tokens[0]`` is the root.
        parents: int64 ``[N]``, index of each node's parent, -1 for the root; ``parents[i] < i``.
        logprobs: float32 ``[N]``, log-probability under the drafter, summed along the path; 0.0 at the root, never
            rising from parent to child.
        depths: int64 ``[N]``, edges from the root.
        states: floating ``[N, H]``, the drafter's hidden state before each node, the one that the node's token was
            proposed from; None where the drafter has none. They stay with the whole tree: parts of it have None.

    Raises:
        ValueError: A field has the wrong shape or dtype. Contents are checked by `validate`, which waits for the
            device and is therefore not part of construction.
    """

    tokens: Tensor
    parents: Tensor
    logprobs: Tensor
    depths: Tensor
    states: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes, which costs no device synchronisation."""
        size = tuple(self.tokens.shape)
        if len(size) != 1 or size[0] < 1:
            raise ValueError(f"DraftTree.tokens must have shape [N] with N >= 1, got {list(size)}")
        for name, dtype in _DTYPES.items():
            value: Tensor = getattr(self, name)
            if tuple(value.shape) != size or value.dtype != dtype:
                raise ValueError(
                    f"DraftTree.{name} must be {dtype} {list(size)}, got {value.dtype} {list(value.shape)}"
                )
        if self.states is not None and (self.states.ndim != 2 or self.states.shape[0] != size[0]):
            raise ValueError(f"DraftTree.states must be [{size[0]}, H], got {list(self.states.shape)}")

    def __len__(self) -> int:
        """Return N, the number of nodes with the root."""
        return int(self.tokens.shape[0])

    @functools.cached_property
    def ancestors(self) -> Tensor:
        """Paths to the root, bool ``[N, N]``: row i marks node i and all its ancestors."""
        return ancestor_mask(self.parents)

    def validate(self) -> None:
        """Check the contents (copies the tree to the host).

        Raises:
            ValueError: Parents do not precede children, depths do not follow parents, or log-probabilities rise.
        """
        parents, depths, logprobs = self.parents.tolist(), self.depths.tolist(), self.logprobs.tolist()
        if (parents[0], depths[0], logprobs[0]) != (-1, 0, 0.0):
            raise ValueError(
                "DraftTree: node 0 must be the root with parent -1, depth 0, log-probability 0.0, got "
                f"{parents[0]}, {depths[0]}, {logprobs[0]}"
            )
        for node in range(1, len(self)):
            parent = parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"DraftTree.parents[{node}] is {parent}, allowed: 0 to {node - 1}")
            if depths[node] != depths[parent] + 1:
                raise ValueError(f"DraftTree.depths[{node}] is {depths[node]}, its parent's is {depths[parent]}")
            if not logprobs[node] <= logprobs[parent]:
                raise ValueError(
                    f"DraftTree.logprobs[{node}] is {logprobs[node]}, above its parent's {logprobs[parent]}; "
                    "log-probabilities are cumulative along the path"
                )


_DTYPES = {"tokens": torch.int64, "parents": torch.int64, "logprobs": torch.float32, "depths": torch.int64}


def root_only(token: Tensor) -> DraftTree:
    """Return the tree of one node, the root.

    Args:
        token: int64 ``[1]``.
    """
    zero = torch.zeros_like(token)
    return DraftTree(token, zero - 1, torch.zeros(1, dtype=torch.float32, device=token.device), zero)


def chain(tokens: Tensor) -> DraftTree:
    """Return the tree in which each token is the only child of the one before.

    Args:
        tokens: int64 ``[N]``; the first is the root.
    """
    depths = torch.arange(tokens.shape[0], device=tokens.device)
    return DraftTree(tokens, depths - 1, -depths.to(torch.float32), depths)


def graft(trees: Sequence[DraftTree]) -> DraftTree:
    r"""Join the trees of consecutive positions into one: their roots become its trunk.

    The root of each tree must be the text's next token after the root of the tree before, so that each node keeps
    its prefix::

        root 0 - root 1 - root 2        trunk: nodes 0 to B - 1
         / \      / \      / \
        3   4    5   6    7   8         then the candidates, tree by tree

    Args:
        trees: B trees, of any sizes.

    Returns:
        The joint tree, depths counted from the first root. Its log-probabilities are all 0: they stay with the
        trees.
    """
    count = start = len(trees)
    trunk = torch.arange(count, device=trees[0].tokens.device)
    tokens, parents, depths = [tree.tokens[:1] for tree in trees], [trunk - 1], [trunk]
    for row, tree in enumerate(trees):
        above = tree.parents[1:]
        parents.append(torch.where(above == 0, row, above + (start - 1)))
        tokens.append(tree.tokens[1:])
        depths.append(tree.depths[1:] + row)
        start += len(tree) - 1
    joint = torch.cat(tokens)
    return DraftTree(
        joint, torch.cat(parents), torch.zeros(start, dtype=torch.float32, device=joint.device), torch.cat(depths)
    )


def depths_of(parents: Tensor) -> Tensor:
    """Return int64 ``[N]``, edges from the root, for int64 ``[N]`` parents."""
    return ancestor_mask(parents).sum(dim=1) - 1


def ancestor_mask(parents: Tensor) -> Tensor:
    """Mark each node's path to the root.

    Squares the one-step reachability matrix log2(N) times, so nothing is read back from the device.

    Args:
        parents: int64 ``[N]``, -1 at the root.

    Returns:
        bool ``[N, N]``, ``[i, j]`` true where j is i itself or an ancestor of i.

    >>> ancestor_mask(torch.tensor([-1, 0, 1])).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    size = int(parents.shape[0])
    index = torch.arange(size, device=parents.device)
    reach = ((index[None, :] == parents[:, None]) | (index[None, :] == index[:, None])).to(torch.float32)
    for _ in range(max(0, size - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def select_nodes(tree: DraftTree, kept: Tensor) -> DraftTree:
    """Return the tree of the kept nodes.

    Args:
        tree: N nodes.
        kept: int64 ``[M]``, ascending, starting with the root (0) and prefix closed: with a node its parent.

    Returns:
        The tree with M nodes, ``parents`` renumbered.
    """
    parents = tree.parents[kept]
    # A parent's new index is the number of kept indices below it; the root keeps its -1.
    renumbered = torch.where(parents < 0, parents, torch.searchsorted(kept, parents.clamp(min=0)))
    selected = DraftTree(tree.tokens[kept], renumbered, tree.logprobs[kept], tree.depths[kept])
    # A kept set is prefix closed, so paths among kept nodes are the old ones: no need to compute them again.
    selected.__dict__["ancestors"] = tree.ancestors[kept][:, kept]
    return selected


def is_prefix_closed(tree: DraftTree, kept: Tensor) -> bool:
    """Whether ``kept`` (int64 ``[M]``) contains the root and every kept node's parent; reads from the device."""
    nodes = set(kept.tolist())
    parents = tree.parents.tolist()
    return 0 in nodes and all(node == 0 or parents[node] in nodes for node in nodes)
