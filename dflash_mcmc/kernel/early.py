"""Early rejection of sequences (Solonen et al. 2012): a proposal is abandoned once it cannot be accepted any more."""

from __future__ import annotations

from dflash_mcmc.ops import SamplingParams

_EQUAL = 1e-12
"""Rounding of a temperature that is given as 1/alpha."""


def why_lengths_matter(alpha: float) -> str:
    """Why no bound on the weight of a growing suffix is known; empty where one is.

    The exponential of alpha * log p - log q has a mean of at most 1 under every q if alpha >= 1 (a supermartingale: Ville's
    inequality).
    """
    return f"weights grow with length at alpha={alpha:g} (below 1)" if alpha < 1.0 else ""


def why_weights_rise(alpha: float, law: SamplingParams) -> str:
    """Why the weight of a suffix may rise as it grows, so that early rejection is not exact; empty if it never rises.

    Exact early rejection needs alpha * log p - log q to be at most 0 for every token. This holds if q is p^(1/temperature),
    with 1/alpha <= temperature <= 1, on a support that depends on the prefix alone.
    """
    if alpha < 1.0:
        return why_lengths_matter(alpha)
    if not 1.0 / alpha - _EQUAL <= law.temperature <= 1.0:
        return f"the proposal's temperature {law.temperature:g} is not between 1/alpha={1 / alpha:g} and 1"
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    on = [name for name in penalties if getattr(law, name) != getattr(SamplingParams(), name)]
    return f"sampler.{on[0]} makes the proposal another law than p^(1/temperature)" if on else ""
