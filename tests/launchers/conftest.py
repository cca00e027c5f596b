"""The cluster that the tests of the SLURM launcher share, and a line with the reason if these tests are skipped."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.launchers.cluster import Cluster
from tests.launchers.cluster_packages import CannotInstall
from tests.launchers.cluster_settings import KILL_OVER_MEMORY

SKIPPED = "SLURM cannot be installed here"


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test that uses the cluster, so that none of them runs in parallel with others."""
    for item in items:
        if "slurm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A cluster of 4 nodes with 2 CPUs, shared by all tests. Every node is idle when a test starts."""
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(nodes=4, cpus=2, extra_lines=KILL_OVER_MEMORY))
        except CannotInstall as error:
            pytest.skip(f"{SKIPPED}: {error}: the tests of the SLURM launcher are skipped")
        yield cluster


@pytest.fixture(autouse=True)
def _reset(request: pytest.FixtureRequest) -> Iterator[None]:
    """Resets the cluster after each test, so that a failed test leaves no job and no node down."""
    yield
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a line if tests were skipped, because a letter in pytest's output is easily missed."""
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
        if SKIPPED in reason:
            terminalreporter.write_line(reason.removeprefix("Skipped: "), red=True, bold=True)
            return


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option for the seed of fault campaigns."""
    parser.addoption("--faults-seed", type=int, default=0, help="of the faults that tests/launchers/test_faults.py injects")
