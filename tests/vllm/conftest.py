"""Tests with the real vLLM. All are marked `vllm`, run by `make vllm`, and need the second environment that it builds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_mcmc.engine.vllm import core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(autouse=True)
def guard_of_a_test() -> None:
    """Replaces the guard of tests/leaks.py: vLLM changes variables and random states whenever an engine starts."""


@pytest.fixture(autouse=True, scope="module")
def guard_of_a_module() -> None:
    """As `guard_of_a_test`."""


@pytest.fixture(scope="session", autouse=True)
def vllm() -> Iterator[None]:
    """Imports vLLM for the whole session: it changes variables and threads of the process."""
    core.prepare_environment()
    pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
    from vllm.engine import arg_utils  # noqa: F401 - the import that changes the process

    yield
    core.close_shared()
