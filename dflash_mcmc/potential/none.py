"""No potential: the target is that of the sampler."""

from dataclasses import dataclass

from dflash_mcmc.components import Settings, register
from dflash_mcmc.potential import Evaluator, Potential


@register("potential", "none")
@dataclass(slots=True, kw_only=True)
class NoPotential(Potential):
    """The target is that of the sampler."""

    is_null = True

    def start(self, config: Settings) -> Evaluator:
        """Rates every text 0."""
        return Evaluator(lambda problem, text: 0.0)
