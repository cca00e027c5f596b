"""The expected cost of a run of samples: token-forwards and hours.

A sampler gives the expected cost of a chain in closed form, for answers of one length (`expected_cost`). Values that
depend on the model are assumed and can be configured: `assumed.*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.registry import name_of

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.types import ExpectedCost


class CostEstimate(NamedTuple):
    """The expected cost of one run. Costs are None if the sampler has no `expected_cost`, and for units of a probe."""

    num_samples: int
    """Samples, or units of a probe."""
    token_forwards: float | None
    """Positions at which the target is evaluated, over all samples."""
    hours: float | None

    def times(self, count: int) -> CostEstimate:
        """The cost of `count` runs like this one."""
        return CostEstimate.total([self] * count)

    @staticmethod
    def total(estimates: Sequence[CostEstimate]) -> CostEstimate:
        """The sums; None if a part is None."""
        return CostEstimate(sum(one.num_samples for one in estimates), _sum([one.token_forwards for one in estimates]),
                            _sum([one.hours for one in estimates]))


def estimate(config: Config) -> CostEstimate:
    """The cost of a run of samples. Loads no model. Raises UserError if the problems cannot be counted."""
    samples = config.dataset.num_chosen() * config.num_chains
    forwards = token_forwards(config)
    if forwards is None:
        return CostEstimate(samples, None, None)
    total = samples * forwards
    rate = config.hardware.tokens_per_second or config.assumed.tokens_per_second
    return CostEstimate(samples, total, total / rate / 3600 if rate else None)


def token_forwards(config: Config) -> float | None:
    """Token-forwards of one sample: its prompt except the last token, and one for each drawn token, as the engine counts.

    None if the sampler has no `expected_cost`. Forwards that speculative decoding spends on tokens that are not kept are not
    included. The estimate assumes that `hardware.keep_current` is on; without it the engine also reads again what a rejected
    proposal has overwritten.
    """
    assumed = config.assumed
    cost = _expected(config, assumed.answer_length * config.dataset.max_new_tokens)
    if cost is None:
        return None
    proposed = cost.proposed
    if config.sampler.rejects_early():
        proposed *= assumed.acceptance + (1.0 - assumed.acceptance) * assumed.abandoned_at
    if config.hardware.skip_identical and not cost.scored:  # tokens of a path that is scored are never skipped
        proposed *= 1.0 - assumed.identical
    read = float(assumed.prompt_length - 1)
    if not config.hardware.reuse_prefix:
        read = read * cost.num_draws + cost.prefixes
    return read + cost.extended + proposed + cost.scored


def assumptions(config: Config) -> list[str]:
    """The lines that explain the estimate of a run of samples."""
    assumed, horizon = config.assumed, config.dataset.max_new_tokens
    cost = _expected(config, horizon)
    if cost is None:
        return [f"sampler={name_of(config.sampler)}: token-forwards are not known before"]
    notes = [f"assumed: prompts of {assumed.prompt_length} tokens, answers of {assumed.answer_length * horizon:.0f} "
             f"(assumed.answer_length={assumed.answer_length:g} of dataset.max_new_tokens={horizon})"]
    if cost.proposed:
        notes.append(f"assumed of proposals: acceptance={assumed.acceptance:g}, identical={assumed.identical:g} of the tokens "
                     f"skipped, abandoned_at={assumed.abandoned_at:g} of a proposal that is rejected early")
    if not config.decoder.is_null:
        notes.append(f"decoder={name_of(config.decoder)}: counted as plain; drafted tokens that are not kept come on top")
    return [*notes, _hours(config)]


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None if a value is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _expected(config: Config, length: float) -> ExpectedCost | None:
    return config.sampler.expected_cost(length, config.dataset.max_new_tokens)


def _hours(config: Config) -> str:
    """The line about the rate that the hours are computed with."""
    if measured := config.hardware.tokens_per_second:
        return f"hours: at hardware.tokens_per_second={measured:g}"
    if guessed := config.assumed.tokens_per_second:
        return (f"hours: at assumed.tokens_per_second={guessed:g}, a guess; hardware.tokens_per_second of a run on the "
                "machine replaces it")
    return "hours: not known without hardware.tokens_per_second, the token-forwards a second of the machine"
