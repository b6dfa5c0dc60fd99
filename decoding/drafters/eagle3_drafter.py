"""The EAGLE-3 drafter: a beam tree from an `Eagle3Head` with a key-value cache. Shapes: n rows, H hidden size.

Every row of the cache is a pair (token t + 1, feature of position t). Rows of tokens that the target has processed
are computed from the target's states only and stay; the root's row and the rows of drafted tokens are written
behind them and overwritten by the next step. So the tree depends on nothing but the prefix.

A tree carries the hidden state before each of its nodes (`node_states`), for predictors attached to the drafter.

One step costs `depth` forwards of the head: the first runs the rows that `extend` queued together with the root's
row. No step reads a value back from the device; ties are broken towards the lower draft id and the lower node.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecospec.decoding.drafters.eagle3 import Eagle3Head
from ecospec.decoding.tree import DraftTree


class Eagle3Drafter:
    """Drafts trees along one sequence (implements `Drafter`).

    Args:
        head: The draft head, on its device and in its type.
        capacity: Cache rows to begin with; it doubles when needed.
    """

    def __init__(self, head: Eagle3Head, *, capacity: int = 512) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.head = head
        attention = head.midlayer.self_attn
        shape = (2, 1, attention.num_kv_heads, capacity, attention.head_dim)
        self._cache = torch.empty(shape, device=head.device, dtype=head.dtype)  # keys, values
        self.reset()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        target: Any,
        *,
        identity: Mapping[str, str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Eagle3Drafter:
        """Load a head for a transformers target and check that the two belong together.

        Args:
            path: Folder of the head.
            target: The target model; its embedding is used by reference.
            identity: ``tokenizer_fingerprint`` and ``target_fingerprint`` of the target, compared where the head
                states its own.
            device: Default: the device of the target's embedding.
            dtype: Default: as stored.

        Raises:
            FileNotFoundError: A file is absent.
            ValueError: The head is damaged or was made for another target.
        """
        embedding = target.get_input_embeddings()
        head = Eagle3Head.from_pretrained(path, embedding, device=device or embedding.weight.device, dtype=dtype)
        config = target.config.get_text_config() if hasattr(target.config, "get_text_config") else target.config
        head.config.require_target(config, identity=identity, source=f"drafter {path}")
        return cls(head)

    @property
    def required_aux_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs are wanted, concatenated in this order."""
        return self.head.config.aux_layers

    @property
    def length(self) -> int:
        """Number of tokens that the target has processed so far."""
        return self._tokens

    def reset(self) -> None:
        """Forget the sequence; the cache's memory is kept."""
        head = self.head
        self._tokens = 0
        self._rows = 0
        self._last = torch.empty(0, head.config.hidden_size, device=head.device, dtype=head.dtype)
        self._queued_ids = torch.empty(0, device=head.device, dtype=torch.int64)
        self._queued = self._last

    @torch.no_grad()
    def prefill(self, ids: Tensor, aux_hidden: Tensor) -> None:
        """Append tokens that the target has processed and run the head over them.

        Args:
            ids: int64 ``[T]``.
            aux_hidden: floating ``[T, A * H_target]``.

        Raises:
            ValueError: The shapes do not belong together.
        """
        self.extend(ids, aux_hidden)
        if len(self._queued_ids):
            self._run(self._queued_ids, self._queued)
            self._keep_queue()

    @torch.no_grad()
    def extend(self, ids: Tensor, aux_hidden: Tensor) -> None:
        """Append tokens that the target has processed; the next `draft` runs the head over them.

        Args:
            ids: int64 ``[T]``.
            aux_hidden: floating ``[T, A * H_target]``.

        Raises:
            ValueError: The shapes do not belong together.
        """
        if ids.ndim != 1 or aux_hidden.shape != (len(ids), self.head.config.aux_size):
            raise ValueError(
                f"expected ids [T] and aux_hidden [T, {self.head.config.aux_size}] "
                f"(outputs of layers {list(self.required_aux_layers)} concatenated), "
                f"got {list(ids.shape)} and {list(aux_hidden.shape)}"
            )
        if not len(ids):
            return
        features = torch.cat((self._last, self.head.features(aux_hidden)))
        following = ids.to(self.head.device)[
            len(ids) + 1 - len(features) :
        ]  # the first token of all follows nothing
        self._queued_ids = torch.cat((self._queued_ids, following))
        self._queued = torch.cat((self._queued, features[:-1]))
        self._last = features[-1:]
        self._tokens += len(ids)

    @torch.no_grad()
    def draft(self, root_token: Tensor, *, depth: int = 3, top_k: int = 2, beam: int = 2) -> DraftTree:
        """Propose a tree: `depth` forwards, `top_k` candidates per expanded node, the `beam` best expanded.

        With the defaults 2 + 4 + 4 candidates below the root.

        Args:
            root_token: int64 ``[]`` or ``[1]``, the last emitted token.
            depth: Levels of candidates, at least 1.
            top_k: Candidates per expanded node, from 1 to the draft vocabulary.
            beam: Nodes expanded per level, at least 1.

        Returns:
            The tree level by level; candidates of one level are ordered by their parent's place in the beam, then
            by probability. ``logprobs`` are cumulative, over the draft vocabulary.

        Raises:
            ValueError: Nothing was processed before the root, or an argument is out of range.
        """
        if not self._tokens:
            raise ValueError(
                "draft needs at least one token processed by the target before the root; call prefill first"
            )
        if depth < 1 or beam < 1 or not 1 <= top_k <= self.head.config.draft_vocab_size:
            raise ValueError(
                f"depth and beam must be at least 1 and top_k from 1 to {self.head.config.draft_vocab_size}, "
                f"got depth={depth}, beam={beam}, top_k={top_k}"
            )
        root = root_token.reshape(1).to(self.head.device)
        self._reserve(self._rows + len(self._queued_ids) + 1 + (depth - 1) * beam)
        hidden = self._run(torch.cat((self._queued_ids, root)), torch.cat((self._queued, self._last)))[-1:]
        self._keep_queue()
        return self._grow(root, hidden, depth, top_k, beam)

    def _grow(self, root: Tensor, hidden: Tensor, depth: int, top_k: int, beam: int) -> DraftTree:
        """Build the tree below the root, whose row sits at ``self._rows`` with hidden state ``hidden [1, H]``."""
        device = root.device
        score_type = torch.promote_types(hidden.dtype, torch.float32)
        expanded = torch.zeros(1, dtype=torch.int64, device=device)  # node index of every row of `hidden`
        scores = torch.zeros(1, dtype=score_type, device=device)
        sees = torch.zeros(1, 0, dtype=torch.bool, device=device)  # drafted rows each row of `hidden` sees
        tokens, parents, logprobs, levels = [root], [expanded - 1], [scores], [expanded]
        states = [self._last]
        count = 1
        for level in range(1, depth + 1):
            log_probs = self.head.logits(hidden).to(score_type).log_softmax(-1)
            best, draft_ids = first_top_k(log_probs, top_k)  # [rows, top_k]
            tokens.append((draft_ids + self.head.d2t[draft_ids]).flatten())
            parents.append(expanded.repeat_interleave(top_k, output_size=draft_ids.numel()))
            logprobs.append((scores[:, None] + best).flatten())
            levels.append(torch.full_like(tokens[-1], level))
            states.append(hidden.repeat_interleave(top_k, dim=0, output_size=draft_ids.numel()))
            if level == depth:
                break
            scores, chosen = first_top_k(logprobs[-1], min(beam, draft_ids.numel()))
            row = chosen // top_k  # row of `hidden` above each chosen node
            written = sees.shape[1]
            sees = torch.cat((sees[row], torch.eye(len(chosen), dtype=torch.bool, device=device)), dim=1)
            hidden = self._run_tree(tokens[-1][chosen], hidden[row], sees, level, written)
            expanded = chosen + count
            count += draft_ids.numel()
        return DraftTree(
            tokens=torch.cat(tokens),
            parents=torch.cat(parents),
            logprobs=torch.cat(logprobs).float(),
            depths=torch.cat(levels),
            states=torch.cat(states),
        )

    @property
    def state_fingerprint(self) -> str:
        """See `Eagle3Head.state_fingerprint`."""
        return self.head.state_fingerprint

    @property
    def state_sizes(self) -> tuple[int, int]:
        """H and H: the two halves that the head's attention reads."""
        return self.head.config.hidden_size, self.head.config.hidden_size

    @torch.no_grad()
    def node_states(self, tree: DraftTree) -> Tensor:
        """What the head's attention reads, or would read, for every node: ``[N, 2H]``, both halves normalised.

        The head runs over the nodes it expands only; but the row of a leaf would read its token and the hidden
        state of its parent, and both are there.

        Args:
            tree: From `draft`.
        """
        assert tree.states is not None
        return self.head.midlayer.attention_input(self.head.embed(tree.tokens), tree.states)

    @torch.no_grad()
    def token_states(self, ids: Tensor) -> Tensor:
        """First half of `node_states`: normalised embeddings ``[..., H]`` of int64 ``[...]``."""
        normalised: Tensor = self.head.midlayer.input_layernorm(self.head.embed(ids))
        return normalised

    @torch.no_grad()
    def text_states(self, ids: Tensor, aux_hidden: Tensor, depth: int) -> Tensor:
        """Second half of `node_states` along a text, ``[depth + 1, T, H]``; see `StateDrafter.text_states`.

        Args:
            ids: int64 ``[T]``; memory grows with T squared.
            aux_hidden: floating ``[T, A * H_target]``.
            depth: Deepest level, at least 0.
        """
        head, length = self.head, len(ids)
        features = head.features(aux_hidden)
        states = features.new_zeros(depth + 1, length, features.shape[-1])
        states[0, 1:] = features[:-1]
        if depth:
            # Rows behind the text let every token be a base; nothing that is kept reads them.
            padded = torch.cat((ids, ids.new_zeros(depth)))
            aux = torch.cat((aux_hidden, aux_hidden.new_zeros(depth, aux_hidden.shape[-1])))
            for level, hidden in enumerate(head.unroll_hidden(padded[None], aux[None], depth), start=1):
                states[level, : level + 1] = states[level - 1, : level + 1]
                states[level, level + 1 :] = hidden[0, : max(length - level - 1, 0)]
        normalised: Tensor = head.midlayer.hidden_norm(states)
        return normalised

    def _run(self, ids: Tensor, features: Tensor) -> Tensor:
        """Run consecutive rows behind the kept ones, causally; return their hidden states ``[n, H]``."""
        count, start = len(ids), self._rows
        self._reserve(start + count)
        positions = torch.arange(start, start + count, device=ids.device)
        mask = None if not start else positions[:, None] >= torch.arange(start + count, device=ids.device)
        return self._forward(ids, features, positions, mask, start)

    def _run_tree(self, ids: Tensor, features: Tensor, sees: Tensor, level: int, written: int) -> Tensor:
        """Run drafted rows of one level; each sees kept rows, the root's and those in ``sees [n, drafted]``."""
        prefix = self._rows + 1
        positions = torch.full_like(ids, self._rows + level)
        mask = torch.cat((sees.new_ones(len(ids), prefix), sees), dim=1)
        return self._forward(ids, features, positions, mask, prefix + written)

    def _forward(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None, start: int) -> Tensor:
        layer = self.head.midlayer
        cosine, sine = self.head.rotary(positions, features.dtype)
        x = layer.attention_input(self.head.embed(ids), features)[None]
        q, k, v = layer.self_attn.project(x, cosine, sine)
        stop = start + len(ids)
        self._cache[0, :, :, start:stop] = k
        self._cache[1, :, :, start:stop] = v
        attended = layer.self_attn.attend(q, self._cache[0, :, :, :stop], self._cache[1, :, :, :stop], mask)
        return layer.finish(features, attended[0])

    def _keep_queue(self) -> None:
        """Declare the queued rows, just run, part of the prefix."""
        self._rows += len(self._queued_ids)
        self._queued_ids, self._queued = self._queued_ids[:0], self._queued[:0]

    def _reserve(self, rows: int) -> None:
        capacity = self._cache.shape[3]
        if rows <= capacity:
            return
        while capacity < rows:
            capacity *= 2
        with torch.inference_mode(mode=False):  # a tensor born in inference mode could not be written outside it
            grown = self._cache.new_empty((*self._cache.shape[:3], capacity, self._cache.shape[4]))
        grown[:, :, :, : self._rows] = self._cache[:, :, :, : self._rows]
        self._cache = grown


def first_top_k(values: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest `top_k` of the last axis, equal ones in index order (``torch.topk`` leaves that open).

    Args:
        values: floating ``[..., M]``, M at least `top_k`.
        top_k: How many; cheap for a few.

    Returns:
        Values and int64 indices, ``[..., top_k]``, descending.
    """
    remaining = values.clone()
    indices = []
    for _ in range(top_k):
        index = remaining.argmax(dim=-1, keepdim=True)
        indices.append(index)
        remaining.scatter_(-1, index, float("-inf"))
    found = torch.cat(indices, dim=-1)
    return values.gather(-1, found), found
