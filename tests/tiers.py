"""Which cases of a matrix the default run plays: representatives, the others are marked `long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def representatives(every: Iterable[Any], *chosen: Any) -> list[Any]:
    """Values for `parametrize`; a tuple is a case of several. Raises ValueError for a chosen one that isn't there."""
    every = list(every)
    if missing := [case for case in chosen if case not in every]:
        raise ValueError(f"no cases: {missing}")
    return [case if case in chosen else _long(*case if isinstance(case, tuple) else (case,)) for case in every]


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
