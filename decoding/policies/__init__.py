"""Selection policies: which candidates of a draft tree the target verifies.

======================  ==================================================================
``autoregressive``      no drafting, one token a step
``probability``         most probable nodes (EAGLE)
``ecospec``             probability per newly touched predicted expert (arXiv 2607.12696)
``ecospec_static``      the same with the cost of the whole path, an ablation
``evict``               how many, not which: probability order cut by cost (arXiv 2605.00342)
``random``              random prefix-closed set
``ecospec_oracle``      ``ecospec`` with true expert sets; not achievable
======================  ==================================================================
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from ecospec.decoding.policies.autoregressive import Autoregressive
from ecospec.decoding.policies.base import SelectionContext, SelectionPolicy
from ecospec.decoding.policies.ecospec import EcoSpec, EcoSpecOracle, EcoSpecStatic
from ecospec.decoding.policies.evict import Evict
from ecospec.decoding.policies.probability import Probability
from ecospec.decoding.policies.random import Random

#: Every policy by name; a policy's options are the parameters of its class.
POLICIES: dict[str, Callable[..., SelectionPolicy]] = {
    policy.name: policy
    for policy in (Autoregressive, Probability, EcoSpec, EcoSpecStatic, Evict, Random, EcoSpecOracle)
}


def make_policy(name: str, **options: Any) -> SelectionPolicy:
    """Build a policy by name.

    Args:
        name: A key of `POLICIES`.
        options: The policy's own options, e.g. ``epsilon`` for ``ecospec`` or ``mean_curve`` for ``evict``.

    Raises:
        ValueError: The name or an option is unknown, a needed option is missing, or a value is out of range.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown policy {name!r}; {hint}allowed: {', '.join(POLICIES)}")
    parameters = inspect.signature(POLICIES[name]).parameters
    if unknown := sorted(set(options) - set(parameters)):
        raise ValueError(
            f"policy {name!r} has no option {unknown[0]!r}; allowed: {', '.join(parameters) or 'none'}"
        )
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise ValueError(f"policy {name!r} needs the option {option!r}")
    return POLICIES[name](**options)


__all__ = [
    "POLICIES",
    "Autoregressive",
    "EcoSpec",
    "EcoSpecOracle",
    "EcoSpecStatic",
    "Evict",
    "Probability",
    "Random",
    "SelectionContext",
    "SelectionPolicy",
    "make_policy",
]
