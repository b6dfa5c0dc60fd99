"""The target as decoding sees it: forwards over chunks and trees on one cache, with what drafter and policy need.

Shapes: C cached tokens, T tokens of a chunk, N tree nodes, H hidden, A aux layers, L MoE layers, K top-k, V vocab.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ecospec.decoding.capability import decoder_layers, mask_plan, require_tree_support
from ecospec.decoding.tree import DraftTree
from ecospec.decoding.verify import compact
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.trace_collection.hooks import RoutingRecorder


@dataclasses.dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one forward of the target gave, on the target's device.

    Attributes:
        logits: ``[n, V]``; n = 1 for a chunk of which only the last token was asked, else one row per token.
        aux: ``[T or N, A*H]``, outputs of the aux layers side by side; None unless observed.
        experts: int64 ``[T or N, L, K]``, the executed experts, ascending; None unless recorded.
    """

    logits: Tensor
    aux: Tensor | None
    experts: Tensor | None

    @property
    def drafter_states(self) -> Tensor:
        """Aux hidden states for a drafter; one that asks for none gets ``[T or N, 0]``."""
        if self.aux is not None:
            return self.aux
        assert self.experts is not None
        return self.logits.new_zeros(self.experts.shape[0], 0)


class TargetModel:
    """A stock transformers MoE model that can verify draft trees.

    Args:
        model: A causal language model in eval mode, eager or sdpa attention. With ``device_map`` its layers may lie
            on several devices; everything handed out is on the device of the embedding.
        spec: Its RoutingSpec where known; parts made for another target are then refused.

    Raises:
        ValueError: The model is in training mode, has no MoE layers, or cannot verify trees (recurrent or linear
            attention, masks not honoured); the message says which.
    """

    def __init__(self, model: nn.Module, spec: RoutingSpec | None = None) -> None:
        if model.training:
            raise ValueError(f"{type(model).__name__} is in training mode; call model.eval() first")
        self.model = model
        self.spec = spec
        self.plan = mask_plan(model)
        self.recorder = RoutingRecorder(model, spec)
        with self.recorder:
            require_tree_support(model, self.plan)
            self.top_k = int(self.recorder.last_experts.shape[-1])
        self.num_layers = self.recorder.num_layers
        self.num_experts = self.recorder.num_experts
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype: torch.dtype = getattr(model, "dtype", parameter.dtype)

    def session(self, *, aux_layers: Sequence[int] = (), record_experts: bool = True) -> TargetSession:
        """Open a session for one sequence.

        Args:
            aux_layers: Decoder layers (0-based) whose *outputs* are wanted, in the order of concatenation.
            record_experts: Whether forwards report the executed experts.

        Raises:
            ValueError: A layer number is out of range.
        """
        return TargetSession(self, tuple(aux_layers), record_experts=record_experts)


class TargetSession:
    """One sequence on its own cache; a context manager, because hooks sit on the shared model meanwhile.

    The cache is built without a config, so sliding-window layers keep all rows: what a rejected node pushed out of
    a window could not be brought back.

    Attributes:
        length: C, tokens in the context. Nodes of a verified tree belong to it only after `keep`.
    """

    def __init__(self, target: TargetModel, aux_layers: tuple[int, ...], *, record_experts: bool) -> None:
        self._target = target
        self._cache = DynamicCache()
        self._pending = 0
        self._hidden: dict[int, Tensor] = {}
        self._aux_layers = aux_layers
        self._record = record_experts
        self._stack = contextlib.ExitStack()
        self.length = 0
        layers = decoder_layers(target.model)
        for index in aux_layers:
            if not 0 <= index < len(layers):
                raise ValueError(
                    f"aux layer {index} does not exist; the target has decoder layers 0 to {len(layers) - 1}"
                )

    def __enter__(self) -> Self:
        """Register the hooks."""
        if self._record:
            self._stack.enter_context(self._target.recorder)
        layers = decoder_layers(self._target.model)
        for index in dict.fromkeys(self._aux_layers):
            self._stack.callback(layers[index].register_forward_hook(self._hook(index)).remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the hooks."""
        self._stack.close()

    def _hook(self, index: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._hidden[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def extend(self, ids: Tensor) -> TargetOutput:
        """Process tokens and add them to the context.

        Args:
            ids: int64 ``[T]``.

        Returns:
            Logits of the last token only, ``[1, V]``; aux and experts of all tokens.
        """
        assert self._pending == 0, "a verified tree must be kept or dropped first"
        count = int(ids.shape[0])
        positions = torch.arange(self.length, self.length + count, device=ids.device)
        output = self._forward(ids, positions, None, logits_to_keep=1)
        self.length += count
        return output

    def verify(self, tree: DraftTree) -> TargetOutput:
        """Process all nodes of a tree in one forward, behind the context; `keep` must follow.

        A tree of the root alone needs no mask and costs what a plain one-token step costs.
        """
        assert self._pending == 0, "a verified tree must be kept or dropped first"
        masks = self._target.plan.masks(tree, self.length, self._target.dtype) if len(tree) > 1 else None
        output = self._forward(tree.tokens, self.length + tree.depths, masks, logits_to_keep=0)
        self._pending = len(tree)
        return output

    def keep(self, path: Sequence[int]) -> None:
        """Move nodes of the last verified tree into the context and forget the others.

        Args:
            path: Node indices from the root down; empty to forget the whole tree.
        """
        if len(path) != self._pending:
            compact(self._cache, self.length, path)
        self._pending = 0
        self.length += len(path)

    def _forward(
        self, ids: Tensor, positions: Tensor, masks: Tensor | dict[str, Tensor] | None, logits_to_keep: int
    ) -> TargetOutput:
        target = self._target
        output = target.model(
            input_ids=ids[None],
            attention_mask=masks,
            position_ids=positions[None],
            cache=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        aux = None
        if self._aux_layers:
            aux = torch.cat([self._hidden[index][0].to(target.device) for index in self._aux_layers], dim=-1)
            self._hidden.clear()
        experts = target.recorder.last_experts.to(target.device) if self._record else None
        return TargetOutput(output.logits[0].to(target.device), aux, experts)
