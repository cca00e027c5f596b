"""Potentials: a further factor exp(beta r(x)) of a sampler's target, from what is known of an answer x.

The target of a sampler is then p(x)^alpha exp(beta r(x)), x a complete answer: one that has ended, or has
dataset.max_new_tokens tokens. An unfinished text, of an earlier stage or block, has r = 0. `ops.tilted` puts the factor into
every weight.

r is computed beside the engine, once for each text of a problem. Where it fails (an exception, the time limit, no number) it
is `on_failure`, and the failure is counted.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from dflash_mcmc.components import Component, Need, Settings, identity, name_of
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.ops import Evaluated
from dflash_mcmc.types import Problem

Rating = Callable[["Problem", str], float]


class Evaluator:
    """Computes r of texts in threads of its own, once for each text of a problem.

    Args:
        rate: r of a text that answers a problem. It raises an Exception where it fails.
        on_failure: r of a text for which `rate` fails.
        num_workers: texts at once.
        close: ends what `rate` uses.
    """

    def __init__(self, rate: Rating, on_failure: float = 0.0, num_workers: int = 1, close: Callable[[], None] = lambda: None):
        self._rate, self._on_failure, self._close = rate, on_failure, close
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="potential")
        self._known: dict[tuple[str, str], Future[Evaluated]] = {}

    def submit(self, problem: Problem, text: str) -> Future[Evaluated]:
        """Begins to compute r of a text, or gives what is known of it. The future raises UserError if nothing can be rated."""
        name = problem.id, text
        if name not in self._known:
            self._known[name] = self._threads.submit(self._evaluated, problem, text)
        return self._known[name]

    def _evaluated(self, problem: Problem, text: str) -> Evaluated:
        began, value = time.perf_counter(), math.nan
        try:
            value = float(self._rate(problem, text))
        except UserError:
            raise
        except Exception:  # the user's function may raise anything
            pass
        failed = not math.isfinite(value)
        return Evaluated(self._on_failure if failed else value, time.perf_counter() - began, failed)

    def close(self) -> None:
        """Waits for the texts that are being rated, and ends the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._close()


class Potential(Component):
    """Base class of potentials."""

    __slots__ = ()

    group = "potential"
    bounds: ClassVar[tuple[float, float] | None] = None
    """The smallest and the largest r; None where they are not known."""
    beta: float
    stop_at_max: bool

    @abstractmethod
    def start(self, config: Settings) -> Evaluator:
        """What computes r. Raises UserError if nothing can be rated as configured."""

    def remarks(self, problems: Sequence[Problem]) -> list[str]:
        """What a plan says of the potential on these problems."""
        summary = (type(self).__doc__ or "").partition("\n")[0]
        return [f"potential={name_of(self)}: {summary} About one call for each answer that a chain weighs."]


@dataclass(kw_only=True)
class Factor(Potential):
    """Base class of potentials that change a target. A leaf defines `start`, and `bounds` where r is bounded."""

    __slots__ = ()

    beta: float = identity(1.0, "weight of the potential: the target is p^alpha exp(beta r)")
    on_failure: float = identity(0.0, "r of an answer for which the potential fails")
    stop_at_max: bool = identity(False, "whether a chain ends with the first answer of the largest r, and draws one answer "
                                 "after another; its law is not that of the target")

    needs: ClassVar[tuple[Need, ...]] = (
        Need("sampler.takes_potential"), Need("probe.is_null"), Need("engine.takes_potential"))

    def check(self, config: Settings) -> None:
        """Raises ConfigError for r without the bound that a field needs."""
        name = name_of(self)
        if self.stop_at_max and self.bounds is None:
            raise ConfigError("potential.stop_at_max", True, f"false with potential={name}, whose largest value is not known")
        low, high = self.bounds or (-math.inf, math.inf)
        if not low <= self.on_failure <= high:
            raise ConfigError("potential.on_failure", self.on_failure, f"a number from {low:g} to {high:g} with "
                              f"potential={name}")
