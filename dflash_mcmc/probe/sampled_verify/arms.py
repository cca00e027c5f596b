"""The decoders that are compared, the workloads, and how generations are drawn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.process import ranks
from dflash_mcmc.rng import Key
from dflash_mcmc.runner import build

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.speculation import Speculation
    from dflash_mcmc.probe import Unit
    from dflash_mcmc.sampler import Sampler

PLAIN, SAME_KEY, MATCH = "plain", "same_key", "speculative_match"
SHORT, LONG, AGENT = "short", "long", "agent"


class GenerationTask(NamedTuple):
    """The generations of one unit."""

    unit: Unit
    workload: str
    prompt: np.ndarray
    """int64 (length,)."""
    horizon: int


class Arm(NamedTuple):
    """A decoder in the comparison."""

    name: str
    """`plain`, `speculative_match`, `same_key` (speculative_match with the keys of plain), or a fault."""

    @property
    def fault(self) -> str | None:
        """The name of the fault; None for a correct decoder."""
        return None if self.name in (PLAIN, SAME_KEY, MATCH) else self.name

    def key(self, seed: int, unit: Unit, temperature: float) -> Key:
        """The key of a generation. All arms have keys of their own, except `same_key`, which has those of `plain`."""
        name = PLAIN if self.name == SAME_KEY else self.name
        return Key(seed).fold_in("sampled_verify", name, f"{temperature:g}", unit.problem, unit.chain)

    def speculation(self, drafter: Drafter | None, draft_temperature: float, window: int) -> Speculation | None:
        """The rule, for an engine; None for `plain`."""
        if self.name == PLAIN:
            return None
        from dflash_mcmc.engine.speculative import rules
        from dflash_mcmc.engine.speculative.speculation import Speculation

        rule, fault = rules.matching(self.fault, window)
        return Speculation(rule, drafter, shared_noise=True, temperature=draft_temperature, noisy=self.fault is not None,
                           fault=fault)


def draw(config: Config, model: LanguageModel, speculation: Speculation | None, sampler: Sampler,
         tasks: Sequence[GenerationTask], keys: Sequence[Key]) -> list[dict]:
    """Draws the generations of all tasks in one batch, and returns a cell of a record for each.

    `seconds` is the time of the batch divided by the number of tasks.
    """
    longest = max(len(task.prompt) for task in tasks)
    total = max(len(task.prompt) + task.horizon for task in tasks)
    sized = dataclasses.replace(config, dataset=dataclasses.replace(config.dataset, max_new_tokens=total - longest))
    engine = build.engine_of(sized, model, longest, len(tasks) * ranks.place().total, None, speculation)
    chains = [(number, sampler.chain(task.prompt, task.horizon, key))
              for number, (task, key) in enumerate(zip(tasks, keys, strict=True))]
    start, cells = time.perf_counter(), dict[int, dict]()
    for done in engine.run(iter(chains)):
        costs = {"target_forwards": done.cost.target_forwards}
        cells[done.tag] = ({"failure": done.failure, **costs} if done.result is None else
                                     {"tokens": done.result.trajectory.tokens.tolist(), **costs})
    seconds = (time.perf_counter() - start) / len(tasks)
    return [{**cells[number], "seconds": seconds} for number in range(len(tasks))]
