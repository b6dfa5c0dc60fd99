"""Names a user chooses from: one message for all of them, with the nearest that exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def require_choice(what: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse a name that does not exist.

    Args:
        what: What is named, e.g. ``"objective"``.
        value: What was given.
        allowed: What there is.

    Raises:
        ValueError: It is none of them; the message says the nearest.

    >>> require_choice("objective", "bse", ["cross_entropy", "bce"])
    Traceback (most recent call last):
    ...
    ValueError: unknown objective 'bse'; did you mean 'bce'? allowed: cross_entropy, bce
    """
    names = list(allowed)
    if value in names:
        return
    near = get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {what} {value!r}; {hint}allowed: {', '.join(names)}")
