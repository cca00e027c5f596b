"""The batched engine: many chains of many problems in one ragged batch over a cache of slots.

Each operation of a chain has a slot. A draw continues a sequence. The keys and values of the longest prefix that the slot
still holds are kept, and the rest of the sequence is read in pieces. Its last token is always fed by a decode step. Every
token of every chain is therefore drawn by the same code.

    scheduler.py            admits waiting chains to slots, carries out their draws and scores, and runs decode steps
    chains.py               the request of a chain, its answers, its cost and its turns; keys and values of its slots
    speculative/steps.py    what a step computes
    model_runner.py         forwards of the target

A ladder gives all shapes (`cache.py`). On a CPU in float32 the numbers of a row therefore do not depend on the rest of the
batch. `tests/engine/batching/test_batched.py` compares the engine with the reference engine, and with itself under other batch
sizes, orders and switches.

On a GPU a small step takes as long as the launches of its kernels, so decode steps are captured as CUDA graphs and replayed. A
graph has fixed shapes. So on a GPU the engine uses a short ladder of batches and key lengths, and captures each shape when it
is first needed. Steps run without a graph if rows draw with different sampling parameters, or share forwards.

A step on a CPU has as many rows as chains, or multiples of eight. The products of `linear.py` have the same bits for any
number of rows. Whether attention, norms, draws and rules have too is compared on the machine that it runs on, in less than a
second: a step of 1 and of 8 slots with one of 9, bit by bit, with random and fixed inputs. A step is what an engine does: the
proposal of the draft, the forward over the tokens of each slot, their logits, and the rule. If anything differs, steps are
padded to multiples of eight.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache, cache_size, ladder_of
from dflash_mcmc.engine.batching.chains import SlotMemory
from dflash_mcmc.engine.batching.interface import DEFAULTS, ChainRunner, Counters, Finished, Options, Tag, TargetBlend
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import RowLinear, has_row_layers
from dflash_mcmc.engine.batching.model_runner import ModelRunner, PromptReader, SecondPrompts
from dflash_mcmc.engine.batching.plan import Workload, cache_of
from dflash_mcmc.engine.batching.rows import Group, RowProgress, Rows, SharedForwards, Status, Stepper
from dflash_mcmc.engine.batching.scheduler import DecodeLoop, Scheduler
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.engine.speculative.drafter import Anchors, BlockGrid, DFlashDrafter, Drafter, ModelDrafter
from dflash_mcmc.engine.speculative.speculation import Block, Rule, Speculation, Uniforms
from dflash_mcmc.engine.speculative.steps import BlockSteps, MixedSteps, PlainSteps, Speculator, Tracer
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.ops import Chain
from dflash_mcmc.rng import Key

_WARM_UPS = 2


def graphed(stepper: Stepper, reason: str | None, endings: Endings) -> Stepper:
    """The stepper with graphs. If there is a reason against them, it is the stepper itself, with a note once in a process."""
    if reason is None:
        return GraphedSteps(stepper, endings)
    note(f"decode steps run without CUDA graphs, because {reason}")
    return stepper


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a work space, 34 MB on Hopper, for each stream that has used it."""
    return torch.cuda.Stream(device)


class GraphedSteps:
    """Replays the steps of another stepper, with a graph for each batch, key length and group.

    A graph reads the tensors that it was captured with. Graphs are therefore captured again after `endings` has others.
    """

    def __init__(self, stepper: Stepper, endings: Endings):
        self._stepper, self.cost, self._endings, self._num_sets = stepper, stepper.cost, endings, endings.num_sets
        self.tokens_a_step, self.reach = stepper.tokens_a_step, stepper.reach
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        """See `Stepper.step`."""
        if len(groups) > 1 or riders is not None or any(law.function for law in (groups[0].params, *groups[0].laws)):
            self._stepper.step(cache, state, batch, key_length, groups, riders)
            return
        if self._num_sets != self._endings.num_sets:
            self._graphs.clear()
            self._num_sets = self._endings.num_sets
        name = (batch, key_length, groups[0], state.has_floors, len(state.seen), len(state.counts), state.columns.shape[2])
        if name not in self._graphs:
            self._graphs[name] = self._capture(cache, state, batch, key_length, groups)
        self._graphs[name].replay()

    def _capture(self, *arguments) -> torch.cuda.CUDAGraph:
        state = arguments[1]
        status = state.status.clone()
        state.status.fill_(Status.DONE)  # the warm-up has no effect, because a step changes only live rows
        side = _capture_stream(state.status.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._stepper.step(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            self._stepper.step(*arguments)
        self._pool = self._pool or graph.pool()
        state.status.copy_(status)
        return graph


class BatchedEngine(ChainRunner):
    """Runs chains of operations on a language model.

    Args:
        model: the target.
        blend: changes the target's last hidden state; None for no change.
        num_slots: chains in the batch at once.
        max_length: longest sequence, prompt included.
        options: see `Options`.
        prompt_length: longest prompt; None takes `max_length`.
        speculation: the rule for drawing block by block; None to draw token by token.
        drafter: the draft that the blend mixes in or that tokens are drawn from; None without such a draft.
        companion: the model whose logits the blend mixes in; None for a blend without one.
        second: the companion's prompts by the bytes of the target's; None if it reads the same prompts.
        few_rows: whether products are those of few rows (`linear.py`).
    """

    model: LanguageModel

    def __init__(self, model: LanguageModel, blend: TargetBlend | None, num_slots: int, max_length: int,
                 options: Options = DEFAULTS, prompt_length: int | None = None,
                 speculation: Speculation[Drafter] | None = None, drafter: Drafter | None = None,
                 companion: LanguageModel | None = None, second: Mapping[bytes, np.ndarray] | None = None,
                 few_rows: bool = False):
        super().__init__()
        self.model, self.num_slots, self.options, self._few_rows = model, num_slots, options, few_rows
        proposer: Drafter | None = speculation.drafter if speculation else drafter
        work = Workload(model, max_length, prompt_length or max_length, options, proposer, companion)
        for each in work.models:
            if each.max_positions is not None and max_length > each.max_positions:
                name = "the model's" if each is model else "those of " + ("blend" if each is companion else "draft") + ".model"
                raise UserError(f"dataset.max_new_tokens: prompt and generation need {max_length} positions; allowed: "
                                f"{each.max_positions} ({name})")
        on_gpu, ladder = model.device.type == "cuda", ladder_of(model.device)
        implementation = work.implementation(model)
        if speculation and drafter not in (None, proposer):
            raise ValueError("given two drafters; allowed: one, which a decoder shares with blend and sampler")
        num_rows, longest = cache_size(model.device, num_slots, max_length, work.padding)
        made = EngineSteps(proposer, speculation.rule if speculation else None, few_rows)
        # Blocks of a draft beside a companion are not compared.
        free = companion is None or (proposer is None and free_rows(companion, EngineSteps(few_rows=few_rows),
                                                                    work.implementation(companion)))
        if free_rows(model, made, implementation) and free:
            ladder = ladder._replace(row_step=1)
        beside, drafting = (None if each is None else ModelRunner(
            each, None, work.implementation(each), longest, ladder.key_step, options.prefill_chunk)
            for each in (companion, proposer.model if isinstance(proposer, ModelDrafter) else None))
        grid = None if drafter is None else _grid(drafter, blend, num_rows, ladder.row_step, model.device)
        runner = ModelRunner(model, blend, implementation, longest, ladder.key_step, options.prefill_chunk,
                             proposer if proposer and proposer.companion else None, grid, beside,
                             None if second is None else SecondPrompts(second, num_rows, model.device), drafting)
        # CUDA graphs refer to fixed memory, so on a GPU all of it is allocated at the start.
        cache, spare = (cache_of(work, model, num_rows, longest if on_gpu else ladder.key_step) for _ in range(2))
        prompts = PromptReader(runner, cache_of(work, model, *work.prompts(num_slots)))
        self._memory = SlotMemory(runner, cache, spare, prompts, options, ladder, work.padding, longest)
        rows = Rows(num_rows, longest, model.vocab_size, model.device, speculation.num_noise if speculation else 0)
        # A step of whole blocks feeds tokens before a row's position again. It needs keys and values alone.
        stepper, tracer = _stepper(runner, speculation, whole_blocks=not model.recurrent_nets)
        if options.cuda_graphs and on_gpu:
            reasons = [each.model.uncaptured for each in (runner, *runner.beside) if each.model.uncaptured]
            if speculation is not None and speculation.trace:
                reasons.append("decoder.trace reads every step")
            if grid is not None:
                reasons.append("steps use a draft of every token")
            stepper = graphed(stepper, next(iter(reasons), None), runner.endings)
        steps = options.steps_between_checks or (4 if on_gpu and not model.recurrent_nets else 1)
        self._loop = DecodeLoop(rows, stepper, self._memory, ladder, steps, tracer)
        self._speculation, self._sharing = speculation, not (grid or speculation)

    def reset_counters(self) -> None:
        """Sets the counters to zero."""
        self._meter.counters = Counters()

    def close(self) -> None:
        """Does nothing: all that this engine holds is memory of this process."""

    @torch.inference_mode()
    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        """Like `run`, but also yields None after every step, to let the caller do something else in between."""
        self._memory.reset()
        self._loop.reset()
        self._meter.reset_clock()
        self._dropped.clear()
        scheduler = Scheduler(chains, self.num_slots, self._memory, self._loop, self._speculation, self.options, self._sharing,
                              self._meter)
        with self._memory.runner.ready(self._few_rows):
            yield from scheduler.fill()
            while scheduler.has_work:
                yield from scheduler.end_steps(self._step(scheduler)) if scheduler.running else scheduler.fill()
                yield None
                if self._dropped:
                    yield from scheduler.drop(self._dropped)
                    self._dropped.clear()

    def _step(self, scheduler: Scheduler) -> RowProgress:
        """Reads the missing tokens of the rows, then steps the rows. Returns their progress."""
        began, live = time.perf_counter(), len(scheduler.running)
        started = time.perf_counter()
        read = self._memory.read()
        if read[0]:
            self._meter.count_reading(*read, started)
        started = time.perf_counter()
        progress, row_steps = self._loop.run(scheduler.running)
        self._meter.count_steps(self._loop.steps_per_sync, row_steps, scheduler.busy_slots, started)
        self._meter.share(began, live)
        return progress


def _grid(drafter: Drafter, blend: TargetBlend | None, num_rows: int, row_step: int, device: torch.device) -> BlockGrid:
    """The draft's blocks of all rows. Raises UserError for a draft that the blend cannot mix in."""
    if not isinstance(drafter, DFlashDrafter | ModelDrafter):
        raise TypeError(f"{type(drafter).__name__} has no hidden states: a blend or a draw from the draft needs them")
    if blend is not None and blend.needs_draft and not (isinstance(drafter, DFlashDrafter) and drafter.plain_head):
        raise UserError("blend: given draft; allowed: another, since this draft scales or caps its logits, and a mixture of "
                        "hidden states cannot do this")
    return BlockGrid(drafter, num_rows, row_step, device)


def _stepper(runner: ModelRunner, speculation: Speculation[Drafter] | None,
             whole_blocks: bool) -> tuple[Stepper, Tracer | None]:
    """The stepper that makes the decode steps, and the tracer of the steps, if any."""
    plain = PlainSteps(runner)
    speculator = None if speculation is None else Speculator(runner, speculation)
    tracer = Tracer(speculator.walks) if speculator and speculator.speculation.trace else None
    if runner.grid is None or not (speculator or whole_blocks):
        return speculator or plain, tracer
    if not whole_blocks:
        return MixedSteps(runner, plain, plain, speculator or plain), tracer
    blocks = BlockSteps(runner, runner.grid)
    joined = (blocks, speculator) if speculator is not None and speculator.window is None else ()
    return MixedSteps(runner, blocks, plain, speculator or plain, joined), tracer


ATTENTION = "grouped"
ROWS = 9
_FEW_ROWS = (1, 8)
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


@torch.inference_mode()
def free_rows(model: LanguageModel, steps: EngineSteps, implementation: str) -> bool:
    """Whether a step may have any number of rows. The comparison is made once, while no other thread uses the model.

    Args:
        implementation: of attention, in `transformers`' registry.
    """
    if implementation != ATTENTION or not fits(model, steps.drafter):
        return False
    network = None if steps.network is None else weakref.ref(steps.network)
    key = steps.reach, type(steps.drafter), network, steps.rule, steps.few_rows, torch.get_num_threads()
    agreed = _KNOWN.setdefault(model.decoder, {})
    if key not in agreed:
        with ExitStack() as stack:
            for each in sorted((model, *steps.models), key=lambda each: id(each.turn)):  # as in `ModelRunner.ready`
                stack.enter_context(each.turn.taken(nests=True))
            agreed[key] = draws_agree(model.vocab_size, steps) and steps_agree(model, steps)
    return agreed[key]


def fits(model: LanguageModel, drafter: Drafter | None = None) -> bool:
    """Whether steps are compared: all layers are replaced, and have usual widths."""
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
        for count in (num_rows * tokens for num_rows in _FEW_ROWS):
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
    with runner.ready(steps.few_rows):
        expected = list(_numbers(runner, steps, cache, sequences, anchors))
        return all(_same(_numbers(runner, steps, cache, sequences[:count], anchors[:count]), expected, count)
                   for count in _FEW_ROWS)


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
        for count in _FEW_ROWS:
            for first in range(0, ROWS - count + 1, count):  # a rule treats blocks differently: no single one is enough
                mine = slice(first, first + count)
                if not _same(verdict(mine, has_law), [values[mine] for values in expected], count):
                    return False
    return True


def _numbers(runner: ModelRunner, steps: EngineSteps, cache: KVCache, sequences: torch.Tensor,
             anchors: torch.Tensor) -> Iterator[torch.Tensor]:
    """All numbers of a step of the first slots, each (slots, ...): of forwards, and of a proposal of the draft.

    A position of the cache is written before it is read, so that a step can be repeated.

    Args:
        sequences: int64 (slots, length), the tokens of the slots.
        anchors: int64 (slots,), positions of the tokens that are fed first.
    """
    count, rows, drafter, collected = len(anchors), slice(0, len(anchors)), steps.drafter, list[torch.Tensor]()
    for tokens in sorted({1, steps.reach}):
        positions = anchors[:, None] + torch.arange(tokens)
        hidden = runner.forward(cache, rows, sequences.gather(1, positions), positions, cache.length)
        yield hidden
        yield runner.model.logits(hidden.flatten(0, 1)).view(count, tokens, -1)
        if runner.drafter is not None:  # what the draft keeps of the forward
            yield from (kept.transpose(0, 1) for kept in cache.drafts.at(rows, positions))
    if drafter is None:
        return

    def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
        collected.append(logits)
        return logits.flatten(0, 1).argmax(dim=-1).view(count, -1)

    forward = partial(runner.draft_logits, cache, rows, key_length=cache.length)
    at = Anchors(rows, cache, sequences, anchors, cache.length, forward)
    yield drafter.propose(at, draw)
    yield from collected
    if isinstance(drafter, DFlashDrafter):  # the states of a block for rows that are not the first ones of a cache
        yield drafter.hidden_aside(at._replace(rows=torch.arange(count)))


def _same(few, many, count: int) -> bool:
    """Whether tensors of few slots are the first parts of those of many."""
    return all(torch.equal(ours, theirs[:count]) for ours, theirs in zip(few, many, strict=True))
