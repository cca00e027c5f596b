"""Cases of a parametrised test, of which a few are run by default and all by `make test-slow`."""

from collections.abc import Iterable

import pytest


def quick(cases: Iterable, *chosen: object) -> list:
    """The cases. Those that are not among the chosen ones, which are cases or their first values, are slow."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert all(any(one in (case, case[0]) for case in cases) for one in chosen), "a chosen case is none of the cases"
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in chosen and case[0] not in chosen)) for case in cases]
