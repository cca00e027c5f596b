"""Exact laws: run a sampler with all random choices enumerated, and compare with its stated law.

This module is public, also for samplers outside this package:

    engine = TabularEngine(TabularModel(vocab_size=3, stop_ids=(0,)))
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, horizon, key)).trajectory)
    target = power_target(engine, horizon, alpha, sampler.law(), sampler.source())
    error = invariance_error(transition_matrix(engine, sampler, horizon, target), target)
"""

from dflash_mcmc.testing.enumeration import (
    EnumeratedChance,
    EnumeratedKey,
    Enumerator,
    UnknownLogUniform,
    UnknownUniform,
    law_of,
    mean_of,
)
from dflash_mcmc.testing.targets import (
    PROMPT,
    Kernel,
    Target,
    balance_error,
    invariance_error,
    power_target,
    product_target,
    score,
    total_variation,
    transition_matrix,
)

__all__ = (
    "PROMPT",
    "EnumeratedChance",
    "EnumeratedKey",
    "Enumerator",
    "Kernel",
    "Target",
    "UnknownLogUniform",
    "UnknownUniform",
    "balance_error",
    "invariance_error",
    "law_of",
    "mean_of",
    "power_target",
    "product_target",
    "score",
    "total_variation",
    "transition_matrix",
)
