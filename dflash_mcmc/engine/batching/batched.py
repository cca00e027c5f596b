"""The batched engine: many chains of many problems in one ragged batch over a cache of slots.

Each operation of a chain has a slot. A draw continues a sequence. The keys and values of the longest prefix that the slot
still holds are kept, and the rest of the sequence is read in pieces. Its last token is always fed by a decode step. Every
token of every chain is therefore drawn by the same code.

    scheduler.py      admits waiting chains to slots
    chains.py         the request of a chain, its answers, its cost and its turns
    operations.py     carries out a draw or a score in a slot
    slot_memory.py    keys and values of the slots
    decode_loop.py    decode steps of all live rows
    model_runner.py   forwards of the target

What makes it fast has switches in `Options` (docs/explanation/engine.md).

A ladder gives all shapes (`cache.py`). On a CPU in float32 the numbers of a row therefore do not depend on the rest of the
batch. `tests/engine/batching/test_batched.py` compares the engine with the reference engine, and with itself under other batch
sizes, orders and switches.

On a GPU a small step takes as long as the launches of its kernels, so decode steps are captured as CUDA graphs and replayed. A
graph has fixed shapes. So on a GPU the engine uses a short ladder of batches and key lengths, and captures each shape when it
is first needed. Steps run without a graph if rows draw with different sampling parameters, or share forwards.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import torch

from dflash_mcmc.draft.adaptation.drafter import AdaptiveDrafter
from dflash_mcmc.engine.batching import step_bits
from dflash_mcmc.engine.batching.cache import KVCache, cache_size, ladder_of, num_recent
from dflash_mcmc.engine.batching.chains import MeteredEngine
from dflash_mcmc.engine.batching.decode_loop import DecodeLoop, PlainSteps, Stop
from dflash_mcmc.engine.batching.interface import DEFAULTS, Counters, Finished, Options, Tag, TargetBlend
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner, SecondPrompts
from dflash_mcmc.engine.batching.operations import Operations
from dflash_mcmc.engine.batching.plan import Caches, Workload
from dflash_mcmc.engine.batching.rows import Group, Rows, SharedForwards, Status, Stepper
from dflash_mcmc.engine.batching.scheduler import Scheduler
from dflash_mcmc.engine.batching.slot_memory import PromptReader, SlotMemory
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.engine.speculative.blockwise import BlockSteps, MixedSteps
from dflash_mcmc.engine.speculative.drafter import BlockGrid, DFlashDrafter, Drafter, ModelDrafter
from dflash_mcmc.engine.speculative.speculation import Speculation
from dflash_mcmc.engine.speculative.speculator import Speculator, Tracer
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.ops import Chain

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
        self._stepper, self.cost, self._endings, self._version = stepper, stepper.cost, endings, endings.version
        self.tokens_a_step, self.reach = stepper.tokens_a_step, stepper.reach
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: SharedForwards | None = None) -> None:
        """See `Stepper.step`."""
        if len(groups) > 1 or riders is not None:
            self._stepper.step(cache, state, batch, key_length, groups, floors, riders)
            return
        if self._version != self._endings.version:
            self._graphs.clear()
            self._version = self._endings.version
        name = (batch, key_length, groups[0], floors, len(state.seen), len(state.counts), state.columns.shape[2])
        if name not in self._graphs:
            self._graphs[name] = self._capture(cache, state, batch, key_length, groups, floors)
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


class BatchedEngine(MeteredEngine):
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
        anti: a further model for the blend, after the companion; None without one.
        few_rows: whether products are those of few rows (`linear.py`).
    """

    def __init__(self, model: LanguageModel, blend: TargetBlend | None, num_slots: int, max_length: int,
                 options: Options = DEFAULTS, prompt_length: int | None = None,
                 speculation: Speculation[Drafter] | None = None, drafter: Drafter | None = None,
                 companion: LanguageModel | None = None, second: Mapping[bytes, np.ndarray] | None = None,
                 anti: LanguageModel | None = None, few_rows: bool = False):
        super().__init__()
        self.model, self.num_slots, self.options, self._few_rows = model, num_slots, options, few_rows
        proposer: Drafter | None = speculation.drafter if speculation else drafter
        work = Workload(model, max_length, prompt_length or max_length, options, proposer, companion, anti=anti)
        _check_positions(work)
        on_gpu, ladder = model.device.type == "cuda", ladder_of(model.device)
        implementation = work.implementation(model)
        if speculation and drafter not in (None, proposer):
            raise ValueError("given two drafters; allowed: one, which a decoder shares with blend and sampler")
        num_rows, longest = cache_size(model.device, num_slots, max_length, work.padding)
        made = step_bits.EngineSteps(proposer, speculation.rule if speculation else None, few_rows)
        if step_bits.free_rows(model, made, implementation) and all(
                _free_companion(each, work, few_rows) for each in (companion, anti)):
            ladder = ladder._replace(row_step=1)
        beside, subtracted, drafting = (None if each is None else ModelRunner(
            each, None, work.implementation(each), longest, ladder.key_step, options.prefill_chunk)
            for each in (companion, anti, proposer.model if isinstance(proposer, ModelDrafter) else None))
        grid = None if drafter is None else _grid(drafter, blend, num_rows, ladder.row_step, model.device)
        runner = ModelRunner(model, blend, implementation, longest, ladder.key_step, options.prefill_chunk,
                             proposer if proposer and proposer.companion else None, grid, beside,
                             None if second is None else SecondPrompts(second, num_rows, model.device), drafting,
                             subtracted)
        states = num_recent(options, work.num_drafted)
        caches = Caches(model, work.companions, num_rows, longest, work.padding, options.snapshot_every, states)
        prompts = PromptReader(runner, caches.prompts(min(options.read_ahead, num_slots), work.prompt_length))
        self._memory = SlotMemory(runner, caches.rows(), caches.rows(), prompts, options, ladder, work.padding, longest)
        rows = Rows(num_rows, longest, model.vocab_size, model.device, speculation.num_noise if speculation else 0)
        # A step of whole blocks feeds tokens before a row's position again. It needs keys and values alone.
        stepper, tracer = _stepper(runner, speculation, whole_blocks=not model.recurrent_nets)
        if options.cuda_graphs and on_gpu:
            reasons = [each.model.uncaptured for each in (runner, *runner.beside) if each.model.uncaptured]
            reason = reasons[0] if reasons else _uncaptured(speculation, grid, runner.adaptive)
            stepper = graphed(stepper, reason, runner.endings)
        steps = options.steps_between_checks or (4 if on_gpu and not model.recurrent_nets else 1)
        self._loop = DecodeLoop(rows, stepper, self._memory, ladder, steps, tracer)
        sharing = isinstance(stepper, PlainSteps | GraphedSteps) and not (grid or speculation)
        self._operations = Operations(self._memory, self._loop, speculation, options, sharing)

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
        scheduler = Scheduler(chains, self.num_slots, self._operations, self._memory, self._loop, self._meter)
        with closing(scheduler), self._memory.runner.ready(self._few_rows):
            yield from scheduler.fill()
            while scheduler.waits:
                yield from scheduler.end_steps(self._step(scheduler)) if scheduler.live else scheduler.fill()
                yield None
                if self._dropped:
                    yield from scheduler.drop(self._dropped)
                    self._dropped.clear()

    def _step(self, scheduler: Scheduler) -> Stop:
        """Reads the missing tokens of the rows, then steps the rows. Returns what has ended."""
        began, live = time.perf_counter(), len(scheduler.live)
        started = time.perf_counter()
        read = self._memory.read()
        if read[0]:
            self._meter.count_reading(*read, started)
        self._loop.prepare()
        started = time.perf_counter()
        stop = self._loop.run(scheduler.live)
        self._meter.count_steps(self._loop.steps_per_sync, stop.row_steps, scheduler.busy_slots, started)
        self._meter.share(began, live)
        return stop


def _free_companion(companion: LanguageModel | None, work: Workload, few: bool) -> bool:
    """Whether a step of the companion may have any number of rows. Blocks of a draft are not compared."""
    if companion is None:
        return True
    steps = step_bits.EngineSteps(few_rows=few)
    return work.drafter is None and step_bits.free_rows(companion, steps, work.implementation(companion))


def _check_positions(work: Workload) -> None:
    """Raises UserError if the longest sequence exceeds the positions of a model."""
    for model in work.models:
        name = "the model's" if model is work.model else "those of " + (
            "blend.model" if model is work.companion else "blend.anti_model" if model is work.anti else "draft.model")
        if model.max_positions is not None and work.max_length > model.max_positions:
            raise UserError(f"dataset.max_new_tokens: prompt and generation need {work.max_length} positions; allowed: "
                            f"{model.max_positions} ({name})")


def _uncaptured(speculation: Speculation[Drafter] | None, grid: BlockGrid | None,
                adaptive: AdaptiveDrafter | None) -> str | None:
    """Why an engine does not capture its steps; None if it does."""
    if adaptive is not None:
        return "the draft learns between steps"
    if speculation is not None and speculation.trace:
        return "decoder.trace reads every step"
    return "steps use a draft of every token" if grid is not None else None


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
