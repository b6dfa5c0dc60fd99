"""True expert sets of all candidates of a draft tree, by an extra forward of the target.

Not achievable in practice: it runs the very forward that selection is meant to make cheaper. It bounds what a
perfect predictor could reach, so its time is measured apart and left out of a step's total.
"""

from __future__ import annotations

from torch import Tensor

from ecospec.decoding.target import TargetSession
from ecospec.decoding.tree import DraftTree


def true_experts(session: TargetSession, tree: DraftTree) -> Tensor:
    """Run the target over the whole tree, then forget it.

    A node's experts depend on its path alone, so they are the ones it has in any tree that contains the path.

    Args:
        session: Records experts; its context is unchanged afterwards.
        tree: N nodes, root included.

    Returns:
        int64 ``[N, L, K]``, ids ascending within a layer.
    """
    output = session.verify(tree)
    session.keep([])
    assert output.experts is not None, "the session must record experts"
    return output.experts
