"""Measures vLLM next to the engine of slots, in the environment of `make vllm`:

    python -m tests.vllm.measure rates FOLDER [HORIZON [STEPS [CHAINS...]]]    rates, and the share of the processor
    python -m tests.vllm.measure memory FOLDER [SAMPLERS...]                    peak memory at a horizon of 2,048 tokens

FOLDER is a checkpoint, run in float32. Each engine has a process of its own. For the rates the processes take turns, case by
case, so that both see the same load of the machine; a process that waits takes no processor time. Seconds are those of the
clock, CPU seconds those of the process on all its threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

SAMPLERS, CHAINS, TURNS, HORIZON, STEPS = ("temperature", "power_mh"), (1, 8, 32), 2, 64, 4
LONG, CACHE_BYTES, MEMORY_CHAINS = 2048, int(6e8), 32
ALPHA = 1.5
"""Of power_mh at the long horizon: a small model repeats itself to the horizon at larger ones."""
ENGINES, PARTS = ("slots", "vllm"), ("step", "processor", "rows", "take", "add")
MEMORY = {"slots": ("slots", 0), "vllm": ("vllm", CACHE_BYTES)}


class Clock:
    """CPU seconds of this thread in functions of the session, the processor and vLLM, by name."""

    def __init__(self) -> None:
        from dflash_mcmc.engine.vllm import core, drawing

        self.seconds: dict[str, float] = {}
        for name, owner, method in (("processor", drawing.RequestRows, "apply"), ("rows", drawing.RequestRows, "update"),
                                    ("take", core.VllmCore, "take"), ("add", core.VllmCore, "add"),
                                    ("step", core.VllmCore, "step")):
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, call: Callable) -> Callable:
        def timed(*given: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*given)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - started
        return timed


class Process:
    """An engine with its model, in this process."""

    def __init__(self, name: str, folder: Path, horizon: int, most_chains: int, cache_bytes: int):
        from dflash_mcmc.engine.vllm import starting as vllm_target
        from dflash_mcmc.model.hf import HFModel

        chosen = HFModel(path=str(folder), revision=None, dtype="float32", chat=True, enable_thinking=False,
                         rope_scaling=None, head_copy=None)
        questions = ("What is {} * {}? Explain.", "A train goes {} km in {} hours. How fast is it? Think step by step.")
        tokenizer = chosen.tokenizer()
        self.horizon, self.clock = horizon, Clock() if name == "vllm" else None
        _import(name)
        self.imports = psutil.Process().memory_info().rss
        model = None if name == "vllm" else chosen.load("cpu")
        target = vllm_target.read(folder, "float32", "cpu", tokenizer) if model is None else model
        self.prompts = [target.encode(chosen.prompt(tokenizer, questions[i % 2].format(13 + i, 5 + i))) for i in range(8)]
        longest = max(map(len, self.prompts)) + horizon
        if model is None:
            from tests.vllm.running import engine_of

            self.engine = lambda count: engine_of(target, count, max_num_seqs=most_chains, max_model_len=longest,
                                                  kv_cache_bytes=cache_bytes)
        else:
            self.engine = lambda count: _slots(model, count, longest)

    def run(self, sampler_name: str, steps: int, count: int) -> dict[str, Any]:
        """Runs a sampler on a number of chains, after a short run that is not measured."""
        from dflash_mcmc.rng import Key
        from tests.bench.measure import power_mh, temperature

        alpha = {} if self.horizon < LONG else {"alpha": ALPHA}
        sampler = temperature(0.7) if sampler_name == "temperature" else power_mh(num_blocks=4, num_steps=steps, **alpha)
        engine = self.engine(count)
        list(engine.run([(0, temperature(1.0).chain(self.prompts[0], 4, Key(0)))]))
        ready = psutil.Process().memory_info().rss
        if self.clock:
            self.clock.seconds.clear()
            engine._core._engine.reset_prefix_cache()  # what an earlier turn has read
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident set so far is forgotten
        started, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        done = list(engine.run((i, sampler.chain(self.prompts[i % len(self.prompts)], self.horizon, Key(i)))
                               for i in range(count)))
        found = {"seconds": time.perf_counter() - started, "CPU seconds": time.process_time() - cpu,
                 "thread": time.thread_time() - thread, **(self.clock.seconds if self.clock else {})}
        for field in ("tokens_drawn", "token_forwards"):
            found[field] = sum(getattr(each.cost, field) for each in done)
        found["length"] = sum(each.result.trajectory.length for each in done) / count
        found["longest"] = max(each.result.trajectory.length for each in done)
        found["peak"], found["ready"], found["imports"] = _peak(), ready, self.imports
        return found


def _slots(model: Any, count: int, longest: int) -> Any:
    """The engine of slots."""
    from dflash_mcmc.blend.none import NoBlend
    from dflash_mcmc.engine.batching.batched import BatchedEngine

    return BatchedEngine(model, NoBlend(), count, longest)


def _import(name: str) -> None:
    """Imports what the engine needs."""
    if name == "vllm":
        from dflash_mcmc.engine.vllm.core import prepare_environment

        prepare_environment()
        import vllm.v1.engine.llm_engine  # noqa: F401
    else:
        import transformers

        transformers.AutoModelForCausalLM  # noqa: B018 - imported when it is asked for


def _peak() -> int:
    """Bytes of the largest resident set of this process since it was last forgotten."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def serve(name: str, folder: str, horizon: str, most_chains: str, cache_bytes: str) -> None:
    """Runs the cases that come as lines, and answers each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    process = Process(name, Path(folder), int(horizon), int(most_chains), int(cache_bytes))
    for line in sys.stdin:
        print(json.dumps(process.run(*json.loads(line))), file=answers, flush=True)


def started(name: str, folder: str, horizon: int, most_chains: int, cache_bytes: int) -> subprocess.Popen:
    """A process that serves an engine."""
    command = [sys.executable, "-m", "tests.vllm.measure", "serve", name, folder, str(horizon), str(most_chains),
               str(cache_bytes)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen, *case: str | int) -> dict[str, Any]:
    """The measurement of a case: sampler, steps a block, chains."""
    begin(process, *case)
    return answer(process)


def begin(process: subprocess.Popen, *case: str | int) -> None:
    """Lets a process begin a case."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen) -> dict[str, Any]:
    """The measurement of the case that a process has begun."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def rates(folder: str, horizon: str = str(HORIZON), steps: str = str(STEPS), *chains: str) -> None:
    """Both engines in turns."""
    counts = [int(count) for count in chains] or CHAINS
    caches = {"slots": 0, "vllm": int(4e8)}
    processes = {name: started(name, folder, int(horizon), max(counts), caches[name]) for name in ENGINES}
    rows, details = [], []
    for count in counts:
        for sampler in SAMPLERS:
            turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
            for name in ENGINES * TURNS:
                turns[name].append(ask(processes[name], sampler, int(steps), count))
            best = {name: min(found, key=lambda each: each["CPU seconds"]) for name, found in turns.items()}
            wall = {name: sum(each["seconds"] for each in found) / TURNS for name, found in turns.items()}
            rows += [{"engine": name, "sampler": sampler, "chains": count, "seconds": wall[name],
                      "CPU seconds": best[name]["CPU seconds"], "tokens drawn/CPU s":
                      best[name]["tokens_drawn"] / best[name]["CPU seconds"], "token-forwards": best[name]["token_forwards"],
                      "rate to slots (CPU)": best["slots"]["CPU seconds"] / best[name]["CPU seconds"],
                      "rate to slots (clock)": wall["slots"] / wall[name], "peak GB": best[name]["peak"] / 1e9}
                     for name in ENGINES]
            found = best["vllm"]
            shares = {f"{part} %": 100 * found[part] / found["thread"] for part in PARTS}
            details.append({"sampler": sampler, "chains": count, **shares})
            print(json.dumps([rows[-2:], details[-1]]), file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f"))
    print()
    print(tabulate(details, headers="keys", tablefmt="github", floatfmt=".1f"))
    for process in processes.values():
        process.communicate()


def memory(folder: str, *samplers: str) -> None:
    """Each engine alone in a process: the largest resident set while the chains run, and its parts.

    Imports, weights and what is ready before the first chain do not depend on the work. The rest is keys, values, work space.
    """
    weights, rows = 2 * sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")), []  # from bfloat16
    for sampler in samplers or SAMPLERS:
        processes = {case: started(name, folder, LONG, MEMORY_CHAINS, size) for case, (name, size) in MEMORY.items()}
        for process in processes.values():
            begin(process, sampler, 1, MEMORY_CHAINS)
        for case, process in processes.items():
            found = answer(process)
            process.communicate()
            rows.append({"engine": case, "sampler": sampler, "mean length": found["length"], "longest": found["longest"],
                         "CPU seconds": found["CPU seconds"], "peak GB": found["peak"] / 1e9,
                         "imports GB": found["imports"] / 1e9, "weights GB": weights / 1e9,
                         "ready GB": found["ready"] / 1e9, "above ready GB": (found["peak"] - found["ready"]) / 1e9})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    {"rates": rates, "memory": memory, "serve": serve}[sys.argv[1]](*sys.argv[2:])
