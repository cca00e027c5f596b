"""Compares speculative with plain decoding, and with assisted generation of transformers, for a target and a draft model.

    python -m tests.bench.pair model=qwen2_5_coder_1_5b draft=qwen2_5_coder_0_5b decoder=speculative_match sampler=greedy \
        dataset=gsm8k dataset.path=$GSM8K dataset.limit=6 hardware.num_slots=1

The overrides are those of a run on a CPU. All cases draw the same problems and take turns, `hardware.num_slots` chains at a
time, so that a slow minute affects all of them. `ratio` compares tokens for each second with plain decoding by the engine, and
`processor` tokens for each second of processor time. With one slot,
`sampler=greedy` and `sampler=temperature` are also drawn by `generate`, alone and with `assistant_model` for a draft model.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from dflash_mcmc.config import command
from dflash_mcmc.config.schema import Config
from dflash_mcmc.process import program
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.greedy import Greedy
from dflash_mcmc.sampler.temperature import Temperature
from tests.bench.__main__ import table
from tests.bench.measure import PLAIN, Decoding, result_of, run
from tests.bench.subject import Subject, prompts_of

Spent = tuple[float, float, list[list[int]], tuple[int, int]]
"""Seconds, seconds of processor time, the tokens of each answer, and (drafted tokens that were kept, blocks)."""


def compare(config: Config) -> list[dict]:
    """The rows of a table, one for each case."""
    model, source = config.model.load("cpu"), config.model
    prompts = prompts_of(config, model)
    slots = config.hardware.num_slots or len(prompts)
    law = 0.0 if isinstance(config.sampler, Greedy) else getattr(config.sampler, "temperature", 0.0)
    theirs = isinstance(config.sampler, Greedy | Temperature) and slots == 1
    causal_lm, helper = (AutoModelForCausalLM.from_pretrained(path, dtype=model.dtype).eval() if theirs and path else None
                         for path in (source.path, getattr(config.draft, "model", None)))
    subject = Subject("pair", causal_lm, model, prompts, config.dataset.max_new_tokens)
    cases: dict[str, Any] = {"plain": PLAIN, "speculative": Decoding("speculative", config.decoder, config.draft)}
    if theirs:
        cases |= {"generate": None} if helper is None else {"generate": None, "generate, assisted": helper}
    turns = [{name: _drawn(subject, config.sampler, case, slots, first) if isinstance(case, Decoding) else
              _generated(subject, law, case, first) for name, case in cases.items()}
             for first in range(0, len(prompts), slots)]
    found = {name: [turn[name] for turn in turns] for name in cases}
    rates = {name: [_tokens(spent) / sum(each[clock] for each in spent) for clock in (0, 1)] for name, spent in found.items()}
    answers = {name: [tokens for each in spent for tokens in each[2]] for name, spent in found.items()}
    rows = []
    for name, spent in found.items():
        kept, blocks = (sum(each[3][part] for each in spent) for part in (0, 1))
        same = [mine == plain for mine, plain in zip(answers[name], answers["plain"], strict=True)]
        rows.append({"by": name, "answers": len(same), "tokens": _tokens(spent), "tau": 1 + kept / blocks if blocks else None,
                     "tokens/s": rates[name][0], "ratio": rates[name][0] / rates["plain"][0],
                     "processor": rates[name][1] / rates["plain"][1], "answers of plain": sum(same) / len(same)})
    return rows


def _tokens(spent: list[Spent]) -> int:
    return sum(len(tokens) for each in spent for tokens in each[2])


def _drawn(subject: Subject, sampler: Any, decoding: Decoding, slots: int, first: int) -> Spent:
    count = min(slots, len(subject.prompts) - first)
    got = run(subject, sampler, slots, count, decoding=decoding, first=first, label=decoding.name)
    done = sorted(got.done, key=lambda chain: chain.tag)
    cost = [sum(getattr(chain.cost, name) for chain in done) for name in ("tokens_kept", "blocks_drafted")]
    return got.seconds, got.processor, [result_of(chain).trajectory.tokens.tolist() for chain in done], (cost[0], cost[1])


def _generated(subject: Subject, temperature: float, helper: Any, number: int) -> Spent:
    settings = GenerationConfig(
        max_new_tokens=subject.horizon, do_sample=temperature > 0, temperature=temperature or None,
        top_k=0 if temperature else None, eos_token_id=list(subject.model.stop_ids), pad_token_id=0)
    prompt = torch.from_numpy(subject.prompts[number])[None]
    torch.manual_seed(Key(0).fold_in("bench", "generate", number).integer(2**31))
    started, processor = time.perf_counter(), time.process_time()
    drawn = subject.causal_lm.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings,
                                       **({} if helper is None else {"assistant_model": helper}))
    tokens = drawn[0, prompt.shape[1] :].tolist()
    return time.perf_counter() - started, time.process_time() - processor, [tokens], (0, 0)


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    (job,) = command.check_command([*arguments, "tracker=none"]).jobs
    torch.set_num_threads(job.config.hardware.num_threads or torch.get_num_threads())
    print(table(compare(job.config)))


if __name__ == "__main__":
    main()
