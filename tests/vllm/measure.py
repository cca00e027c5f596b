"""Measures vLLM next to the engine of slots: `python -m tests.vllm.measure FOLDER`, in the environment of `make vllm`.

FOLDER is a checkpoint. Each engine has a process of its own, which does the same chains; its memory is the largest resident
set. The first run of an engine is not measured.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

HORIZON, PROMPTS, CHAINS = 64, 8, (1, 8, 32)


def measure(name: str, folder: Path, horizon: int) -> list[dict]:
    """Rows of the table for an engine."""
    from dflash_mcmc.bench.measure import power_mh, temperature
    from dflash_mcmc.blend.none import NoBlend
    from dflash_mcmc.inference.batched import BatchedEngine
    from dflash_mcmc.inference.vllm import rows as processor
    from dflash_mcmc.model.hf import HFModel
    from dflash_mcmc.rng import Key
    from tests.vllm.running import engine_of, saved

    chosen = HFModel(path=str(folder), revision=None, dtype="float32", chat=True, enable_thinking=False, rope_scaling=None)
    model = chosen.load("cpu")
    prompts = [model.encode(chosen.prompt(model.tokenizer, f"What is {3 + i} * {5 + i}? Explain.")) for i in range(PROMPTS)]
    longest, target, found = max(map(len, prompts)) + horizon, saved(model, folder), []
    if name == "vllm":
        del model
    apply, spent = processor.BatchRows.apply, [0.0]

    def timed(self, logits):
        started = time.perf_counter()
        try:
            return apply(self, logits)
        finally:
            spent[0] += time.perf_counter() - started

    processor.BatchRows.apply = timed
    for sampler_name, sampler in (("temperature", temperature(0.7)), ("power_mh", power_mh(num_blocks=4, num_steps=4))):
        for number in CHAINS:
            engine = BatchedEngine(model, NoBlend(), number, longest) if name == "slots" else engine_of(
                target, number, max_num_seqs=max(CHAINS), max_model_len=longest, kv_cache_bytes=int(4e8))
            list(engine.run([(0, temperature(1.0).chain(prompts[0], 4, Key(0)))]))
            started, spent[0] = time.perf_counter(), 0.0
            done = list(engine.run(((i,), sampler.chain(prompts[i % PROMPTS], horizon, Key(i))) for i in range(number)))
            seconds = time.perf_counter() - started
            cost = [sum(getattr(each.cost, field) for each in done) for field in ("tokens_drawn", "token_forwards")]
            found.append({"engine": name, "sampler": sampler_name, "chains": number, "seconds": seconds,
                          "tokens drawn/s": cost[0] / seconds, "token-forwards": cost[1],
                          "processor, % of the time": 100 * spent[0] / seconds,
                          "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6})
    return found


def main(folder: str, horizon: str = str(HORIZON), engine: str = "") -> None:
    """Prints the table."""
    if engine:
        print("\n" + json.dumps(measure(engine, Path(folder), int(horizon))))
        return
    rows = []
    for name in ("slots", "vllm"):
        command = [sys.executable, "-m", "tests.vllm.measure", folder, horizon, name]
        rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".1f"))


if __name__ == "__main__":
    main(*sys.argv[1:])
