"""The expected cost of a run: token-forwards of the target, blocks of the draft, and hours.

`expected_cost` of a sampler is the cost of a chain in closed form, for answers of one length. `expected_cost` of a probe is
the cost of a unit. Values that depend on the model are assumed and can be configured: `assumed.*`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dflash_mcmc.components import Settings, name_of
from dflash_mcmc.types import ExpectedCost, UnitCost

_PUBLISHED_BLOCK = 16


class CostEstimate(NamedTuple):
    """The expected cost of one run. Costs are None if the sampler or the probe has no `expected_cost`."""

    num_samples: int
    """Samples, or units of a probe."""
    token_forwards: float | None
    """Positions at which the target is evaluated, over all samples."""
    hours: float | None
    draft_blocks: float | None = 0.0
    """Forwards of the draft, each for a block, over all samples. Those of a speculative decoder are not counted."""

    def of_share(self, share: float) -> "CostEstimate":
        """The cost if only this share of the samples is drawn."""
        return self if share == 1.0 else CostEstimate(round(self.num_samples * share), *(
            None if value is None else value * share for value in (self.token_forwards, self.hours, self.draft_blocks)))

    @staticmethod
    def total(estimates: "Sequence[CostEstimate]") -> "CostEstimate":
        """The sums; None if a part is None."""
        return CostEstimate(sum(one.num_samples for one in estimates), _sum([one.token_forwards for one in estimates]),
                            _sum([one.hours for one in estimates]), _sum([one.draft_blocks for one in estimates]))


def estimate(config: Settings) -> CostEstimate:
    """The cost of a run of samples. Loads no model. Raises UserError if the problems cannot be counted."""
    forwards, chains = token_forwards(config), config.num_chains
    if forwards is not None:  # the chains of a problem read its prompt once
        forwards -= (config.assumed.prompt_length - 1) * (chains - 1) / chains
    cost = None if forwards is None else UnitCost(forwards, draft_blocks(config))
    return of_tasks(config, config.dataset.num_chosen() * chains, cost)


def of_tasks(config: Settings, count: int, cost: UnitCost | None) -> CostEstimate:
    """The cost of `count` tasks that each cost `cost`. Without `cost` the costs are None."""
    if cost is None:
        return CostEstimate(count, None, None, None)
    total, rate = count * cost.token_forwards, config.hardware.tokens_per_second
    hours = total / rate / 3600 if rate else None if total else 0.0
    return CostEstimate(count, total, hours, count * cost.draft_blocks)


def token_forwards(config: Settings) -> float | None:
    """Token-forwards of one sample, as the engine counts them: the prompt except its last token, and each drawn token.

    None if the sampler has no `expected_cost`. Forwards that speculative decoding spends on tokens that are not kept are not
    included.
    """
    cost = _expected(config, _answer_length(config))
    if cost is None:
        return None
    return config.assumed.prompt_length - 1.0 + cost.extended + _proposed(config, cost) + cost.scored


def draft_blocks(config: Settings) -> float:
    """Blocks that the draft proposes for one sample, for a sampler or a blend that uses the draft; 0 if neither does.

    A draw of n tokens at any place of the blocks' grid touches (n - 1) / B + 1 blocks of B tokens on average. In one of B
    draws only the first token of the last block is drawn. The draft does not propose first tokens, so it skips that block.
    """
    cost, size = _expected(config, _answer_length(config)), block_size(config)
    if cost is None or not (cost.drafts or config.blend.needs_draft):
        return 0.0
    drawn = cost.drafted or cost.extended + _proposed(config, cost)
    draws = cost.drafts
    if config.blend.needs_draft:
        drawn, draws = cost.extended + _proposed(config, cost) + cost.scored, cost.num_draws
    return max(0.0, (drawn + draws * (size - 2)) / size)


class Forced(NamedTuple):
    """An answer that a probe teacher-forces, with the lengths in `assumed`; all in tokens except `blocks`."""

    prompt: float
    length: float
    drawing: float
    """Token-forwards to draw the answer; 0 for a solution of the dataset."""
    block_size: int
    blocks: float
    """Whole blocks of the draft in an answer, on average over answers of about this length."""


def forced(config: Settings) -> Forced:
    """The answer of a unit of the configured probe. Raises UserError."""
    prompt, length, size = config.assumed.prompt_length, _answer_length(config), block_size(config)
    return Forced(prompt, length, prompt - 1 + length if config.probe.draws_answers() else 0.0, size,
                  max(0.0, (length - (size - 1) / 2) / size))


def read_along(config: Settings) -> UnitCost:
    """The cost of drawing an answer and reading it. With a draft, it is read once more and each of its blocks is drafted."""
    answer = forced(config)
    read = answer.prompt + answer.length
    if config.draft.is_null:
        return UnitCost(answer.drawing + read)
    return UnitCost(answer.drawing + 2 * read, answer.blocks)


def block_size(config: Settings) -> int:
    """Tokens of a block of the draft, including the first; the published drafts' block size if the draft's is not known."""
    size = config.draft.size()
    return _PUBLISHED_BLOCK if size is None else size.num_drafted + 1


def assumptions(config: Settings) -> list[str]:
    """The lines that explain the estimate of a run of samples."""
    assumed, cost = config.assumed, _expected(config, config.dataset.max_new_tokens)
    if cost is None:
        return [f"no estimate: sampler={name_of(config.sampler)} does not give one"]
    notes = [lengths(config)]
    if cost.proposed and config.engine.is_remote:
        notes.append(f"counted for engine={name_of(config.engine)}: a server draws every token of every proposal")
    elif cost.proposed:
        notes.append(f"assumed for proposals: acceptance={assumed.acceptance:g}, identical={assumed.identical:g} of the "
                     f"tokens skipped, abandoned_at={assumed.abandoned_at:g} of a proposal that is rejected early")
    if config.dataset.must_end:
        notes.append("dataset.must_end: counted as one draw; answers that do not end are drawn again and add to this")
    if not config.decoder.is_null:
        notes.append(f"decoder={name_of(config.decoder)}: counted as decoder=plain; rejected drafted tokens add to this")
    if config.blend.needs_companion:
        notes.append(f"blend={name_of(config.blend)}: counted for the target alone; its companion adds as many token-forwards")
    if config.draft.has_model:
        notes.append(f"draft={name_of(config.draft)}: counted for the target alone; its model adds as many token-forwards")
    return [*notes, rate(config)]


def lengths(config: Settings) -> str:
    """The line about the lengths, which are assumed, or counted and then taken as assumptions."""
    assumed, horizon = config.assumed, config.dataset.max_new_tokens
    return (f"lengths: prompts of {assumed.prompt_length:.0f} tokens, answers of {_answer_length(config):.0f} "
            f"(assumed.answer_length={assumed.answer_length:g} of dataset.max_new_tokens={horizon})")


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None if a value is None."""
    return None if None in values else sum(value for value in values if value is not None)


def _expected(config: Settings, length: float) -> ExpectedCost | None:
    return config.sampler.expected_cost(length, config.dataset.max_new_tokens)


def _answer_length(config: Settings) -> float:
    return config.assumed.answer_length * config.dataset.max_new_tokens


def _proposed(config: Settings, cost: ExpectedCost) -> float:
    """Tokens of proposals that are drawn with a forward: on a server all of them."""
    if config.engine.is_remote:
        return cost.proposed
    assumed, proposed = config.assumed, cost.proposed
    if config.sampler.rejects_early():
        proposed *= assumed.acceptance + (1.0 - assumed.acceptance) * assumed.abandoned_at
    if not cost.scored:  # tokens of a path that is scored are never skipped
        proposed *= 1.0 - assumed.identical
    return proposed


def rate(config: Settings) -> str:
    """The line about the rate that the hours are computed with."""
    if measured := config.hardware.tokens_per_second:
        return f"hours: at {measured:g} token-forwards a second (hardware.tokens_per_second)"
    return ("hours: unknown, since none of the newest runs in paths.outputs is of this model, draft and engine and was "
            "finished by this machine; hardware.tokens_per_second sets the rate")
