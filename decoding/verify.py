"""Verifying a draft tree in one forward of a stock transformers model: masks, acceptance, KV compaction.

The target sees its context of C cached tokens and, appended, the N nodes of the tree. Each node may look at the
whole context and at its own path::

                 context (C)        tree (N)
    node 0   0 0 0 … 0 0 0      0  -∞  -∞  -∞
    node 1   0 0 0 … 0 0 0      0   0  -∞  -∞        parents -1 0 0 1
    node 2   0 0 0 … 0 0 0      0  -∞   0  -∞
    node 3   0 0 0 … 0 0 0      0   0  -∞   0

Masks are additive: boolean ones are silently wrong in eager attention. A sliding-window layer gets a mask of its
own, as wide as the others, that hides what lies a window or more behind the node's *position* (not its row:
siblings share a position); a sliced tree mask, or the full one, gives wrong logits without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ecospec.decoding.tree import DraftTree


def tree_attention_mask(tree: DraftTree, context: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Build the additive attention mask of a tree.

    Args:
        tree: N nodes.
        context: C, cached tokens before the root.
        dtype: The target's dtype.
        window: Sliding window of the layers it is for: a token sees itself and ``window - 1`` tokens before it;
            None for full attention.

    Returns:
        ``[1, 1, N, C + N]``: 0 where a node may look, the lowest finite number of ``dtype`` elsewhere.
    """
    nodes = len(tree)
    hidden = ~tree.ancestors
    if window is None:
        mask = torch.zeros(nodes, context + nodes, dtype=dtype, device=hidden.device)
        mask[:, context:].masked_fill_(hidden, torch.finfo(dtype).min)
        return mask[None, None]
    positions = context + tree.depths
    before = torch.arange(context, device=hidden.device)
    distance = positions[:, None] - torch.cat([before, positions])[None, :]
    blocked = torch.cat([hidden.new_zeros(nodes, context), hidden], dim=1) | (distance >= window)
    mask = torch.zeros(nodes, context + nodes, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(blocked, torch.finfo(dtype).min)[None, None]


def accepted_path(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Walk from the root along the target's own choices.

    At each node take the token the target chooses there; if a child carries it, go there, else stop.

    Args:
        tokens: Token of each node, ``[N]``.
        parents: Parent of each node, -1 for the root.
        chosen: The target's next token at each node.

    Returns:
        Node indices from the root (0) down. The emitted tokens are ``chosen`` at these nodes: the last one, which
        no selected node carries, is the bonus token and the next root.

    >>> accepted_path([7, 8, 9, 5], [-1, 0, 0, 2], [9, 1, 5, 6])
    [0, 2, 3]
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        children.setdefault((parents[node], tokens[node]), node)
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path


def compact(cache: DynamicCache, context: int, path: Sequence[int]) -> None:
    """Keep the context and the accepted path of a verified tree, drop the other nodes.

    transformers' caches cannot gather along the sequence axis, so keys and values are moved by hand, in place: only
    the rows of the path are copied, and none where the path is the tree's first rows.

    Args:
        cache: Built without a config, so that sliding-window layers keep everything; holds context and tree.
        context: C, rows before the tree.
        path: Tree nodes to keep, ascending; empty to drop the whole tree.
    """
    length = context + len(path)
    moved = any(node != row for row, node in enumerate(path))
    index = torch.tensor(path, dtype=torch.int64) + context if moved else None
    for layer in cache.layers:
        if layer.keys is None or layer.keys.numel() == 0:
            continue  # layers that share another layer's keys and values own none
        for name in ("keys", "values"):
            rows: Tensor = getattr(layer, name)
            if index is not None:
                index = index.to(rows.device)
                rows[..., context:length, :] = rows.index_select(-2, index)
            setattr(layer, name, rows[..., :length, :])
