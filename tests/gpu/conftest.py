"""The device of these tests: a GPU. Elsewhere they are skipped, with one line.

`--gpu-tests-on=cpu` runs them on a CPU, except those of CUDA graphs and of a GPU's memory. So their code can be checked
without a GPU.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from dflash_mcmc.chains import build
from dflash_mcmc.config.schema import Config
from dflash_mcmc.types import ChainResult

ANSWERS = ("dataset=arith", "dataset.limit=24", "dataset.max_new_tokens=64", "num_chains=1")


NO_GPU = "PyTorch finds no GPU here; --gpu-tests-on=cpu checks the tests' own code"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu-tests-on") == "cuda" and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for all skipped tests; pytest's own summary has one for each place."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of a GPU are skipped: {NO_GPU}")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """PyTorch's number of threads stays: an embedded model is loaded with one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device(request) -> str:
    return request.config.getoption("--gpu-tests-on")


@pytest.fixture
def on_gpu(device) -> None:
    """Skips a test of what only a GPU has."""
    if device != "cuda":
        pytest.skip("only a GPU has this")


@pytest.fixture
def draw(make_config) -> Callable[..., dict[str, ChainResult]]:
    """A function from overrides to the chains of 24 problems, by problem."""

    def drawn(*overrides: str) -> dict[str, ChainResult]:
        config: Config = make_config(*ANSWERS, *overrides)
        problems = config.dataset.problems()
        model = config.engine.load(config, config.hardware.found())
        prompts = build.prompts(config, model, problems)
        engine = config.engine.start(config, model, max(map(len, prompts.values())), len(problems))
        chains = ((problem.id, build.chain(config, config.sampler, problem.id, 0, prompts[problem.id], model))
                  for problem in problems)
        return {done.tag: done.result for done in engine.run(chains)}

    return drawn
