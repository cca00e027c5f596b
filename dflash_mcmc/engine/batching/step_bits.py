"""Rows of a decode step on a CPU: as many as chains, or multiples of eight.

The numbers of a row must not depend on the rest of the batch. The products of `linear.py` have the same bits for any
number of rows. Whether attention, norms, draws and rules have too is compared on the machine that it runs on, in less than a
second: a step of 1 and of 8 slots with one of 9, bit by bit, with random and fixed inputs. A step is what an engine does: the
proposal of the draft, the forward over the tokens of each slot, their logits, and the rule. If anything differs, steps are
padded to multiples of eight (`cache.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import RowLinear, has_row_layers
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter, Drafter, ModelDrafter
from dflash_mcmc.engine.speculative.speculation import Block, Rule, Uniforms
from dflash_mcmc.rng import Key

ATTENTION = "grouped"
ROWS = 9
_COUNTS = (1, 8)
_WIDTH_STEP = 64
"""Widths of layers are multiples of it. A vectorised function computes the rest of its elements by other instructions."""
_KEY_STEP = 64
_RULE_VOCABULARY = 8192
"""Rules are compared with about so many tokens: the rest of a division by `_WIDTH_STEP` is that of the vocabulary."""
_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, bool]] = weakref.WeakKeyDictionary()


class EngineSteps(NamedTuple):
    """What the steps of an engine compute.

    Attributes:
        drafter: proposes blocks or gives the draft's states; None without a draft.
        rule: decides about blocks; None if tokens are not drawn block by block.
        few_rows: whether products are those of few rows.
    """

    drafter: Drafter | None = None
    rule: Rule | None = None
    few_rows: bool = False

    @property
    def reach(self) -> int:
        """The largest number of tokens of a slot in a forward."""
        return 1 if self.drafter is None else self.drafter.num_drafted + 1

    @property
    def network(self) -> torch.nn.Module | None:
        """The draft's network; None without one."""
        if isinstance(self.drafter, ModelDrafter):
            return self.drafter.model.decoder
        return self.drafter.network if isinstance(self.drafter, DFlashDrafter) else None

    @property
    def models(self) -> list[LanguageModel]:
        """The model of a `ModelDrafter`."""
        return [self.drafter.model] if isinstance(self.drafter, ModelDrafter) else []

    def key(self) -> tuple:
        """Equal for steps with the same bits, in this process."""
        network = self.network
        return (self.reach, type(self.drafter), None if network is None else weakref.ref(network), self.rule,
                self.few_rows, torch.get_num_threads())


@torch.inference_mode()
def free_rows(model: LanguageModel, steps: EngineSteps, implementation: str) -> bool:
    """Whether a step may have any number of rows. The comparison is made once, while no other thread uses the model.

    Args:
        implementation: of attention, in `transformers`' registry.
    """
    if implementation != ATTENTION or not fits(model, steps.drafter):
        return False
    agreed, key = _KNOWN.setdefault(model.decoder, {}), steps.key()
    if key not in agreed:
        with ExitStack() as stack:
            for each in sorted((model, *steps.models), key=lambda each: id(each.turn)):  # as in `ModelRunner.ready`
                stack.enter_context(each.turn.taken(nests=True))
            agreed[key] = draws_agree(model.vocab_size, steps) and steps_agree(model, steps)
    return agreed[key]


def fits(model: LanguageModel, drafter: Drafter | None = None) -> bool:
    """Whether steps are compared: all layers are replaced, and have usual widths. A draft that learns keeps its layers."""
    steps = EngineSteps(drafter)
    networks = [model.decoder] if steps.network is None else [model.decoder, steps.network]
    return (all(each.head_keeps_bits for each in (model, *steps.models)) and all(map(has_row_layers, networks))
            and not any(size % _WIDTH_STEP for each in networks for layer in each.modules()
                        if isinstance(layer, RowLinear) for size in layer.weight.shape))


def draws_agree(vocab_size: int, steps: EngineSteps) -> bool:
    """Whether weights, log-probabilities and verdicts of few slots have the bits of many."""
    generator = torch.Generator().manual_seed(0)
    for tokens in sorted({1, steps.reach}):
        logits = 4.0 * torch.randn(ROWS * tokens, vocab_size, generator=generator)
        expected = laws.weigh(logits)
        chosen = logits.argmax(dim=-1)
        log_p = expected.log_probability(chosen)
        for count in (num_rows * tokens for num_rows in _COUNTS):
            few = laws.weigh(logits[:count].clone())
            if not (_same(few, expected, count) and torch.equal(few.log_probability(chosen[:count]), log_p[:count])):
                return False
    ruled = min(vocab_size, _RULE_VOCABULARY + vocab_size % _WIDTH_STEP)
    return steps.rule is None or _verdicts_agree(steps.rule, steps, ruled)


def steps_agree(model: LanguageModel, steps: EngineSteps) -> bool:
    """Whether all numbers of a step of few slots have the bits of many, over random keys and values."""
    longest = max(steps.reach, steps.drafter.num_rows if isinstance(steps.drafter, DFlashDrafter) else 1)
    last = length = -(-4 * longest // _KEY_STEP) * _KEY_STEP
    if model.max_positions is not None:
        last = min(length, model.max_positions)
    if last < 4 * longest:
        return False
    generator = torch.Generator().manual_seed(length)
    sequences = torch.randint(model.vocab_size, (ROWS, length), generator=generator)
    anchors = torch.randint(last // 2, last - longest + 1, (ROWS,), generator=generator)
    drafter = steps.drafter
    companion = drafter.companion if drafter else None
    cache = KVCache(model.cache_shape, ROWS, length, companions=(companion,) if companion else ())
    for held in (cache, cache.companion):
        for memory in () if held is None else (held.keys, held.values):
            memory.copy_(torch.randn(memory.shape, generator=generator))
    drafting = [ModelRunner(each, None, ATTENTION, length, _KEY_STEP, _KEY_STEP) for each in steps.models]
    # What a model that drafts keeps is not compared, since its proposal writes the token before the anchor.
    runner = ModelRunner(model, None, ATTENTION, length, _KEY_STEP, _KEY_STEP, drafter if companion and not drafting else None,
                         drafting=drafting[0] if drafting else None)
    step = _Step(runner, steps, cache, sequences, anchors)
    with runner.ready(steps.few_rows):
        expected = list(step.numbers(ROWS))
        for count in _COUNTS:
            if not _same(step.numbers(count), expected, count):
                return False
    return True


def _verdicts_agree(rule: Rule, steps: EngineSteps, vocab_size: int) -> bool:
    """Whether a rule decides about the blocks of few slots as about those of many: of a law of the draft, and of none."""
    generator, drafted = torch.Generator().manual_seed(1), steps.reach - 1
    q = 4.0 * torch.randn(ROWS * drafted, vocab_size, generator=generator)  # sharp laws, so that rules keep tokens
    p = q.view(ROWS, drafted, -1)[:, [*range(drafted), 0]] + torch.randn(ROWS, drafted + 1, vocab_size, generator=generator)
    numbers = torch.from_numpy(Key(0).uniforms(0, ROWS * (3 * drafted + 1)).reshape(ROWS, -1))
    uniforms = Uniforms(*numbers.split((drafted + 1, drafted, drafted), dim=1))
    tokens = laws.draw(laws.weigh(q), uniforms.tokens[:, :-1].reshape(-1))[0].view(ROWS, drafted)

    def verdict(mine: slice, has_law: bool) -> tuple[torch.Tensor, ...]:
        draft = laws.weigh(q.view(ROWS, drafted, -1)[mine].flatten(0, 1).clone()) if has_law else None
        block = Block(tokens[mine], laws.weigh(p[mine].flatten(0, 1)), draft, torch.zeros_like(tokens[mine][:, 0]).bool())
        made = rule(block, Uniforms(*(values[mine] for values in uniforms)))
        return made.accepted, made.tokens, made.interval

    for has_law in (True, False):
        expected = verdict(slice(0, ROWS), has_law)
        for count in _COUNTS:
            for first in range(0, ROWS - count + 1, count):  # a rule treats blocks differently: no single one is enough
                mine = slice(first, first + count)
                if not _same(verdict(mine, has_law), [values[mine] for values in expected], count):
                    return False
    return True


class _Step:
    """A step of the first slots. It writes a position of the cache before it reads it, so that it can be repeated.

    Args:
        sequences: int64 (9, length), the tokens of the slots.
        anchors: int64 (9,), positions of the tokens that are fed first.
    """

    def __init__(self, runner: ModelRunner, steps: EngineSteps, cache: KVCache, sequences: torch.Tensor,
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
        hidden = self._forward(fed, positions)
        yield hidden
        yield self._runner.model.logits(hidden.flatten(0, 1)).view(count, tokens, -1)
        if self._runner.drafter is not None:
            yield from (kept.transpose(0, 1) for kept in self._cache.drafts.at(slice(0, count), positions))

    def _drafted(self, count: int) -> Iterator[torch.Tensor]:
        """The logits of a proposal, and the states of a block for rows that are not the first ones of a cache."""
        drafter, collected = self._steps.drafter, list[torch.Tensor]()
        assert drafter is not None

        def draw(logits: torch.Tensor, first: int, offered: torch.Tensor | None = None) -> torch.Tensor:
            collected.extend([logits] if offered is None else [logits, offered])
            return logits.flatten(0, 1).argmax(dim=-1).view(count, -1)

        def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self._runner.draft_logits(self._cache, slice(0, count), tokens, positions, self._cache.length)

        at = Anchors(slice(0, count), self._cache, self._sequences, self._anchors[:count], self._cache.length, forward)
        yield drafter.propose(at, draw)
        yield from collected
        if isinstance(drafter, DFlashDrafter):
            yield drafter.hidden_aside(at._replace(rows=torch.arange(count)))

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._runner.forward(self._cache, slice(0, len(tokens)), tokens, positions, self._cache.length)


def _same(few, many, count: int) -> bool:
    """Whether tensors of few slots are the first parts of those of many."""
    return all(torch.equal(ours, theirs[:count]) for ours, theirs in zip(few, many, strict=True))
