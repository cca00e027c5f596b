"""What runs will cost, before anything is loaded or written: samples, token-forwards, hours. Behind `dry_run=true`.

A sampler says how many tokens a chain draws, in closed form, for answers of one length (`expected_cost`). What depends on
the model is assumed, and can be given: `assumed.*`. What an earlier run has recorded is not taken off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tabulate import tabulate

from dflash_mcmc.config.sweep import differing
from dflash_mcmc.registry import name_of

if TYPE_CHECKING:
    from dflash_mcmc.config.jobs import Job
    from dflash_mcmc.config.schema import Config

_HEADERS = ("run", "samples", "token-forwards a sample", "token-forwards", "hours")


class ExpectedCost(NamedTuple):
    """What one chain draws on average. Tokens, but for `num_draws`."""

    extended: float
    """Drawn outside proposals."""
    proposed: float = 0.0
    """Of Metropolis-Hastings proposals, each drawn from its cut to its end."""
    scored: float = 0.0
    """Scored without being drawn."""
    num_draws: float = 1.0
    """Draws and scorings, proposals included."""
    prefixes: float = 0.0
    """Generated tokens in front of all those: read again where `hardware.reuse_prefix` is off."""


class CostEstimate(NamedTuple):
    """Of one run. Without numbers where the sampler has no `expected_cost`, or a probe measures in place of sampling."""

    num_samples: int
    """Units, of a probe."""
    token_forwards: float | None
    """Positions that the target is evaluated at, of all samples."""
    hours: float | None

    def times(self, count: int) -> CostEstimate:
        """Of so many runs like this one."""
        return CostEstimate.total([self] * count)

    @staticmethod
    def total(estimates: Sequence[CostEstimate]) -> CostEstimate:
        """Sums; unknown where a part is."""
        return CostEstimate(*(None if None in values else sum(values) for values in zip(*estimates, strict=True)))


def mh_cost(length: float, horizon: int, num_blocks: int, num_steps: int,
            mean_redrawn: Callable[[float, float], float], stops: bool) -> ExpectedCost:
    """Of Metropolis-Hastings block by block, on answers of `length` tokens.

    At stage k of K the state has n_k = min(k * horizon / K, length) tokens, and each of its `num_steps` steps redraws
    `mean_redrawn(n_k, horizon of the stage)` of them: (n_k + 1) / 2 from a cut uniform over the state.

    Args:
        stops: whether the chain ends with the stage in which its answer does.
    """
    block = horizon / num_blocks
    num_stages = min(num_blocks, math.ceil(length / block)) if stops else num_blocks
    states = [(min(stage * block, length), stage * block) for stage in range(1, num_stages + 1)]
    redrawn = [mean_redrawn(state, reach) for state, reach in states]
    num_extensions = min(num_stages, math.ceil(length / block))
    prefixes = num_steps * sum(state - part for (state, _), part in zip(states, redrawn, strict=True))
    return ExpectedCost(length, num_steps * sum(redrawn), 0.0, num_extensions + num_steps * num_stages,
                        prefixes + block * num_extensions * (num_extensions - 1) / 2)


def of(config: Config) -> CostEstimate:
    """The estimate of one run. Loads no model. Raises UserError where the problems cannot be counted."""
    if not config.probe.is_null:
        return CostEstimate(len(config.probe.units(config)), None, None)
    samples, of_one = config.dataset.num_chosen() * config.num_chains, token_forwards(config)
    if of_one is None:
        return CostEstimate(samples, None, None)
    total = samples * of_one
    rate = config.hardware.tokens_per_second or config.assumed.tokens_per_second
    return CostEstimate(samples, total, total / rate / 3600 if rate else None)


def token_forwards(config: Config) -> float | None:
    """Of one sample: its prompt but for the last token, and one for each token that is drawn, as the engine counts.

    Forwards that speculative decoding spends on tokens that are not kept come on top. `hardware.keep_current` is taken to be
    on: without it what a rejected proposal overwrites is read again.
    """
    assumed, horizon = config.assumed, config.dataset.max_new_tokens
    cost = config.sampler.expected_cost(assumed.answer_length * horizon, horizon)
    if cost is None:
        return None
    proposed = cost.proposed
    if config.sampler.rejects_early():
        proposed *= assumed.acceptance + (1.0 - assumed.acceptance) * assumed.abandoned_at
    if config.hardware.skip_identical and not cost.scored:  # what is scored anew is not drawn along the state
        proposed *= 1.0 - assumed.identical
    read = float(assumed.prompt_length - 1)
    if not config.hardware.reuse_prefix:
        read = read * cost.num_draws + cost.prefixes
    return read + cost.extended + proposed + cost.scored


def table(jobs: Sequence[Job], num_trials: int | None = None) -> str:
    """A row for each run that the jobs come to, their total, and what was assumed, as text.

    Args:
        num_trials: of a search, whose points are not known: the dearest of the jobs counts so many times.
    """
    from dflash_mcmc.config.identity import settings_of

    runs: dict[str, tuple[str, Config]] = {}
    for job, label in zip(jobs, differing([job.overrides for job in jobs]), strict=True):
        settings = json.dumps(settings_of(job.config), sort_keys=True, default=str)
        runs.setdefault(settings, (label if len(jobs) > 1 else job.config.label(), job.config))
    estimates = [of(config) for _, config in runs.values()]
    rows = [_row(label, estimate) for (label, _), estimate in zip(runs.values(), estimates, strict=True)]
    if num_trials is not None:
        dearest = max(estimates, key=lambda estimate: estimate.token_forwards or 0.0)
        rows.append(_row(f"{num_trials} trials like the dearest", dearest.times(num_trials)))
    elif len(estimates) > 1:
        rows.append(_row("total", CostEstimate.total(estimates)))
    same = len(jobs) - len(runs)
    notes = [f"points left out, since they are the run of another: {same}" if same else "",
             *dict.fromkeys(line for _, config in runs.values() for line in _notes(config)),
             "dry_run=true: no model was loaded and nothing written; what is recorded already is not taken off"]
    text = tabulate(rows, headers=_HEADERS, tablefmt="github", colalign=("left", *["right"] * (len(_HEADERS) - 1)),
                    disable_numparse=True)
    return "\n".join([text, "", *filter(None, notes)])


def _row(label: str, estimate: CostEstimate) -> list[str]:
    forwards, hours = estimate.token_forwards, estimate.hours
    return [label, f"{estimate.num_samples:,}", "-" if forwards is None else f"{forwards / estimate.num_samples:,.0f}",
            "-" if forwards is None else f"{forwards:,.0f}", "-" if hours is None else f"{hours:,.2f}"]


def _notes(config: Config) -> list[str]:
    """What stands behind the numbers of a run."""
    if not config.probe.is_null:
        return [f"probe={name_of(config.probe)}: counted in {config.probe.unit}s, token-forwards are not known before"]
    assumed, horizon = config.assumed, config.dataset.max_new_tokens
    cost = config.sampler.expected_cost(horizon, horizon)
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


def _hours(config: Config) -> str:
    """What the hours go by."""
    if measured := config.hardware.tokens_per_second:
        return f"hours: at hardware.tokens_per_second={measured:g}"
    if guessed := config.assumed.tokens_per_second:
        return (f"hours: at assumed.tokens_per_second={guessed:g}, a guess; hardware.tokens_per_second of a run on the "
                "machine replaces it")
    return "hours: not known without hardware.tokens_per_second, the token-forwards a second of the machine"
