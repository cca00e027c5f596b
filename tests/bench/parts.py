"""The parts of the benchmark. Each takes a subject and the sizes, and returns table rows: dictionaries with the same keys."""

import copy
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch
from transformers import DynamicCache

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.cache import cache_argument
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.plan import Workload, predict
from dflash_mcmc.rng import Key
from tests.bench import decoders, equal_chains, measure
from tests.bench.measure import Measurement, Sizes, power_mh, run, temperature
from tests.bench.subject import Subject, subject_of

_REPEATS = 20


def overhead(subject: Subject, sizes: Sizes) -> list[dict]:
    """(c) Duration of an engine step relative to a bare forward of the same model at the same batch and context."""
    rows, half = [], subject._replace(causal_lm=copy.deepcopy(subject.causal_lm).to(torch.bfloat16))
    for batch in (8, 32, sizes.slots):
        for context in (64, 192):
            bare, ours = _bare_forward(subject, batch, context), _engine_step(subject, batch, context)
            rows.append({"batch": batch, "context": context, "bare forward ms": 1e3 * bare, "engine step ms": 1e3 * ours,
                         "ratio": ours / bare, "bare forward in bfloat16 ms": 1e3 * _bare_forward(half, batch, context)})
    return rows


def memory(subject: Subject, sizes: Sizes) -> list[dict]:
    """(f) Peak memory compared with the plan. Each measurement has a fresh process."""
    rows, longest = [], max(map(len, subject.prompts))
    for count in (8, sizes.slots):
        work = Workload(subject.model, longest + subject.horizon, longest, Options())
        planned = predict(work, count)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(_peak_bytes, (subject.name, subject.horizon, count))
        rows.append({"slots": count, "planned MB": planned.total / 1e6, "planned caches MB": planned.caches / 1e6,
                     "peak MB": peak / 1e6, "peak / planned": peak / planned.total})
    return rows


def growth(subject: Subject, sizes: Sizes) -> list[dict]:
    """(g) Cost of power sampling by blocks, steps, length and chains, in units of plain sampling."""
    slots = max(1, sizes.slots // 2)
    chains, rows = sizes.waves * slots, []
    shortest = subject.horizon // 4
    cases: Sequence[tuple[str, dict, dict]] = [
        *((f"{n} blocks of 2 steps", {"num_blocks": n}, {}) for n in (1, 2, 4, 8, 16)),
        *((f"4 blocks of {n} steps", {"num_blocks": 4, "num_steps": n}, {}) for n in (0, 1, 2, 5, 10)),
        *((f"4 blocks, length {n * shortest}", {"num_blocks": 4}, {"horizon": n * shortest}) for n in (1, 2, 4)),
        *((f"4 blocks, {n} chains a problem", {"num_blocks": 4}, {"chains_per_prompt": n}) for n in (1, 4)),
        *((f"16 blocks of {n} steps, schedule=adaptive", {"schedule": "adaptive", "num_steps": n}, {}) for n in (2, 4, 8)),
    ]
    for name, changes, extra in cases if subject.name == "tiny" else (cases[0], cases[2], cases[4]):
        unit = run(subject, temperature(0.25), slots, chains, label="temperature")  # each time, since a machine is not steady
        got = run(subject, power_mh(**changes), slots, chains, label=name, **extra)
        gain, error = measure.gain(got, unit) if not extra else (None, None)
        rows.append({"power_mh": name, **_rates(got), "time / temperature": got.seconds / unit.seconds,
                     "steps": got.mean_steps, "log p gained": gain, "+-": error,
                     "token-forwards": got.mean_cost("token_forwards"), "tokens drawn": got.mean_drawn,
                     "skipped": got.mean_cost("tokens_skipped"), "read tokens": got.counters.read_tokens / chains})
    return rows


PARTS: dict[str, Callable[[Subject, Sizes], list[dict]]] = {
    "c": overhead, "f": memory, "g": growth, "h": decoders.drawing, "i": decoders.chains, "o": equal_chains.against_generate}


def _rates(got: Measurement) -> dict:
    return {"problems/h": got.per_hour, "accepts": got.acceptance, "moved": got.moved}


def _median_seconds(call: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
        after()
    return float(np.median(times[_REPEATS // 4 :]))


@torch.inference_mode()
def _bare_forward(subject: Subject, batch: int, context: int) -> float:
    """Seconds of one forward of `transformers` with one token per row, with its own cache and with logits of all rows."""
    cache = DynamicCache()
    cached = {cache_argument(subject.causal_lm): cache, "use_cache": True}
    subject.causal_lm(input_ids=torch.full((batch, context), 9), logits_to_keep=1, **cached)
    fed, position = torch.full((batch, 1), 9), torch.full((batch, 1), context)

    return _median_seconds(lambda: subject.causal_lm(input_ids=fed, position_ids=position, **cached), lambda: cache.crop(-1))


@torch.inference_mode()
def _engine_step(subject: Subject, batch: int, context: int) -> float:
    """Seconds of one engine step, including draw and bookkeeping, with about `context` tokens in every row."""
    stops, subject.model.stop_ids = subject.model.stop_ids, ()
    try:
        engine = BatchedEngine(subject.model, None, batch, context + 2 * _REPEATS, Options())
        prompt = np.full(context, 9)
        running = engine.steps((n, temperature(0.25).chain(prompt, 2 * _REPEATS, Key(n))) for n in range(batch))
        next(running)
        seconds = _median_seconds(lambda: next(running))
        running.close()
    finally:
        subject.model.stop_ids = stops
    return seconds


def _peak_bytes(name: str, horizon: int, slots: int) -> int:
    """Memory of an engine and its run, without the loaded model."""
    subject, process = subject_of(name, horizon), psutil.Process()
    run(subject, temperature(1.0), 1, 1)  # PyTorch's one-time allocations do not belong to the engine
    before, peak, stopped = process.memory_info().rss, 0, threading.Event()

    def watch():
        nonlocal peak
        while not stopped.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    measure.run(subject, power_mh(num_blocks=1), slots, 2 * slots)
    stopped.set()
    watcher.join()
    return peak - before
