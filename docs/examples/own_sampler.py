"""A sampler in a package of your own: the better of two draws, by log p.

Run this file, or import it. `docs/howto/index.md`, "A package of your own", makes it an option of the command line.
"""

from dataclasses import dataclass

import dflash_mcmc as dm
from dflash_mcmc.components import identity, register
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.types import ChainResult, Trajectory


@register("sampler", "best_of_two")
@dataclass(slots=True, kw_only=True)
class BestOfTwo(Sampler):
    """The more likely one of two draws at a temperature."""

    temperature: float = identity(1.0, "temperature of the draws", gt=0)

    def chain(self, prompt, horizon, key):
        """Draws twice, each with a key of its own."""
        draws = []
        for number in range(2):
            draws.append((yield Draw(Trajectory.start(prompt), horizon, self.law(), key.fold_in("draw", number))))
        return ChainResult(max(draws, key=lambda drawn: drawn.log_p.sum()))

    def law(self) -> SamplingParams:
        """The sampling parameters of each draw."""
        return SamplingParams(self.temperature)


if __name__ == "__main__":
    tiny, question = dm.component("model", "tiny"), ["Compute 4*(3+2)."]
    one = dm.sample(tiny, None, question, sampler=dm.Temperature(temperature=1), num_chains=8, progress=False)
    two = dm.sample(tiny, None, question, sampler=BestOfTwo(temperature=1), num_chains=8, progress=False)
    for name, samples in (("one draw", one), ("the better of two", two)):
        print(f"{name}: mean log p {sum(sample.log_p for sample in samples) / len(samples):.2f}")
