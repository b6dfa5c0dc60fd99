"""Experts for a handful of tokens on a CPU: each distinct expert's weights are read once, in place.

Verification runs one to a dozen tokens through a layer, so most experts get one or two rows and the time should be
that of reading their weights. Two things of transformers' implementations stand in the way on a CPU:

- ``batched_mm`` copies the weights of every (token, expert) pair before it multiplies;
- ``eager`` and ``grouped_mm`` call a GEMV (or a narrow GEMM) with the rows on the left. For a float32 weight with
  short rows, such as a gate-and-up projection ``[6144, 128]``, MKL then reaches 6.6 GB/s where the memory gives 31.
  With the weight on the left and at least two columns it takes 0.19 instead of 0.49 ms.

Which is fastest depends on the processor: `ecospec.decoding.experts_choice` measures it, ``docs/results/step_time``
compares all. On an accelerator and with expert parallelism this implementation hands over to ``grouped_mm``: there
nothing may wait for the host. It is differentiable, but meant for inference.

Shapes: M tokens, K experts per token, S = M * K (token, expert) pairs, H hidden, I expert FFN width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMPLEMENTATION = "ecospec_grouped"

# float32, one thread, Zen 4 with MKL, milliseconds for 1 / 2 / 4 / 8 rows, rows left -> weight left:
#   [6144,  128]  0.50 0.55 0.58 0.66 -> 0.24 0.19 0.25 0.44
#   [6144,  512]  1.39 2.38 2.01 2.08 -> 0.68 0.61 1.11 1.56
#   [2048,  768]  0.55 0.73 0.69 0.76 -> 0.36 0.32 0.40 1.15
#   [1536, 2048]  0.76 1.25 1.20 1.47 -> 0.99 0.90 1.85 2.66
# and bfloat16 never gains.
_SHORT_ROW = 512
_FEW_ROWS = 8


def linear_few_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply as ``F.linear`` does, with the faster operand order for few rows and a weight with short rows.

    Args:
        rows: ``[M, in]``.
        weight: ``[out, in]``, same dtype and device.

    Returns:
        ``[M, out]``.

    >>> rows, weight = torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> linear_few_rows(rows, weight).tolist()
    [[3.0, 7.0, 11.0]]
    """
    size = rows.shape[0]
    out_features, in_features = weight.shape
    short = in_features <= _SHORT_ROW and out_features > in_features and weight.dtype == torch.float32
    if not short or size > _FEW_ROWS or weight.device.type != "cpu":
        return F.linear(rows, weight)
    if size == 1:  # two columns make it a GEMM, which is faster than the GEMV that one column would become
        return (weight @ rows.repeat(2, 1).t())[:, 0][None]
    return (weight @ rows.t()).t()


def grouped_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts; the signature is that of transformers' experts interface.

    Args:
        self: An experts module of that interface.
        hidden_states: ``[M, H]``.
        top_k_index: int ``[M, K]``.
        top_k_weights: ``[M, K]``.

    Returns:
        ``[M, H]``, each token's expert outputs weighted and added.
    """
    module = cast("Any", self)
    if hidden_states.device.type != "cpu" or module._is_expert_parallel:  # noqa: SLF001
        from transformers.integrations.moe import grouped_mm_experts_forward  # noqa: PLC0415 - torch is enough here

        return cast("Tensor", grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights))
    tokens, top_k = top_k_index.shape
    expert_ids, order = top_k_index.reshape(-1).sort(stable=True)
    experts, counts = torch.unique_consecutive(expert_ids, return_counts=True)
    rows = hidden_states.index_select(0, order // top_k)
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    groups = list(zip(experts.tolist(), counts.tolist(), strict=True))  # on a CPU no wait
    inner = _project(module, up_name, rows, groups)
    # Contiguous rows: a transposed left operand makes the down-projection five times slower.
    inner = (module._apply_gate(inner) if module.has_gate else module.act_fn(inner)).contiguous()  # noqa: SLF001
    outer = _project(module, "down_proj", inner, groups)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    outer = outer * top_k_weights.reshape(-1).index_select(0, order)[:, None]
    by_token = torch.empty_like(outer).index_copy_(0, order, outer)
    return by_token.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _project(module: Any, name: str, rows: Tensor, groups: list[tuple[int, int]]) -> Tensor:
    """Apply one projection to rows sorted by expert.

    Args:
        module: The experts module.
        name: ``gate_up_proj``, ``up_proj`` or ``down_proj``.
        rows: ``[S, in]``.
        groups: (expert, number of its rows), in the order of the rows.

    Returns:
        ``[S, out]``.
    """
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    parts = []
    for (expert, _), part in zip(groups, torch.split(rows, [count for _, count in groups]), strict=True):
        matrix = weight[expert]
        product = part @ matrix if module.is_transposed else linear_few_rows(part, matrix)
        parts.append(product if bias is None else product + bias[expert])
    return torch.cat(parts)


def register_grouped_experts() -> None:
    """Make this implementation known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - torch is enough here

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts_forward)


def use_grouped_experts(model: nn.Module) -> str:
    """Switch a model on a CPU to this implementation; elsewhere its own stays.

    Args:
        model: A transformers model.

    Returns:
        The name of the implementation now in use.

    Raises:
        ValueError: The model does not follow transformers' experts interface.
    """
    target = cast("Any", model)
    if target.device.type != "cpu":
        return str(target.config._experts_implementation)  # noqa: SLF001
    register_grouped_experts()
    if not target._can_set_experts_implementation():  # noqa: SLF001
        raise ValueError(
            f"{type(model).__name__} does not follow transformers' experts interface; leave its experts as they are"
        )
    target.set_experts_implementation(IMPLEMENTATION)
    return IMPLEMENTATION
