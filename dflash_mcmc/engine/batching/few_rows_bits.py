"""Compares steps of few slots with steps of eight, bit by bit, on the machine that it runs on (`few_rows.py`).

The inputs are random and fixed. A step is what an engine with these options does: the proposal of the draft, the forward over
the tokens of each slot, their logits, and the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import ContiguousCache
from dflash_mcmc.engine.batching.few_rows import ATTENTION, EngineSteps, FewRows
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.piecewise_product import ROWS
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter
from dflash_mcmc.engine.speculative.speculation import Block, Rule, Uniforms
from dflash_mcmc.rng import Key

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel

_LENGTHS = (64, 128, 512)
"""Lengths of the keys in the comparison of whole steps."""
_KEY_STEP = 64


def draws_agree(vocab_size: int, steps: EngineSteps) -> bool:
    """Whether weights, log-probabilities and verdicts of few slots have the bits of eight."""
    generator = torch.Generator().manual_seed(0)
    for tokens in sorted({1, max(steps.reach - 1, 1), steps.reach}):
        logits = 4.0 * torch.randn(ROWS * tokens, vocab_size, generator=generator)
        expected = laws.weigh(logits)
        chosen = laws.argmax(logits)
        log_p = expected.log_probability(chosen)
        for count in range(tokens, steps.most * tokens + 1, tokens):
            found = laws.weigh(logits[:count].clone())
            if not (_same(found, expected, count) and torch.equal(found.log_probability(chosen[:count]), log_p[:count])):
                return False
    return steps.rule is None or _verdicts_agree(steps.rule, steps, vocab_size)


def steps_agree(few: FewRows, model: LanguageModel, steps: EngineSteps) -> bool:
    """Whether all numbers of a step of few slots have the bits of eight, over random keys and values."""
    if model.max_positions is not None and model.max_positions < 4 * _longest_block(steps):
        return False
    return all(_steps_of_length_agree(few, model, steps, length) for length in _lengths(model, steps))


def _verdicts_agree(rule: Rule, steps: EngineSteps, vocab_size: int) -> bool:
    """Whether a rule decides about the blocks of few slots as about those of eight: of a law of the draft, and of none."""
    generator, drafted = torch.Generator().manual_seed(1), steps.reach - 1
    q = 4.0 * torch.randn(ROWS * drafted, vocab_size, generator=generator)  # sharp laws, so that rules keep tokens
    p = q.view(ROWS, drafted, -1)[:, [*range(drafted), 0]] + torch.randn(ROWS, drafted + 1, vocab_size, generator=generator)
    numbers = torch.from_numpy(Key(0).uniforms(0, ROWS * (3 * drafted + 1)).reshape(ROWS, -1))
    uniforms = Uniforms(*numbers.split((drafted + 1, drafted, drafted), dim=1))
    tokens = laws.draw(laws.weigh(q), uniforms.tokens[:, :-1].reshape(-1))[0].view(ROWS, drafted)

    def verdict(mine: slice, has_law: bool) -> tuple[torch.Tensor, ...]:
        draft = laws.weigh(q.view(ROWS, drafted, -1)[mine].flatten(0, 1).clone()) if has_law else None
        block = Block(tokens[mine], laws.weigh(p[mine].flatten(0, 1)), draft, torch.zeros_like(tokens[mine][:, 0]).bool())
        return tuple(rule(block, Uniforms(*(values[mine] for values in uniforms))))

    for has_law in (True, False):
        expected = verdict(slice(0, ROWS), has_law)
        for count in range(1, steps.most + 1):
            for first in range(0, ROWS - count + 1, count):  # a rule treats blocks differently: no single one is enough
                mine = slice(first, first + count)
                if not _same(verdict(mine, has_law), [values[mine] for values in expected], count):
                    return False
    return True


def _longest_block(steps: EngineSteps) -> int:
    drafter = steps.drafter
    return max(steps.reach, drafter.network.shape.block_size if isinstance(drafter, DFlashDrafter) else 1)


def _lengths(model: LanguageModel, steps: EngineSteps) -> list[int]:
    limit, least = model.max_positions, 4 * _longest_block(steps)
    return [length for length in _LENGTHS if length >= least and (limit is None or length <= limit)] or [
        -(-least // _KEY_STEP) * _KEY_STEP]


def _steps_of_length_agree(few: FewRows, model: LanguageModel, steps: EngineSteps, length: int) -> bool:
    generator, longest = torch.Generator().manual_seed(length), _longest_block(steps)
    last = length if model.max_positions is None else min(length, model.max_positions)
    sequences = torch.randint(model.vocab_size, (ROWS, length), generator=generator)
    anchors = torch.randint(last // 2, last - longest + 1, (ROWS,), generator=generator)
    drafter = steps.drafter
    companion = drafter.companion if drafter else None
    cache = ContiguousCache(model.cache_shape, ROWS, length, companion=companion)
    for held in (cache, cache.companion):
        for memory in () if held is None else (held.keys, held.values):
            memory.copy_(torch.randn(memory.shape, generator=generator))
    runner = ModelRunner(model, None, ATTENTION, length, _KEY_STEP, _KEY_STEP, drafter if companion else None, None, few)
    step = _Step(runner, steps, cache, sequences, anchors)
    with runner.ready():
        expected = list(step.numbers(ROWS))
        for count in range(1, steps.most + 1):
            with runner.step_of(count):
                if not _same(step.numbers(count), expected, count):
                    return False
    return True


class _Step:
    """A step of the first slots. It writes a position of the cache before it reads it, so that it can be repeated.

    Args:
        sequences: int64 (8, length), the tokens of the slots.
        anchors: int64 (8,), positions of the tokens that are fed first.
    """

    def __init__(self, runner: ModelRunner, steps: EngineSteps, cache: ContiguousCache, sequences: torch.Tensor,
                 anchors: torch.Tensor):
        self._runner, self._steps, self._cache = runner, steps, cache
        self._sequences, self._anchors = sequences, anchors

    def numbers(self, count: int) -> Iterator[torch.Tensor]:
        """All numbers of the step, each (count, ...)."""
        for tokens in sorted({1, self._steps.reach}):
            yield from self._verified(count, tokens)
        if self._steps.drafter is not None:
            yield from self._drafted(count)

    def _verified(self, count: int, tokens: int) -> Iterator[torch.Tensor]:
        """States, features and logits of a forward, and what the draft keeps of it."""
        positions = self._anchors[:count, None] + torch.arange(tokens)
        fed = self._sequences[:count].gather(1, positions)
        yield self._forward(fed, positions)
        yield self._runner.model.logits(self._hidden.flatten(0, 1)).view(count, tokens, -1)
        if self._runner.drafter is not None:
            yield from (kept.transpose(0, 1) for kept in self._cache.drafts.at(slice(0, count), positions))

    def _drafted(self, count: int) -> Iterator[torch.Tensor]:
        """The logits of a proposal, and the states of a block for rows that are not the first ones of a cache."""
        drafter, given = self._steps.drafter, list[torch.Tensor]()
        assert drafter is not None

        def draw(logits: torch.Tensor, first: int, offered: torch.Tensor | None = None) -> torch.Tensor:
            given.extend([logits] if offered is None else [logits, offered])
            return laws.argmax(logits.flatten(0, 1)).view(count, -1)

        def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self._runner.model.logits(self._forward(tokens, positions)[:, 0])

        at = Anchors(slice(0, count), self._cache, self._sequences, self._anchors[:count], self._cache.length, forward)
        yield drafter.propose(at, draw)
        yield from given
        if isinstance(drafter, DFlashDrafter):
            yield drafter.hidden_aside(at._replace(rows=torch.arange(count)))

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._hidden = self._runner.forward(self._cache, slice(0, len(tokens)), tokens, positions, self._cache.length)
        return self._hidden


def _same(found, expected, count: int) -> bool:
    """Whether tensors of few slots are the first parts of those of eight."""
    return all(torch.equal(ours, theirs[:count]) for ours, theirs in zip(found, expected, strict=True))
