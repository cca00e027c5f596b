"""Cases of a parametrised test, of which a few are run by default and all by `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def quick(cases: Iterable, *chosen: object) -> list:
    """The cases. Those that are not among the chosen ones, which are cases or their first values, are slow."""
    def is_chosen(case: object) -> bool:
        return case in chosen or (isinstance(case, tuple) and case[0] in chosen)

    cases = list(cases)
    missing = [one for one in chosen if not any(case == one or (isinstance(case, tuple) and case[0] == one) for case in cases)]
    assert not missing, f"no such case: {missing}"
    return [case if is_chosen(case) else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
            for case in cases]
