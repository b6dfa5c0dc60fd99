"""The target's token embedding as a predictor holds it: by reference, called, never taken apart.

In a serving process the embedding may be sharded over devices (a DTensor), offloaded (on the meta device between
calls), or scaled by its own forward pass. All of them answer when they are called as modules; what cannot answer is
refused with the reason when it is given, not at the first token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec.predictor.routing_spec import RoutingSpec

# Squared RMS below which a row counts as zero. Embedding entries of 1e-3 are common in small targets, so the usual
# 1e-6 of model norms would visibly shrink their rows.
_RMS_EPSILON = 1e-12


class TargetEmbedding:
    """The look-up of target token ids.

    Args:
        source: The target's embedding module, or its table ``[V, H]``.
        rows: V, as the routing spec says.
        width: H, as the predictor was made for.

    Raises:
        ValueError: Another shape, a sharded or empty (meta) table, or a module that cannot be called.
    """

    def __init__(self, source: nn.Module | Tensor, rows: int, width: int) -> None:
        self.source = source
        self._expected = (rows, width)
        if isinstance(source, Tensor):
            _require_whole(source)
            self._require_shape(tuple(source.shape))
            return
        # Attributes of the module, not of its weight: reading the weight of a sharded one may gather or fail.
        declared = (getattr(source, "num_embeddings", None), getattr(source, "embedding_dim", None))
        if all(isinstance(size, int) for size in declared):
            self._require_shape(declared)
        self._require_callable()

    def __call__(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., H]`` of token ids int64 ``[...]``, in the embedding's own type."""
        if isinstance(self.source, Tensor):
            return F.embedding(ids.to(self.source.device), self.source)
        first = next(self.source.parameters(), None)
        if first is not None and not first.is_meta:  # an offloaded module's hooks move its inputs themselves
            ids = ids.to(first.device)
        found: Any = self.source(ids)
        rows: Tensor = found.full_tensor() if _is_sharded(found) else found
        return rows

    def table(self) -> Tensor:
        """The whole table ``[V, H]``, to be stored.

        Raises:
            ValueError: There is no plain table: it is sharded, offloaded, or hidden in a module.
        """
        table = (
            self.source if isinstance(self.source, Tensor) else dict(self.source.named_parameters()).get("weight")
        )
        if table is None or table.is_meta or _is_sharded(table):
            raise ValueError("store_embedding needs the whole embedding table; pass it as a tensor")
        return table.detach()

    def _require_shape(self, shape: tuple[Any, ...]) -> None:
        if shape != self._expected:
            raise ValueError(
                f"the target embedding is {shape}, this predictor was made for {self._expected}; "
                "pass the embedding of the target named in its config"
            )

    def _require_callable(self) -> None:
        """Look one token up."""
        advice = "pass get_input_embeddings() of the model as it was loaded, with its hooks"
        try:
            with torch.no_grad():
                found = self(torch.zeros((1, 1), dtype=torch.int64))
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the target embedding cannot be called ({reason[:200]}); {advice}") from error
        if found.is_meta:
            raise ValueError(f"the target embedding holds no data (meta device) and no hook loads it; {advice}")
        if found.shape[-1] != self._expected[1]:
            self._require_shape((self._expected[0], found.shape[-1]))


class ReadsTargetEmbedding(nn.Module):
    """A network that may read the target's token embedding.

    The embedding is a *reference*: neither a parameter nor part of the state dict, not moved by ``.to()``.

    Args:
        spec: The target.
        embedding_size: Width of the target's embedding, H; None where it is not read.
    """

    owned_embedding: Tensor | None

    def __init__(self, spec: RoutingSpec, embedding_size: int | None) -> None:
        super().__init__()
        self.spec = spec
        self.embedding_size = embedding_size
        # In a list, so that nn.Module does not register the target's embedding as a part of this model.
        self._target_embedding: list[TargetEmbedding] = []
        self.register_buffer("owned_embedding", None, persistent=False)

    @property
    def target_embedding(self) -> nn.Module | Tensor | None:
        """The target's embedding, if there is one."""
        return self._target_embedding[0].source if self._target_embedding else self.owned_embedding

    def require_embedding(self) -> TargetEmbedding | None:
        """The target's embedding; None where it is not read.

        Raises:
            ValueError: It is needed and was not given.
        """
        return None if self.embedding_size is None else self.target_rows()

    def target_rows(self) -> TargetEmbedding:
        """The target's embedding.

        Raises:
            ValueError: It was not given.
        """
        if self._target_embedding:
            return self._target_embedding[0]
        if self.owned_embedding is None:
            raise ValueError(
                "this predictor needs the target's token embedding; pass target_embedding="
                "model.get_input_embeddings() or load_target_embedding(path)"
            )
        return self._checked(self.owned_embedding)

    def set_target_embedding(self, embedding: nn.Module | Tensor) -> None:
        """Use the target's embedding, by reference; not looked at where it is not read.

        Args:
            embedding: The target's embedding module (called as a module, so that sharded and offloaded ones
                work), or its table ``[V, H]``.

        Raises:
            ValueError: The table is not ``[spec.vocab_size, embedding_size]``, or cannot be looked up.
        """
        if self.embedding_size is not None:
            self._target_embedding = [self._checked(embedding)]

    def own_target_embedding(self, table: Tensor) -> None:
        """Keep an embedding table ``[V, H]`` of one's own, which moves with the model; for bundles that store it.

        Raises:
            ValueError: See `set_target_embedding`.
        """
        self._checked(table)
        self._target_embedding = []
        self.owned_embedding = table

    def _checked(self, embedding: nn.Module | Tensor) -> TargetEmbedding:
        assert self.embedding_size is not None
        return TargetEmbedding(embedding, self.spec.vocab_size, self.embedding_size)


def unit_rows(embeddings: Tensor, weight: Tensor) -> Tensor:
    """Embedding rows brought to unit RMS, in float32 at least, where and as wide as a weight is.

    Args:
        embeddings: ``[..., H]``.
        weight: What they are multiplied by; the rows come in its type.

    Returns:
        ``[..., H]``; rows of zeros stay zeros.
    """
    rows = embeddings.to(device=weight.device, dtype=torch.promote_types(embeddings.dtype, torch.float32))
    rows = rows.to(torch.promote_types(rows.dtype, weight.dtype))
    rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + _RMS_EPSILON)
    return rows.to(weight.dtype)


def _require_whole(table: Tensor) -> None:
    if table.is_meta:
        raise ValueError("the target embedding table holds no data (meta device); load it, or pass the module")
    if _is_sharded(table):
        raise ValueError(
            "the target embedding table is sharded over devices, so no row can be looked up; pass the module, "
            "get_input_embeddings()"
        )


def _is_sharded(value: Any) -> bool:
    """Whether a tensor is a DTensor (told by a property: importing the class imports the process groups)."""
    return hasattr(value, "device_mesh")
