"""`make bench-gpu`: what a step on a GPU costs beside what its memory traffic costs, with random weights at Qwen3-4B's shape.

    python -m tests.bench.gpu outputs/bench_gpu          the parts that the folder lacks (below 6 minutes on an H200)
    python -m tests.bench.gpu outputs/bench_gpu --tiny   the whole command on a CPU, with a tiny model; its times mean nothing

Each part is a file, written when the part is complete. A command that is stopped or runs out of `--seconds` goes on where it
was; `--fresh` measures again. The table, of all parts that there are, is printed and written to `table.md`, for
docs/about/hardware.md. The limit of a step is the time that its bytes take (weights once, keys and values of all rows once) at
the bandwidth at which this process copies memory.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen2Config, Qwen3Config

from dflash_mcmc.draft import Draft
from dflash_mcmc.draft.network.checkpoint import default_target_layers
from dflash_mcmc.draft.network.dflash import DFlashShape
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import Workload, free_bytes, predict
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.store.files import write_atomically
from tests.bench import decoders, equal_chains, random_weights
from tests.bench.__main__ import table
from tests.bench.measure import PLAIN, Decoding, power_mh, result_of, temperature
from tests.bench.subject import Subject

_COMMON: dict[str, Any] = dict(max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=None,
                               eos_token_id=None, pad_token_id=None,
                               rope_parameters={"rope_type": "default", "rope_theta": 1e6})
"""Without stop ids: every answer has the full length."""
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3-4B": (Qwen3Config, dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                                   num_attention_heads=32, num_key_value_heads=8, head_dim=128)),
    "Qwen2.5-1.5B": (Qwen2Config, dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                                       num_attention_heads=12, num_key_value_heads=2)),
    "Qwen2.5-0.5B": (Qwen2Config, dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                       num_attention_heads=14, num_key_value_heads=2)),
}
TINY = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8)
_DRAFT_LAYERS, _BLOCK = 5, 16
_GIB = 2**30


class Sizes(NamedTuple):
    """Lengths of prompts and answers, and numbers of slots."""

    prompt: int = 480
    horizon: int = 64
    slots: tuple[int, ...] = (1, 8, 64, 256)
    pair: int = 64
    """Slots of the comparison of samplers."""
    against: tuple[int, ...] = (1, 8, 64)
    copied: int = 4 * _GIB
    """Bytes of the copy that gives the bandwidth."""


_AIMS = {1: 1.8, 8: 1.8, 64: 2.2, 256: 2.5}
"""Largest ratio to the limit, by the number of slots."""


class RandomDraft(Draft):
    """A random draft at the shape of Qwen3-4B-DFlash-b16. No token of it is accepted: what it costs is what is measured."""

    def __init__(self, target: LanguageModel):
        config, layers = target.config, len(target.layers)
        shape = DFlashShape(
            hidden_size=config.hidden_size, num_layers=_DRAFT_LAYERS, num_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads, head_dim=config.head_dim, intermediate_size=config.intermediate_size,
            block_size=_BLOCK, mask_token_id=target.vocab_size - 1,
            target_layers=default_target_layers(layers, min(layers, _DRAFT_LAYERS)), num_target_layers=layers,
            rope=dict(config.rope_parameters), max_positions=config.max_position_embeddings,
            sliding=(None,) * _DRAFT_LAYERS, dtype=target.dtype)
        self.network = random_weights.draft(shape, target.dtype, str(target.device))
        self._drafter = DFlashDrafter(self.network, target, _BLOCK)

    def load(self, target: LanguageModel) -> DFlashDrafter:
        """The drafter."""
        return self._drafter


class Bench:
    """The models, and what the parts share."""

    def __init__(self, tiny: bool):
        self.tiny, self.device = tiny, torch.device("cpu" if tiny else "cuda")
        self.sizes = Sizes(20, 6, (1, 2), 2, (1, 2), 2**20) if tiny else Sizes()
        self.options = Options(prefill_chunk=64 if tiny else 512)
        self._models = dict[str, LanguageModel]()
        self.causal_lm: Any = None
        self.seconds_to_start, self.cached = 0.0, any(_triton_cache().glob("*"))

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a copy, read and written, the best of several."""
        source = torch.zeros(self.sizes.copied // 4, device=self.device)
        target = torch.empty_like(source)
        return max(2 * self.sizes.copied / _seconds(lambda: target.copy_(source)) for _ in range(5))

    def model(self, name: str = "Qwen3-4B") -> LanguageModel:
        """A model with random weights. Its start is measured once: from the weights in memory to the first tokens."""
        if name not in self._models:
            kind, shape = CONFIGS[name]
            config = kind(**(TINY if self.tiny else shape), **_COMMON)
            causal_lm = random_weights.target(config, torch.float32 if self.tiny else torch.bfloat16, str(self.device))

            def start() -> None:
                self._models[name] = LanguageModel(causal_lm, head_copy=False, packs=True)
                self.drawn(name, 1, temperature(1.0), horizon=4)

            seconds = _seconds(start)
            if self.causal_lm is None:
                self.causal_lm, self.seconds_to_start = causal_lm, seconds
        return self._models[name]

    def drawn(self, name: str, slots: int, sampler: Sampler, decoding: Decoding = PLAIN, prompt: int | None = None,
              horizon: int | None = None, graphs: bool = True) -> dict:
        """Milliseconds of a step, tokens a second and memory of the second of two waves of chains. The first one captures."""
        model, prompt, horizon = self.model(name), prompt or self.sizes.prompt, horizon or self.sizes.horizon
        drafter = decoding.draft.load(model) if decoding.draft else None
        speculation = decoding.decoder.speculation(drafter) if decoding.decoder else None
        options = self.options._replace(cuda_graphs=graphs)
        planned = predict(Workload(model, prompt + horizon, prompt, options, drafter), slots).total
        if planned > free_bytes(self.device):
            return {"slots": slots, "aim": f"{planned / _GIB:.0f} GiB do not fit"}
        before = 0 if self.tiny else torch.cuda.memory_allocated()
        engine = BatchedEngine(model, None, slots, prompt + horizon, options, prompt, speculation)
        prompts = np.random.default_rng(0).integers(model.vocab_size - 1, size=(slots, prompt))
        for wave in range(2):
            engine.reset_counters()
            done = list[Any]()
            seconds = _seconds(lambda: done.extend(engine.run(  # noqa: B023
                (number, sampler.chain(tokens, horizon, Key(wave).fold_in("bench", number)))  # noqa: B023
                for number, tokens in enumerate(prompts))))
        counters = engine.counters
        tokens = sum(chain.cost.tokens_drawn for chain in done if result_of(chain))
        limit = 1e3 * (self.step_bytes(model, decoding) + slots * (prompt + horizon // 2) * model.cache_shape.token_bytes())
        row = {"slots": slots, "ms a step": 1e3 * counters.step_seconds / counters.steps, "limit, ms": limit / self.bandwidth,
               "tokens/s": tokens / seconds}
        row["ratio"] = row["ms a step"] / row["limit, ms"]
        if not self.tiny:
            row["peak / planned"] = (torch.cuda.max_memory_allocated() - before) / planned
            torch.cuda.reset_peak_memory_stats()
        return row

    def step_bytes(self, model: LanguageModel, decoding: Decoding = PLAIN) -> int:
        """Bytes of the weights that a step reads: all but the embedding, and a draft's."""
        networks = [model.layers, model.head, *([decoding.draft.network] if isinstance(decoding.draft, RandomDraft) else [])]
        return sum(weight.numel() * weight.itemsize for network in networks for weight in network.parameters())


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def start(bench: Bench) -> list[dict]:
    """The start beyond the weights: the loop of layers, its kernels, an engine and its graphs."""
    bench.model()
    case = f"start, kernels {'on disk' if bench.cached else 'compiled'}, s"
    return [_judged({"case": case, "measured": bench.seconds_to_start, "aim": "at most 60"}, bench.seconds_to_start <= 60)]


def kernels(bench: Bench) -> list[dict]:
    """Kernels of a step, by the profiler, on a GPU alone."""
    if bench.tiny:
        return [{"case": "kernels a step"}]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        bench.drawn("Qwen3-4B", 1, temperature(1.0), prompt=2, horizon=32, graphs=False)
    ran = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [{"case": "kernels a step", "measured": len(ran) / (2 * 31), "aim": "about 380"}]


def slots(number: int) -> Callable[[Bench], list[dict]]:
    """A step of so many slots."""
    def part(bench: Bench) -> list[dict]:
        row = {"case": "temperature", **bench.drawn("Qwen3-4B", number, temperature(1.0))}
        return [_judged({"aim": f"ratio at most {_AIMS[number]}", **row}, row.get("ratio", 9) <= _AIMS[number])
                if number in _AIMS else row]
    return part


def samplers(bench: Bench) -> list[dict]:
    """`power_mh` over `temperature`, tokens drawn a second, of short prompts."""
    number, short = bench.sizes.pair, bench.sizes.prompt // 10
    chosen = {"temperature": temperature(1.0), "power_mh": power_mh(num_blocks=2 if bench.tiny else 16)}
    rows = [{"case": f"{name}, prompts of {short}", **bench.drawn("Qwen3-4B", number, sampler, prompt=short)}
            for name, sampler in chosen.items()]
    ratio = rows[1]["tokens/s"] / rows[0]["tokens/s"]
    return [*rows, _judged({"case": "power_mh / temperature, tokens/s", "slots": number, "measured": ratio,
                            "aim": "at least .9"}, ratio >= 0.9)]


def blocks(bench: Bench) -> list[dict]:
    """Blocks of a DFlash draft, verified together."""
    draft = RandomDraft(bench.model())
    row = bench.drawn("Qwen3-4B", 1, temperature(1.0), decoders.match("DFlash", draft, 0.0))
    return [_judged({"case": f"DFlash, {_BLOCK} tokens verified", "aim": "at most 6 ms", **row}, row.get("ms a step", 9) <= 6)]


def others(bench: Bench) -> list[dict]:
    """The shapes of smaller models."""
    return [{"case": f"{name}, temperature", **bench.drawn(name, number, temperature(1.0))}
            for name in list(CONFIGS)[1:] for number in bench.sizes.slots[::2]]


def against(number: int) -> Callable[[Bench], list[dict]]:
    """The rate of `transformers.generate` with a static cache, which it compiles on a GPU."""
    def part(bench: Bench) -> list[dict]:
        model = bench.model()
        prompts = list(np.random.default_rng(1).integers(model.vocab_size - 1, size=(number, 48)))
        subject = Subject("gpu", bench.causal_lm, model, prompts, bench.sizes.horizon)
        rows = equal_chains.compared(subject, prompts, bench.sizes.horizon, turns=2, cache_implementation="static")
        ratio = rows[1]["rate / generate"]
        return [_judged({"case": "rate / generate, static and compiled", "slots": number, "measured": ratio,
                         "tokens/s": 1e3 / rows[1]["ms a token"], "aim": "at least 1.2"}, ratio >= 1.2)]
    return part


def _judged(row: dict, met: bool) -> dict:
    return {**row, "met": "yes" if met else "no"}


def parts_of(sizes: Sizes) -> dict[str, Callable[[Bench], list[dict]]]:
    """The parts by the names of their files, in their order. Those that compile other code come last."""
    return {"start": start, "kernels": kernels, **{f"slots_{number}": slots(number) for number in sizes.slots},
            "samplers": samplers, "blocks": blocks, "others": others,
            **{f"against_{number}": against(number) for number in sizes.against}}


_COLUMNS = ("case", "slots", "ms a step", "limit, ms", "ratio", "tokens/s", "measured", "aim", "met", "peak / planned")


def report(folder: Path, machine: str, names: list[str]) -> str:
    """The table of the parts that the folder has, and the names of those that it lacks."""
    stored = {name: json.loads(path.read_text()) for name in names if (path := folder / f"{name}.json").is_file()}
    rows = [{column: row.get(column) for column in _COLUMNS} for part in stored.values() for row in part]
    missing = [name for name in names if name not in stored]
    lines = [machine, "", table(rows) if rows else "no part is complete", ""]
    return "\n".join([*lines, *([f"not measured: {', '.join(missing)}", ""] if missing else [])])


def main(arguments: list[str]) -> int:
    """Measures what is missing. Returns the exit code: 0 if all parts are there."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--fresh", action="store_true", help="measure all parts again")
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no further part after so long")
    given = parser.parse_args(arguments)
    if not given.tiny and not torch.cuda.is_available():
        parser.error("no GPU: PyTorch finds none here; allowed: --tiny")
    began, bench = time.monotonic(), Bench(given.tiny)
    given.folder.mkdir(parents=True, exist_ok=True)
    name = "CPU, tiny model: its times mean nothing" if given.tiny else torch.cuda.get_device_name()
    machine = f"{name}, PyTorch {torch.__version__}, copies {bench.bandwidth / 1e12:.3g} TB/s, {time.strftime('%Y-%m-%d')}"
    parts = parts_of(bench.sizes)
    for part, measure in parts.items():
        path = given.folder / f"{part}.json"
        if (given.fresh or not path.is_file()) and time.monotonic() - began < given.seconds:
            print(f"{time.monotonic() - began:.0f} s: {part}", file=sys.stderr, flush=True)
            write_atomically(path, json.dumps(measure(bench)) + "\n")
            write_atomically(given.folder / "table.md", report(given.folder, machine, list(parts)))
    text = report(given.folder, machine, list(parts))
    print(text)
    return int("not measured" in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
