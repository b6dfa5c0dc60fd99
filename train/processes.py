"""What the processes of one training run agree on: who is first, sums and maxima over all, weights they share.

Lightning starts the processes and averages gradients over them; the functions here are for what it leaves open.
Where there is one process only, each returns what it was given.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")

#: Set by Lightning's own launcher, torchrun and SLURM.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process(processes: int) -> bool:
    """Whether this process makes and prints what a run makes and prints once.

    Args:
        processes: Processes of the run. Of a run of one, the only process is the first, whatever a launcher of
            several such runs left in the environment.
    """
    return processes == 1 or all(int(os.environ.get(name) or 0) == 0 for name in _RANKS)


def several() -> bool:
    """Whether this run has several processes, and they are connected."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def summed(value: Tensor) -> Tensor:
    """Sum over processes, the same on each; ``value`` itself is left as it is."""
    return _reduced(value, dist.ReduceOp.SUM) if several() else value


def largest(value: Tensor) -> Tensor:
    """Maximum over processes, the same on each; ``value`` itself is left as it is."""
    return _reduced(value, dist.ReduceOp.MAX) if several() else value


def _reduced(value: Tensor, operation: Any) -> Tensor:
    result = value.detach().clone()
    dist.all_reduce(result, op=operation)
    return result


def of_first(value: T) -> T:
    """What the first process has."""
    if not several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def mean_over_tokens(loss: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over the counted tokens of all processes.

    Args:
        loss: Scalar, mean over this process's counted tokens; without a gradient.
        tokens: Scalar, their number; perhaps 0.

    Returns:
        The mean over all, and the number of all.
    """
    if not several():
        return loss, tokens
    total = summed(torch.stack([loss.double() * tokens, tokens.double()]))
    return (total[0] / total[1].clamp_min(1)).to(loss.dtype), total[1]


def share_weights(model: nn.Module, layers: nn.ModuleList | None, mesh: Any) -> None:
    """Divide a network's weights over the processes of a mesh (FSDP2), layer by layer.

    Args:
        model: The network; its parameters become DTensors in place.
        layers: Repeated layers in it, gathered one at a time when they compute; None gathers all at once.
        mesh: One-dimensional device mesh.
    """
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - loads much that one process does not need

    for layer in layers or ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def lost_process(error: BaseException) -> bool:
    """Whether an error says that another process of the run is gone."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    signs = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
