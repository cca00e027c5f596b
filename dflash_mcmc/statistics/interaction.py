"""The interaction of two switches: whether a blend helps more with one sampler than with another."""

from __future__ import annotations

from typing import NamedTuple

from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import PairedOutcomes
from dflash_mcmc.statistics.paired import mean_difference
from dflash_mcmc.statistics.shares import accuracy_of, mean_share


class Interaction(NamedTuple):
    """A two-by-two table. The name of a cell has two digits: blend off or on, then sampler off or on."""

    cells: dict[str, IntervalEstimate]
    """Accuracies of `00`, `01`, `10` and `11`. Each problem counts once, here and in `effect`."""
    effect: IntervalEstimate
    """(11 - 10) - (01 - 00): the sampler's gain with the blend minus its gain without the blend; 0 if both effects add up."""


def two_by_two(o00: PairedOutcomes, o01: PairedOutcomes, o10: PairedOutcomes, o11: PairedOutcomes) -> Interaction:
    """The interaction, with the interval of `paired.mean_difference` over problems, each with all four runs.

    Raises ValueError if the runs are not on the same problems in the same order, or have no problems.
    """
    runs = {"00": o00, "01": o01, "10": o10, "11": o11}
    if len({of.problems for of in runs.values()}) > 1:
        raise ValueError("the runs are not on the same problems in the same order: see outcomes.aligned")
    if not o00.problems:
        raise ValueError("the runs have no problem in common, so they cannot be compared")
    chains = int(min(of.chains.min() for of in runs.values()))
    effect = mean_difference((o11.correct - o10.correct) - (o01.correct - o00.correct), chains, widest=2.0)
    cells = {name: accuracy_of(of) if of.single else mean_share(of.correct) for name, of in runs.items()}
    return Interaction(cells, effect)
