"""When speculation pays on this machine: steps of blocks and plain steps, timed, by temperature and number of drafted tokens.

A block costs a forward of the target over more tokens, and the draft. With many chains, or at a high temperature, it can cost
more than the tokens that it gains. Break-even is the tau at which both are equally fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tabulate import tabulate

from dflash_mcmc.draft import Draft
from dflash_mcmc.draft.check import forced
from dflash_mcmc.process import bars

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter

TEMPERATURES = (0.0, 1.0)
_TURNS = 2
"""Each case is drawn so often, and the fastest counts: other programs only make it slower."""


class Pace(NamedTuple):
    """Blocks of a size at a temperature, against plain decoding of the same problems."""

    temperature: float
    num_drafted: int
    tau: float
    """Tokens for each forward of the target."""
    break_even: float
    """The time of a chain's step with a block over that of a plain step."""

    @property
    def gain(self) -> float:
        """The rate of tokens over that of plain decoding."""
        return self.tau / self.break_even


def measure(config: Config) -> list[Pace]:
    """Draws the configuration's problems plainly and with blocks of each size, as many chains at once as it has slots.

    The configuration has a decoder with a draft and `trace`. Raises UserError for an answer that cannot be drawn.
    """
    model = config.model.load(config.hardware.resolve())
    drafter = config.draft.load(model)
    assert drafter is not None
    prompts = forced.prompts_of(config, model)
    drafts, paces = list(_sizes(config.draft, drafter.num_drafted)), list[Pace]()
    with bars.Bar(len(TEMPERATURES) * (1 + len(drafts)) * _TURNS * len(prompts), "answer", "drafts speed") as bar:
        for temperature in TEMPERATURES:
            timed = partial(_timed, config, model, prompts, temperature, bar.update)
            _, plain = timed(None)
            for draft in drafts:
                drafter = draft.load(model)
                tau, seconds = timed(drafter)
                paces.append(Pace(temperature, 0 if drafter is None else drafter.num_drafted, tau, seconds / plain))
    return paces


def text(paces: Sequence[Pace]) -> str:
    """A table, and for each temperature whether to speculate."""
    rows = [[f"{each.temperature:g}", each.num_drafted, f"{each.tau:.2f}", f"{each.break_even:.2f}", f"{each.gain:.2f}"]
            for each in paces]
    table = tabulate(rows, ["temperature", "drafted tokens", "tau", "break-even tau", "rate / plain"], "github",
                     disable_numparse=True)
    return "\n".join([table, "", *map(advice, (max((each for each in paces if each.temperature == temperature),
                                                   key=lambda each: each.gain) for temperature in TEMPERATURES))])


def advice(best: Pace) -> str:
    """Whether to speculate at the temperature of the best number of drafted tokens, as a sentence."""
    facts = f"{best.num_drafted} drafted tokens, tau {best.tau:.2f}, break-even {best.break_even:.2f}"
    if best.gain > 1.0:
        return f"temperature {best.temperature:g}: speculate, {best.gain:.2f} times as fast as plain decoding ({facts})"
    return (f"temperature {best.temperature:g}: do not speculate (decoder=plain): the best block has {best.gain:.2f} times "
            f"the rate of plain decoding ({facts})")


def _sizes(draft: Draft, most: int) -> Iterator[Draft]:
    """The draft with 1, 3, 7, ... and all drafted tokens where its fields allow another number, else the draft alone."""
    names = {field.name for field in dataclasses.fields(draft)}  # type: ignore[arg-type]
    field, anchors = ("num_drafted", 0) if "num_drafted" in names else ("block_size", 1)
    counts = [2**power - 1 for power in range(1, most.bit_length() + 1) if 2**power - 1 < most] if field in names else []
    yield from (dataclasses.replace(draft, **{field: count + anchors}) for count in counts)  # type: ignore[type-var]
    yield draft


def _timed(config: Config, model: LanguageModel, prompts: dict[str, np.ndarray], temperature: float,
           step: Callable[[], object], drafter: Drafter | None) -> tuple[float, float]:
    """tau, and the seconds of a chain's step. `step` is called after each answer."""
    engine, fastest, tau = forced.engine_of(config, model, drafter, prompts), np.inf, 1.0
    for _ in range(_TURNS):
        engine.reset_counters()
        gained: list[int] = []
        for walk in forced.answers(engine, config, prompts, temperature):
            gained += walk.gained
            step()
        fastest, tau = min(fastest, engine.counters.step_seconds / len(gained)), float(np.mean(gained))
    return tau, fastest
