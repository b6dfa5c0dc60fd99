"""Which targets can verify draft trees, found out by what they do rather than by their names."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ecospec.decoding.tree import DraftTree
from ecospec.decoding.verify import tree_attention_mask

FULL, SLIDING = "full_attention", "sliding_attention"
_IMPLEMENTATIONS = ("eager", "sdpa")
_ADVICE = "draft trees need attention over keys and values in every layer"


@dataclasses.dataclass(frozen=True)
class MaskPlan:
    """Which mask each decoder layer of a target needs.

    Attributes:
        kinds: Attention kind of each decoder layer, ``"full_attention"`` or ``"sliding_attention"``.
        window: Sliding window in tokens, where a layer has one.
    """

    kinds: tuple[str, ...]
    window: int | None

    def masks(self, tree: DraftTree, context: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Build what the model takes as ``attention_mask``: a dict where layers differ, else one mask."""
        masks = {
            kind: tree_attention_mask(tree, context, dtype, self.window if kind == SLIDING else None)
            for kind in dict.fromkeys(self.kinds)
        }
        return masks if len(masks) > 1 else masks[self.kinds[0]]


def mask_plan(model: nn.Module) -> MaskPlan:
    """Read layer kinds and window from a transformers model's config.

    Raises:
        ValueError: A layer is neither full nor sliding-window attention, or the attention implementation takes no
            additive masks.
    """
    kind = type(model).__name__
    config: Any = model.config
    implementation = config._attn_implementation  # noqa: SLF001 (transformers offers no public name)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{kind} uses {implementation} attention, which takes no tree masks; load it with attn_implementation= "
            f"one of {', '.join(_IMPLEMENTATIONS)}"
        )
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = [FULL if window is None else SLIDING] * text.num_hidden_layers
    if other := sorted(set(kinds) - {FULL, SLIDING}):
        raise ValueError(f"{kind} has layers of type {other[0]!r}; {_ADVICE}: {FULL} or {SLIDING}")
    if SLIDING in kinds and not isinstance(window, int):
        raise ValueError(f"{kind} has sliding-window layers but its config gives no sliding_window")
    return MaskPlan(tuple(kinds), window)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a transformers causal language model.

    Raises:
        ValueError: The model has no ``get_decoder().layers``.
    """
    get_decoder = getattr(model, "get_decoder", None)
    layers = getattr(get_decoder(), "layers", None) if callable(get_decoder) else None
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no decoder layers; give a transformers causal language model")
    return layers


def require_tree_support(model: nn.Module, plan: MaskPlan) -> None:
    """Run a tree of three nodes behind two tokens and look at what the model did with it.

    Every decoder layer must be handed the mask meant for it, and every cache layer must hold one row of keys and
    values per token and nothing else.

    Raises:
        ValueError: Recurrent or linear-attention state, masks that are rebuilt on the way, or a forward that fails.
    """
    kind = type(model).__name__
    device = next(model.parameters()).device
    tree = DraftTree(
        tokens=torch.zeros(3, dtype=torch.int64, device=device),
        parents=torch.tensor([-1, 0, 0], device=device),
        logprobs=torch.zeros(3, device=device),
        depths=torch.tensor([0, 1, 1], device=device),
    )
    cache = DynamicCache()
    masks = plan.masks(tree, 2, _dtype(model))
    seen: list[list[Tensor]] = []
    layers = list(decoder_layers(model))[: len(plan.kinds)]

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)])

    with torch.no_grad():
        model(
            input_ids=tree.tokens[None, :2], use_cache=False
        )  # what fails already here has nothing to do with trees
    try:
        with torch.no_grad():
            model(input_ids=tree.tokens[None, :2], cache=cache, use_cache=True, logits_to_keep=1)
            handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
            try:
                model(
                    input_ids=tree.tokens[None],
                    attention_mask=masks,
                    position_ids=(2 + tree.depths)[None],
                    cache=cache,
                    use_cache=True,
                )
            finally:
                for handle in handles:
                    handle.remove()
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        IndexError,
        NotImplementedError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{kind} cannot verify draft trees: {_ADVICE} ({reason})") from error
    for layer, (given, wanted) in enumerate(zip(seen, plan.kinds, strict=True)):
        mask = masks[wanted] if isinstance(masks, dict) else masks
        if not any(value is mask or (value.shape == mask.shape and torch.equal(value, mask)) for value in given):
            raise ValueError(f"{kind}: decoder layer {layer} is not handed the tree's attention mask; {_ADVICE}")
    _require_plain_cache(kind, cache, rows=5)


def _require_plain_cache(kind: str, cache: DynamicCache, rows: int) -> None:
    for number, layer in enumerate(cache.layers):
        state = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        if extra := sorted(set(state) - {"keys", "values"}):
            raise ValueError(f"{kind}: cache layer {number} holds {extra[0]} beside keys and values; {_ADVICE}")
        if any(value.ndim != 4 or value.shape[-2] != rows for value in state.values() if value.numel()):
            raise ValueError(f"{kind}: cache layer {number} does not hold one row per token; {_ADVICE}")
    if not any(layer.keys is not None for layer in cache.layers):
        raise ValueError(f"{kind} fills no cache of keys and values; {_ADVICE}")


def _dtype(model: nn.Module) -> torch.dtype:
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else next(model.parameters()).dtype


def require_positions(model: nn.Module, prompt: int, new_tokens: int, depth: int) -> None:
    """Refuse sequences on which a tree would see other positions than plain decoding.

    Args:
        model: The target.
        prompt: Tokens of the prompt.
        new_tokens: Most tokens to be generated.
        depth: Depth of the draft tree below the root.

    Raises:
        ValueError: The context would exceed the target's positions, or cross a length at which its rotary
            embedding changes with the longest position of a forward (longrope, dynamic).
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    total = prompt + new_tokens + depth
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and total > limit:
        raise ValueError(
            f"prompt ({prompt}) + max_new_tokens ({new_tokens}) + tree depth ({depth}) = {total} exceeds the "
            f"target's {limit} positions; shorten the prompt or generate fewer tokens"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", "default")
        boundary = parameters.get("original_max_position_embeddings") or limit
        if not isinstance(boundary, int) or total <= boundary:
            continue
        if kind == "dynamic" or (kind == "longrope" and prompt <= boundary):
            raise ValueError(
                f"{kind} rotary embedding changes past {boundary} positions, which prompt ({prompt}) + "
                f"max_new_tokens ({new_tokens}) + tree depth ({depth}) crosses; "
                "shorten the prompt or generate fewer tokens"
            )
