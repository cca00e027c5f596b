"""Texts that contain a pattern."""

import re
from dataclasses import dataclass

from dflash_mcmc.components import MISSING, Settings, identity, register
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.potential import Evaluator, Factor

_LONGEST = 100_000
"""Characters of a text that are searched."""


@register("potential", "regex")
@dataclass(slots=True, kw_only=True)
class RegexPotential(Factor):
    """r is 1 for an answer in which the pattern is found, else 0. With a negative beta such answers are rarer."""

    pattern: str = identity(MISSING, "regular expression of Python, which is searched in the answer")

    bounds = (0.0, 1.0)

    def check(self, config: Settings) -> None:
        """Raises ConfigError for a pattern that does not compile, in addition to the checks of every potential."""
        super().check(config)
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError("potential.pattern", self.pattern, f"a regular expression of Python: {error}") from error

    def start(self, config: Settings) -> Evaluator:
        found = re.compile(self.pattern).search
        return Evaluator(lambda problem, text: float(found(text[:_LONGEST]) is not None), self.on_failure)
