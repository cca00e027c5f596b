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
second: the engine's own steps of 1 and of 8 rows with those of 9, bit by bit, after random tokens. If anything differs, steps
are padded to multiples of eight.
"""

import time
import weakref
from collections.abc import Generator, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import KVCache, cache_size, ladder_of, round_up
from dflash_mcmc.engine.batching.chains import SlotMemory
from dflash_mcmc.engine.batching.interface import ChainRunner, Counters, Finished, Options, Tag, TargetBlend
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import RowLinear, has_row_layers
from dflash_mcmc.engine.batching.model_runner import ModelRunner, PromptReader, SecondPrompts
from dflash_mcmc.engine.batching.plan import Workload, cache_of
from dflash_mcmc.engine.batching.rows import Group, RowProgress, Rows, SharedForwards, Start, Status, Stepper
from dflash_mcmc.engine.batching.scheduler import DecodeLoop, Scheduler
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.engine.speculative.drafter import BlockGrid, DFlashDrafter, Drafter, ModelDrafter
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.engine.speculative.steps import BlockSteps, MixedSteps, PlainSteps, Speculator, Tracer
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.ops import Chain, SamplingParams
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
        num_slots: draws in the batch at once.
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
                 options: Options = Options(), prompt_length: int | None = None,  # noqa: B008 - immutable
                 speculation: Speculation[Drafter] | None = None, drafter: Drafter | None = None,
                 companion: LanguageModel | None = None, second: Mapping[bytes, np.ndarray] | None = None,
                 few_rows: bool = False):
        super().__init__()
        self.model, self.num_slots, self.options, self._few_rows = model, num_slots, options, few_rows
        proposer = speculation.drafter if speculation else drafter
        work = Workload(model, max_length, prompt_length or max_length, options, proposer, companion)
        for each in work.models:
            if each.max_positions is not None and max_length > each.max_positions:
                name = "the model's" if each is model else "those of " + ("blend" if each is companion else "draft") + ".model"
                raise UserError(f"dataset.max_new_tokens: prompt and generation need {max_length} positions; allowed: "
                                f"{each.max_positions} ({name})")
        on_gpu, ladder = model.device.type == "cuda", ladder_of(model.device)
        num_rows, longest = cache_size(model.device, num_slots, max_length, work.padding)
        self.parts = EngineParts(model, blend, speculation, drafter, companion, second, few_rows, work)
        if free_rows(self.parts):
            ladder = ladder._replace(row_step=1)
        runner = self.parts.runner(num_rows, longest, ladder.row_step)
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
            if runner.grid is not None:
                reasons.append("steps use a draft of every token")
            stepper = graphed(stepper, next(iter(reasons), None), runner.endings)
        steps = options.steps_between_checks or (4 if on_gpu and not model.recurrent_nets else 1)
        self._loop = DecodeLoop(rows, stepper, self._memory, ladder, steps, tracer)
        self._speculation, self._sharing = speculation, not (runner.grid or speculation)

    def reset_counters(self) -> None:
        """Sets the counters to zero."""
        self._meter.counters = Counters()

    @torch.inference_mode()
    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        self._memory.reset()
        self._loop.reset()
        self._meter.reset_clock()
        self._dropped.clear()
        scheduler = Scheduler(chains, self.num_slots, self._memory, self._loop, self._speculation, self.options, self._sharing,
                              self._meter)
        with self._memory.runner.ready(self._few_rows):
            yield from scheduler.fill()
            while scheduler.running or scheduler.paused:  # rows that draw, or chains that wait for a turn
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


class EngineParts(NamedTuple):
    """What the steps of an engine are made of; the fields are those of `BatchedEngine`."""

    model: LanguageModel
    blend: TargetBlend | None
    speculation: Speculation[Drafter] | None
    drafter: Drafter | None
    companion: LanguageModel | None
    second: Mapping[bytes, np.ndarray] | None
    few_rows: bool
    work: Workload

    @property
    def proposer(self) -> Drafter | None:
        """The draft of the decoder, or else that of blend and sampler."""
        return cast("Drafter | None", self.work.drafter)

    @property
    def models(self) -> list[LanguageModel]:
        """The target, a model that drafts, and a companion, loaded."""
        return cast("list[LanguageModel]", self.work.models)

    def runner(self, num_rows: int, length: int, row_step: int) -> ModelRunner:
        """The runner of caches with so many rows and positions. Raises UserError for a draft that the blend cannot mix in."""
        work, model, proposer = self.work, self.model, self.proposer
        key_step, chunk = ladder_of(model.device).key_step, work.options.prefill_chunk
        beside, drafting = (
            None if each is None else ModelRunner(each, None, work.implementation(each), length, key_step, chunk)
            for each in (self.companion, cast("LanguageModel | None", work.drafting)))
        grid = None if self.drafter is None else _grid(self.drafter, self.blend, num_rows, row_step, model.device)
        second = None if self.second is None else SecondPrompts(self.second, num_rows, model.device)
        return ModelRunner(model, self.blend, work.implementation(model), length, key_step, chunk,
                           proposer if proposer and proposer.companion else None, grid, beside, second, drafting)


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
_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, bool]] = weakref.WeakKeyDictionary()


def free_rows(parts: EngineParts) -> bool:
    """Whether a step of an engine of these parts may have any number of rows. Steps are compared once in a process."""
    networks = [each.decoder for each in parts.models]
    if isinstance(parts.proposer, DFlashDrafter):
        networks.append(parts.proposer.network)
    # Steps are compared where all layers are replaced and have usual widths.
    if not (all(parts.work.implementation(each) == ATTENTION and each.head_keeps_bits for each in parts.models)
            and all(map(has_row_layers, networks))
            and not any(size % _WIDTH_STEP for each in networks for layer in each.modules()
                        if isinstance(layer, RowLinear) for size in layer.weight.shape)):
        return False
    rule = parts.speculation and parts.speculation.rule
    key = (parts.work.num_drafted, type(parts.proposer), rule, parts.few_rows, torch.get_num_threads(), repr(parts.blend),
           parts.drafter is None, parts.second is None, *map(weakref.ref, networks[1:]))
    agreed = _KNOWN.setdefault(parts.model.decoder, {})
    if key not in agreed:
        agreed[key] = steps_agree(parts)
    return agreed[key]


@torch.inference_mode()
def steps_agree(parts: EngineParts) -> bool:
    """Whether steps of few rows have the bits of steps of many: their tokens and scores, and what they leave in caches."""
    drafter = parts.proposer
    longest = max(parts.work.num_drafted + 1, drafter.num_rows if isinstance(drafter, DFlashDrafter) else 1)
    length = round_up(4 * longest, _KEY_STEP)
    runner = parts.runner(ROWS, length, 1)
    with runner.ready(parts.few_rows):
        expected = _stepped(parts, runner, ROWS, length, longest)
        return all(torch.equal(ours, theirs[: len(ours)]) for count in _FEW_ROWS
                   for ours, theirs in zip(_stepped(parts, runner, count, length, longest), expected, strict=True))


def _stepped(parts: EngineParts, runner: ModelRunner, count: int, length: int, longest: int) -> list[torch.Tensor]:
    """The numbers of steps of the first rows, after the same random tokens, keys and values for every `count`."""
    generator, speculation = torch.Generator().manual_seed(length), parts.speculation
    if speculation is not None:  # at temperature 1 the draft's logits are part of the trace
        speculation = speculation._replace(trace=True, temperature=1.0)
    model, num_noise = runner.model, speculation.num_noise if speculation else 0
    cache = cache_of(parts.work, model, ROWS, length)
    memories = [memory for held in cache.chain() for memory in (held.keys, held.values)]
    for memory in memories:
        memory.copy_(torch.randn(memory.shape, generator=generator))
    rows = Rows(ROWS, length, model.vocab_size, model.device, num_noise)
    sequences = torch.randint(model.vocab_size, (ROWS, length), generator=generator).numpy()
    anchors = torch.randint(length // 2, length - 2 * longest, (ROWS,), generator=generator).tolist()
    for row, anchor in enumerate(anchors[:count]):
        uniforms = Key(row).uniforms(0, (1 + num_noise) * 2 * longest).reshape(2 * longest, -1)
        rows.begin([Start(row, int(sequences[row, anchor]), anchor + 1, anchor + 2 * longest, length // 4, uniforms[:, 0],
                          noise=uniforms[:, 1:])])
        rows.set_tokens(row, sequences[row, : anchor + 1])
    stepper, tracer = _stepper(runner, speculation, whole_blocks=True)
    for source in ("blended", "draft") if runner.grid else ("blended",):
        stepper.step(cache, rows, count, length, (Group(SamplingParams(), source, None),))
    found = [rows.tokens, rows.scores, rows.position, *(memory.transpose(0, 1) for memory in memories)]
    found = [values[:count] for values in found]
    for walk in tracer.walks if tracer else ():
        found += [*walk.block.target, *(walk.block.draft or ())]
    return found
