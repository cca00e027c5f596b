"""A sample, as Python programs get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.store import finishes
from dflash_mcmc.types import ChainResult, Cost, Trajectory

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.engine.batching.interface import ChainTarget, Finished
    from dflash_mcmc.runner.fitting import TooLong


class Sample(NamedTuple):
    """The result of one chain."""

    prompt: int
    """Index of the prompt in the order given."""
    id: str
    """Name of the prompt, which the randomness depends on."""
    chain: int
    text: str
    """Generated text without special tokens, up to a string of `stop`."""
    tokens: list[int]
    """Generated token ids, with all tokens of a stop string."""
    log_p: float
    """Log probability of the tokens under the (blended) target at temperature 1, in nats."""
    log_q: float
    """Log probability of the tokens under the sampling parameters that they were drawn with, in nats."""
    proposals: int
    """Metropolis-Hastings proposals."""
    accepted: int
    """Accepted proposals."""
    moved: int
    """Accepted proposals that differ from the sequence they replace."""
    cost: Cost
    """Tokens and forward passes that the chain used."""
    finish_reason: str
    """Why the sequence ended: `stop_id` = with a stop id of the model, `stop_string` = with a string of `stop`, `length` = at
    `max_new_tokens`, `not_drawn` = see `failure`, `too_long` = the prompt leaves too few of the model's positions."""
    trace: tuple[dict[str, Any], ...]
    """One entry for each proposal: block, step, cut, lengths, log ratio, decision."""
    failure: str = ""
    """Why the chain could not be drawn; the other fields are then empty."""

    def _repr_html_(self) -> str:
        return SampleList([self])._repr_html_()


class SampleList(list[Sample]):
    """Samples in order. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        from tabulate import tabulate

        rows = [(one.id, one.chain, one.text or one.failure, f"{one.log_p:.2f}", f"{one.accepted} of {one.proposals}",
                 len(one.tokens), one.finish_reason) for one in self]
        headers = ("id", "chain", "text", "log p", "accepted", "tokens", "end")
        return str(tabulate(rows, headers, tablefmt="html", disable_numparse=True))


def of_chain(done: Finished[tuple[int, int]], names: list[str], token_ids: Mapping[str, np.ndarray],
             target: ChainTarget) -> Sample:
    """The sample of a chain that has ended.

    Args:
        done: its tag is (index of the prompt, number of the chain).
        names: ids of all prompts in order.
        token_ids: prompts by id.
        target: decodes the tokens.
    """
    index, chain = done.tag
    result = done.result or ChainResult(Trajectory.start(token_ids[names[index]]))
    drawn = result.trajectory
    reason = NOT_DRAWN if done.result is None else finishes.of_trajectory(drawn, target.stop_ids)
    return Sample(index, names[index], chain, target.decode(drawn.tokens), drawn.tokens.tolist(), float(drawn.log_p.sum()),
                  float(drawn.log_q.sum()), result.proposals, result.accepted, result.moved, done.cost, reason, result.trace,
                  done.failure)


def of_long(index: int, name: str, chain: int, found: TooLong) -> Sample:
    """The empty sample of a prompt that does not fit into the model."""
    return Sample(index, name, chain, "", [], 0.0, 0.0, 0, 0, 0, Cost(), TOO_LONG, (), found.reason)
