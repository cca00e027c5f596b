"""One pool for all tests that do not change it, because its processes take seconds to start."""

from collections.abc import Iterator

import pytest

from dflash_mcmc.grading.math.pool import MathPool


@pytest.fixture(scope="session")
def math_pool() -> Iterator[MathPool]:
    """A pool of one process with 4 GiB and a limit of 8 s per answer."""
    started = MathPool(timeout_seconds=8, memory_gib=4, num_workers=1)
    started.submit(0, r"\boxed{2/4}", r"\frac12")  # starts its processes and threads now, not within a test
    list(started.finished(wait=True))
    yield started
    started.close()
