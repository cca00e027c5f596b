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

from dflash_mcmc.chains import build
from dflash_mcmc.draft import Draft
from dflash_mcmc.drafts.check import engine_of, walked
from dflash_mcmc.process import bars

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter

TEMPERATURES = (0.0, 1.0)
_TURNS = 2
"""Each case is timed so often, and the fastest counts: other programs only make it slower."""


class Pace(NamedTuple):
    """Blocks of a size at a temperature, against plain decoding of the same problems."""

    temperature: float
    num_drafted: int
    tau: float
    """Tokens for each forward of the target."""
    break_even: float
    """The time of a chain's step with a block over that of a plain step."""
    accepted: tuple[float, ...]
    """The share of blocks that kept at least 1, 2, ... drafted tokens."""

    @property
    def gain(self) -> float:
        """The rate of tokens over that of plain decoding."""
        return self.tau / self.break_even


def pace_of(temperature: float, num_drafted: int, gained: Sequence[int], break_even: float) -> Pace:
    """The pace of blocks that gained so many tokens each: the kept drafted ones, and the target's own after them."""
    tokens = np.asarray(gained)
    kept = tuple(float(np.mean(tokens > count)) for count in range(1, num_drafted + 1))
    return Pace(temperature, num_drafted, float(np.mean(tokens)), break_even, kept)


def measure(config: Config) -> list[Pace]:
    """Draws the configuration's problems plainly and with blocks of each size, as many chains at once as it has slots.

    The configuration has a decoder with a draft. Raises UserError for an answer that cannot be drawn.
    """
    model = config.model.load(config.hardware.resolve())
    drafter = config.draft.load(model)
    assert drafter is not None
    prompts = build.prompts(config, model, config.dataset.problems())
    drafters, paces = [*_shorter(config.draft, drafter.num_drafted, model), drafter], list[Pace]()
    with bars.Bar(len(TEMPERATURES) * (1 + len(drafters)) * (1 + _TURNS) * len(prompts), "answer", "drafts speed") as bar:
        for temperature in TEMPERATURES:
            timed = partial(_timed, config, model, prompts, temperature, bar.update)
            _, plain = timed(None)
            for each in drafters:
                gained, seconds = timed(each)
                paces.append(pace_of(temperature, each.num_drafted, gained, seconds / plain))
    return paces


def text(paces: Sequence[Pace]) -> str:
    """A table, and for each temperature whether to speculate."""
    rows = [[f"{each.temperature:g}", each.num_drafted, f"{each.tau:.2f}", f"{each.break_even:.2f}", f"{each.gain:.2f}",
             " ".join(f"{100.0 * share:.0f}" for share in each.accepted)] for each in paces]
    table = tabulate(rows, ["temperature", "drafted tokens", "tau", "break-even tau", "rate / plain", "kept 1, 2, ... (%)"],
                     "github", disable_numparse=True)
    return "\n".join([table, "", *(advice(max((each for each in paces if each.temperature == temperature),
                                              key=lambda each: (each.gain, each.tau)))
                                   for temperature in dict.fromkeys(each.temperature for each in paces))])


def advice(best: Pace) -> str:
    """Whether to speculate at the temperature of the best number of drafted tokens, as a sentence."""
    facts = f"{best.num_drafted} drafted tokens, tau {best.tau:.2f}, break-even {best.break_even:.2f}"
    start = f"temperature {best.temperature:g}: "
    if best.gain > 1.0:
        return f"{start}speculate, {best.gain:.2f} times as fast as plain decoding ({facts})"
    return (f"{start}do not speculate (decoder=plain): the best block has {best.gain:.2f} times "
            f"the rate of plain decoding ({facts})")


def _shorter(draft: Draft, most: int, model: LanguageModel) -> Iterator[Drafter]:
    """The drafters of 1, 3, 7, ... tokens, below `most`, where the draft's fields allow another number."""
    names = {field.name for field in dataclasses.fields(draft)}  # type: ignore[arg-type]
    field, anchors = ("num_drafted", 0) if "num_drafted" in names else ("block_size", 1)
    for count in (2**power - 1 for power in range(1, most.bit_length() + 1) if 2**power - 1 < most and field in names):
        shorter = dataclasses.replace(draft, **{field: count + anchors}).load(model)  # type: ignore[type-var]
        assert shorter is not None
        yield shorter


def _timed(config: Config, model: LanguageModel, prompts: dict[str, np.ndarray], temperature: float,
           step: Callable[[], object], drafter: Drafter | None) -> tuple[list[int], float]:
    """The tokens that each step gave, and the seconds of a chain's step. `step` is called after each answer.

    A trace takes time and rules out CUDA graphs: one turn with it gives the tokens, and others without it the seconds.
    """
    gained, fastest = list[int](), np.inf
    for walk in walked(engine_of(config, model, drafter, prompts), config, prompts, temperature):
        gained += walk.gained
        step()
    engine = engine_of(config, model, drafter, prompts, trace=False)
    for _ in range(_TURNS):
        engine.reset_counters()
        for _ in walked(engine, config, prompts, temperature):
            step()
        fastest = min(fastest, engine.counters.step_seconds / engine.counters.row_steps)
    return gained, fastest
