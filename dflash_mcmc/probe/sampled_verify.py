"""Sample and match against plain sampling on a real pair: the measurements of the pull request that introduced it.

The document is lucebox PR 374, "sampled-verify: speculative decoding with an active sampler". Here are how generations are
drawn by each decoder, the prompt of the agent's workload, the tables of the workloads, and measures of degeneration: how much
a text repeats itself.
"""

import json
import math
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dflash_mcmc.chains import build, cost
from dflash_mcmc.components import Settings, identity, name_of, register, registered, runtime
from dflash_mcmc.dataset.inputs.conversations import template_at
from dflash_mcmc.engine import slots
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.probe import Each, Observations, Probe, Summary, Table, Unit, Work
from dflash_mcmc.process import ranks
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.statistics import paired
from dflash_mcmc.statistics.estimates import Clusters, wilson
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.rules import Speculation

PLAIN, SAME_KEY, MATCH = "plain", "same_key", "speculative_match"
SHORT, LONG, AGENT = "short", "long", "agent"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_SYSTEM = "You are a coding agent. Repository:\n"
_REQUEST = "Read {path} with a tool call. Do not answer without the call."
_VERBS, _NOUNS = ("load", "parse", "merge", "check", "store"), ("row", "index", "block", "token", "cache")


def _tool(name: str, description: str, argument: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}}}


TOOLS = (_tool("read_file", "Returns the content of a file.", "path"),
         _tool("search", "Returns the lines of the repository that contain a text.", "text"),
         _tool("run_tests", "Runs the tests of a folder.", "folder"))
"""Tools in the form that chat templates of `transformers` take."""


class GenerationTask(NamedTuple):
    """The generations of one unit."""

    unit: Unit
    workload: str
    prompt: np.ndarray
    """int64 (length,)."""
    horizon: int


def speculation_of(arm: str, drafter: "Drafter | None", window: int) -> "Speculation | None":
    """The rule of a decoder, `speculative_match`, `same_key` or a fault, for an engine; None for `plain`."""
    if arm == PLAIN:
        return None
    from dflash_mcmc.engine.speculative import rules

    rule, fault = rules.matching(None if arm in (SAME_KEY, MATCH) else arm, window)
    noisy = arm not in (SAME_KEY, MATCH)
    return rules.Speculation(rule, drafter, shared_noise=True, temperature=0.0, noisy=noisy, fault=fault)


def draw(config: Settings, model: "LanguageModel", speculation: "Speculation | None", sampler: Sampler,
         tasks: Sequence[GenerationTask], keys: Sequence[Key]) -> list[dict]:
    """Draws the generations of all tasks in one batch, and returns a cell of a record for each.

    `seconds` is the time of the batch divided by the number of tasks.
    """
    longest = max(len(task.prompt) for task in tasks)
    # Rows of the cache are as long as the longest prompt and `max_new_tokens`, whatever the horizon of a task.
    total = max(len(task.prompt) + task.horizon for task in tasks)
    own: Any = config  # a dataclass, as every component
    sized = replace(own, dataset=replace(own.dataset, max_new_tokens=total - longest))
    engine = slots.engine_of(sized, model, longest, len(tasks) * ranks.place().total, None, speculation)
    chains = [(index, sampler.chain(task.prompt, task.horizon, key))
              for index, (task, key) in enumerate(zip(tasks, keys, strict=True))]
    start, cells = time.perf_counter(), dict[int, dict]()
    for done in engine.run(iter(chains)):
        costs = {"target_forwards": done.cost.target_forwards}
        cells[done.tag] = ({"failure": done.failure, **costs} if done.result is None else
                           {"tokens": done.result.trajectory.tokens.tolist(), **costs})
    seconds = (time.perf_counter() - start) / len(tasks)
    return [{**cells[index], "seconds": seconds} for index in range(len(tasks))]


def agent_messages(key: Key, num_lines: int) -> list[dict[str, str]]:
    """A conversation: a system turn with `num_lines` lines of code, and a user turn that needs a tool."""
    stream = Stream(key)

    def line(number: int) -> str:
        verb, noun, value = stream.choice(_VERBS), stream.choice(_NOUNS), stream.integer(0, 1000)
        head = "" if number % 20 else f"# src/{noun}_{number // 20}.py\n"
        return f"{head}def {verb}_{noun}_{number}(x): return x + {value}\n"

    code = "".join(line(number) for number in range(num_lines))
    return [{"role": "system", "content": _SYSTEM + code}, {"role": "user", "content": _REQUEST.format(path="src/main.py")}]


def agent_prompt(render: Callable[[list[dict[str, str]], list[dict] | None], np.ndarray], key: Key,
                 length: int) -> tuple[np.ndarray, bool]:
    """The prompt with as many lines of code as fit into `length` tokens, and whether the chat template shows the tools in it.

    A prompt without lines may be longer than that.

    Args:
        render: (messages, tools) -> token ids int64.
    """
    def size(num_lines: int) -> int:
        return len(render(agent_messages(key, num_lines), list(TOOLS)))

    high = 1
    while size(high) <= length:
        high *= 2
    chosen = agent_messages(key, max(0, bisect_right(range(high), length, key=size) - 1))
    tokens = render(chosen, list(TOOLS))
    return tokens, not np.array_equal(tokens, render(chosen, None))


def has_call(text: str) -> bool:
    """Whether an answer has tool calls, all of them are JSON, and all name a known tool with its required arguments.

    Hermes and Qwen use this format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    """
    required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}

    def is_call(text: str) -> bool:
        try:
            call = json.loads(text)
        except ValueError:
            return False
        return (isinstance(call, dict) and isinstance(call.get("arguments"), dict) and call.get("name") in required
                and set(required[call["name"]]) <= call["arguments"].keys())

    calls = _CALL.findall(text)
    return bool(calls) and all(map(is_call, calls))


_DISTINCT = 4
_TAIL, _TIMES = 100, 4
"""A text ends in a loop if its last 100 tokens repeat one period, which fits into them at least 4 times."""
Generations = dict[tuple[float, str], list[dict]]
"""The generations of a workload by temperature and decoder, with the fields of their cells and records.

Generations at the same index of two lists are a pair.
"""


def compared(drawn: Generations, temperature: float, decoder: str) -> Observations:
    """The generations of a decoder at a temperature, with lists of their tokens and of those of plain decoding.

    The clusters are problems, or the generations if there is one problem. Plain decoding has no `test`.
    """
    mine, plain = drawn[temperature, decoder], drawn[temperature, PLAIN]
    columns = {name: [one[name] for one in mine] for name in ("problem", "chain", "target_forwards", "prompt_tokens")}
    problems = columns["problem"] if len(set(columns["problem"])) > 1 else columns["chain"]
    own, other = ([one["tokens"] for one in each] for each in (mine, plain))
    return Observations({**columns, "problem": problems, "tokens": list(map(len, own))}, temperature=temperature,
                        decoder=decoder, own=own, plain=other, problems=columns["problem"], rate=_rate(mine),
                        plain_rate=_rate(plain), test=None if decoder == PLAIN else _histograms(other, own),
                        calls=[one["tool_call"] for one in mine if one.get("tool_call") is not None])


def _histograms(*samples: list[list[int]]) -> paired.SwapTest:
    """The test that the histograms of tokens of two decoders have one law."""
    occurring = sorted({token for sample in samples for tokens in sample for token in tokens})
    column_of = {token: column for column, token in enumerate(occurring)}
    # Histograms (generations, tokens that occur) of both.
    return paired.histograms(*(np.stack([np.bincount([column_of[token] for token in one], minlength=len(column_of))
                                         for one in sample]) for sample in samples))


def _test(field: str) -> Callable[[Observations], float | None]:
    """A part of the test of all tokens."""
    return lambda of: of["test"] and getattr(of["test"], field)


def _first_p(of: Observations) -> float | None:
    """The p-value of first tokens alone."""
    return of["test"] and _histograms(*([tokens[:1] for tokens in of[name]] for name in ("plain", "own"))).p


def _same_first(of: Observations) -> float:
    """The share that opens with the most frequent first token among this decoder's generations of the problem."""
    first = Counter((problem, tokens[0]) for problem, tokens in zip(of["problems"], of["own"], strict=True))
    return sum(max(count for (name, _), count in first.items() if name == problem) for problem in {*of["problems"]}) / of.n


def _distinct_p(of: Observations) -> float | None:
    own, plain = (np.array([distinct(tokens, _DISTINCT) for tokens in of[name]]) for name in ("own", "plain"))
    return None if of["decoder"] == PLAIN else paired.means(plain, own).p


_COMMON = (
    ("temperature", "temperature of the draws"),
    ("decoder", "`plain`, sample and match, or a decoder with a fault; each has random numbers of its own"),
    ("n", "generations", lambda of: of.n),
    ("mean_tokens", "mean tokens of a generation", lambda of: float(np.mean(of.values["tokens"]))),
    ("tokens_per_forward", "tokens for each forward pass of the target", lambda of: of.ratio("tokens", "target_forwards")),
    ("speed_ratio", "`tokens_per_second` divided by that of plain decoding", lambda of: of["rate"] / of["plain_rate"]),
    ("tokens_per_second", "tokens of all generations for each second of their draws", lambda of: of["rate"]),
    ("histogram_distance", "total variation distance of the token histogram from that of plain decoding",
     _test("distance")),
    ("histogram_noise", "mean distance of two samples from equal laws", _test("noise")),
    ("histogram_p", "p-value of the permutation test that both have one law; it swaps whole generations", _test("p")),
)
WORKLOADS = {table.name: table for table in (
    Table(SHORT, (
        *_COMMON,
        ("same_first_token", "share of generations that open with the most frequent first token of their problem",
         _same_first),
        ("first_token_p", "p-value of the permutation test for first tokens alone", _first_p),
    )),
    Table(LONG, (
        *_COMMON,
        ("distinct_4", "different sequences of 4 tokens divided by all sequences of 4 tokens of a generation, mean",
         lambda of: Clusters(range(of.n)).mean([distinct(tokens, _DISTINCT) for tokens in of["own"]])),
        ("distinct_4_p", "p-value of the permutation test that this mean is that of plain decoding", _distinct_p),
        ("longest_repeat", "mean length of the longest run of tokens that a generation has twice, tokens",
         lambda of: float(np.mean([longest_repeat(tokens) for tokens in of["own"]]))),
        ("end_in_loop", "generations whose last 100 tokens repeat one period of at most 25",
         lambda of: sum(map(ends_in_loop, of["own"]))),
    )),
    Table(AGENT, (
        *_COMMON,
        ("prompt_tokens", "tokens of the agent's prompt", lambda of: int(of.values["prompt_tokens"][0])),
        ("tool_calls", "generations with a valid tool call; empty where the template shows no tools",
         lambda of: sum(of["calls"]) if of["calls"] else None),
        ("tool_call_share", "share of generations with a valid tool call",
         lambda of: wilson(sum(of["calls"]), len(of["calls"]))),
    )),
)}


SAME = Table("same_key", (
    ("workload", "`short`, `long` or `agent`"),
    ("temperature", "temperature of the draws"),
    ("equal", "generations by sample and match that equal plain decoding with the same random numbers"),
    ("n", "pairs that were compared"),
))
VALUES = Table("values", (
    ("num_failed", "generations that a decoder could not draw",
     lambda of: sum("failure" in cell for record in of["records"] for cell in record["cells"])),
    ("equal_with_same_key", "generations by sample and match that equal plain decoding with the same random numbers",
     lambda of: sum(row["equal"] for row in of["same"])),
    ("pairs_with_same_key", "pairs that were compared for this", lambda of: sum(row["n"] for row in of["same"])),
    Each(lambda of: {f"{name}/{row['temperature']:g}": row for name, rows in of["tables"].items() for row in rows
                     if row["decoder"] == MATCH}, tuple(
        (f"{{workload}}/{{temperature}}/{column}", "see the table of the workload, for sample and match",
         lambda of, row, column=column: row[column]) for column in ("tokens_per_forward", "speed_ratio", "histogram_p"))),
))
ALL = (VALUES, *WORKLOADS.values(), SAME)


def _rate(own: Sequence[dict]) -> float:
    """Tokens per second."""
    return sum(len(one["tokens"]) for one in own) / sum(one["seconds"] for one in own)


def distinct(tokens: Sequence[int], n: int) -> float:
    """Number of different n-grams divided by the number of all n-grams; 1 for a text shorter than n tokens."""
    grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest run of tokens that occurs at two places, which may overlap."""
    def is_new(length: int) -> bool:
        places = len(tokens) - length + 1
        return len({tuple(tokens[start : start + length]) for start in range(places)}) == places

    return bisect_left(range(1, len(tokens)), True, key=is_new)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the end of the text repeats one period."""
    tail = list(tokens[-_TAIL:])
    return len(tail) == _TAIL and any(tail[period:] == tail[:-period] for period in range(1, _TAIL // _TIMES + 1))


_FAULTS = ("greedy_first", "greedy_bonus", "greedy_walk", "redraw_after_mismatch", "late_penalty", "finite_window")
_LONG_TEMPERATURE, _AGENT_TEMPERATURE = 0.7, 1.0
"""Temperatures of the long generations and of the agent's answers, as in the document."""


@register("probe", "sampled_verify")
@dataclass(slots=True, kw_only=True)
class SampledVerify(Probe):
    """Sample and match, correct and with the document's faults, against plain sampling on three workloads.

    `short`: num_chains generations of each problem at each temperature. `long`: one generation of each problem that does not
    stop before its horizon. `agent`: answers to one long synthetic prompt with tools. Workloads are shorter where the model
    has fewer positions. Every decoder has random numbers of its own, but `same_key` those of `plain`, and gives the same
    tokens.
    """

    temperatures: list[float] = identity([0.7, 0.85, 1.0], "temperatures of the short workload")
    faults: list[str] = identity(["greedy_first", "greedy_bonus", "greedy_walk", "finite_window"],
                                 "faulty decoders to compare: " + ", ".join(_FAULTS))
    window_share: float = identity(0.0853, "latest tokens that finite_window attends to, as a share of the agent's prompt; "
                                   "0.0853 = 2,048 of 24,000", gt=0)
    long_tokens: int = identity(1200, "tokens of a long generation, at most what the model's positions allow", ge=1)
    agent_tokens: int = identity(24000, "tokens of the agent's prompt, at most what the model's positions allow", ge=1)
    agent_answer: int = identity(256, "longest answer of the agent in tokens", ge=1)
    agent_runs: int = runtime(12, "answers of the agent; may be raised later", ge=0)
    batch_size: int = runtime(50, "generations that are drawn and timed together; a killed run loses at most these", ge=1,
                              le=65_536)

    uses = ("model", "draft", "sampler", "dataset")
    unit = "generation"
    needs_draft = True

    def check(self, config: Settings) -> None:
        able = [name for name, option in registered("sampler").items() if _has_temperature(option.cls)]
        if not _has_temperature(type(config.sampler)):
            raise ConfigError("sampler", name_of(config.sampler), f"{', '.join(able)} with probe=sampled_verify")
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        if not self.temperatures or not distinct or min(self.temperatures) <= 0.0:
            raise ConfigError("probe.temperatures", self.temperatures, "a list of numbers > 0, none twice")
        if not set(self.faults) <= set(_FAULTS) or len(set(self.faults)) < len(self.faults):
            raise ConfigError("probe.faults", self.faults, f"a list of {', '.join(_FAULTS)}, none twice")
        if "late_penalty" in self.faults and not config.sampler.law().has_penalty:
            raise ConfigError("probe.faults", self.faults, "a list without late_penalty, or a sampler.repetition_penalty "
                              "that is not 1, or a sampler.frequency_penalty or sampler.presence_penalty that is not 0")

    def arms(self) -> tuple[str, ...]:
        """The decoders, plain decoding first."""
        return (PLAIN, SAME_KEY, MATCH, *self.faults)

    def units(self, config: Settings) -> list[Unit]:
        """The generations of all workloads. Names of long and agent units have the workload in parentheses."""
        problems = [problem.id for problem in config.dataset.problems()]
        return [*(Unit(name, chain) for name in problems for chain in range(config.num_chains)),
                *(Unit(f"(long) {name}") for name in problems),
                *(Unit("(agent)", chain) for chain in range(self.agent_runs))]

    def num_units(self, config: Settings) -> int:
        """The number of generations, without reading a published dataset."""
        return config.dataset.num_chosen() * (config.num_chains + 1) + self.agent_runs

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost with every decoder, up to the model's positions. `assumed.kept`: what one but `plain` keeps of a block."""
        assumed, problems, size = config.assumed, config.dataset.num_chosen(), cost.block_size(config)
        short, long = problems * config.num_chains * len(self.temperatures), problems
        positions = ((shape := config.model.shape("cpu")) and shape.max_positions) or math.inf
        agent_prompt = max(1, min(self.agent_tokens, positions - self.agent_answer))
        prompts = (short + long) * (assumed.prompt_length - 1) + self.agent_runs * (agent_prompt - 1)
        answers = (short * assumed.answer_length * config.dataset.max_new_tokens
                   + long * max(1, min(self.long_tokens, positions - assumed.prompt_length))
                   + self.agent_runs * assumed.answer_length * self.agent_answer)
        drafting, blocks = len(self.arms()) - 1, answers / assumed.kept
        units = self.num_units(config)
        return UnitCost((len(self.arms()) * prompts + answers + drafting * blocks * size) / units, drafting * blocks / units)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Draws the generation of a unit by every decoder. A record has a cell for each decoder and temperature.

        `seconds` are the unit's shares of the batches' times. A cell has `tool_call` where the prompt shows tools.
        """
        model = config.model.load(work.device)
        drafter = config.draft.load(model)
        prompt, has_tools = self.agent_prompt(config, model)
        # The task of each unit
        problems = {problem.id: problem for problem in config.dataset.problems()}
        named = {unit: unit.problem.removeprefix("(long) ") for unit in work.units if unit.problem != "(agent)"}
        prompts = build.prompts(config, model, [problems[name] for name in named.values()])
        tasks = {}
        for unit in work.units:
            if unit not in named:
                tasks[unit] = GenerationTask(unit, AGENT, prompt, self.agent_answer)
            elif unit.problem == named[unit]:
                tasks[unit] = GenerationTask(unit, SHORT, prompts[unit.problem], config.dataset.max_new_tokens)
            else:
                text = prompts[named[unit]]
                room = self.long_tokens if model.max_positions is None else model.max_positions - len(text)
                tasks[unit] = GenerationTask(unit, LONG, text, min(self.long_tokens, room))
        window = max(1, round(self.window_share * len(prompt)))
        temperatures = {SHORT: self.temperatures, LONG: [_LONG_TEMPERATURE], AGENT: [_AGENT_TEMPERATURE]}
        key = Key(config.seed).fold_in("sampled_verify")  # arms have keys of their own, except `same_key`, which has `plain`'s
        claimed = iter(work)
        while batch := [tasks[unit] for unit in islice(claimed, self.batch_size)]:
            for workload, group in groupby(batch, key=lambda task: task.workload):
                own, cells = list(group), list[list[dict]]()
                for temperature in temperatures[workload]:
                    sampler = replace(cast("Any", config.sampler), temperature=temperature)
                    for arm in self.arms():
                        drawn = draw(
                            config, model.without_stops() if workload == LONG else model,
                            speculation_of(arm, drafter, window), sampler, own,
                            [key.fold_in(PLAIN if arm == SAME_KEY else arm, f"{temperature:g}", *task.unit) for task in own])
                        cells.append([{"decoder": arm, "temperature": temperature, **cell} for cell in drawn])
                for row, task in enumerate(own):
                    of_task = [column[row] for column in cells]
                    for cell in of_task if workload == AGENT and has_tools else ():
                        cell["tool_call"] = has_call(model.decode(np.array(cell.get("tokens", []), np.int64)))
                    yield task.unit, {"workload": workload, "prompt_tokens": len(task.prompt),
                                      "seconds": [cell.pop("seconds") for cell in of_task], "cells": of_task}

    def agent_prompt(self, config: Settings, model: "LanguageModel") -> tuple[np.ndarray, bool]:
        """The prompt of the agent workload. Raises UserError if the shortest one does not fit into the model's positions."""
        def render(messages: list[dict[str, str]], tools: list[dict] | None) -> np.ndarray:
            if not config.model.chat:
                return model.encode("\n".join(message["content"] for message in messages), True)
            return model.encode(model.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False,
                chat_template=template_at(config.model.date, model.tokenizer, tools)))

        room = (model.max_positions or math.inf) - self.agent_answer
        prompt = agent_prompt(render, Key(config.seed).fold_in("sampled_verify", "agent"),
                                   round(min(self.agent_tokens, room)))
        if (length := len(prompt[0])) > room and self.agent_runs:
            left = room + self.agent_answer - length
            refused = (("probe.agent_answer", self.agent_answer, f"at most {left}") if left > 0 else
                       ("probe.agent_runs", self.agent_runs, "0, or a model with more positions"))
            raise UserError("{}: given {}; allowed: {} ".format(*refused) + f"(the agent's shortest prompt takes {length} of "
                            f"the model's {model.max_positions} positions)")
        return prompt

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The tables `short`, `long`, `agent`, with a row for each decoder and temperature, and `same_key`.

        Each is there where the records have its workload.
        """
        drawn: dict[str, Generations] = {name: defaultdict(list) for name in WORKLOADS}
        for record in records:
            # A unit that a decoder failed to draw is left out for all decoders, so that pairs stay pairs.
            if not any("failure" in cell for cell in record["cells"]):
                for cell, seconds in zip(record["cells"], record["seconds"], strict=True):
                    own = drawn[record["workload"]][cell["temperature"], cell["decoder"]]
                    own.append({**record, **cell, "seconds": seconds})
        # `same_key` is no row of a workload, because it is not an independent sample.
        tables = {name: WORKLOADS[name].rows(compared(of, *cell) for cell in list(of) if cell[1] != SAME_KEY)
                  for name, of in drawn.items() if of}
        same = []
        for name, of in drawn.items():
            for temperature in dict.fromkeys(temperature for temperature, _ in of):
                plain, match = ([one["tokens"] for one in of[temperature, decoder]] for decoder in (PLAIN, SAME_KEY))
                same.append({"workload": name, "temperature": temperature, "n": len(plain),
                             "equal": sum(one == other for one, other in zip(plain, match, strict=True))})
        same = SAME.rows(same)
        return Summary(VALUES.row({"records": records, "tables": tables, "same": same}), {**tables, "same_key": same}, {})


def _has_temperature(sampler: type) -> bool:
    """Whether a sampler draws every token at a temperature that can be set."""
    return "temperature" in {field.name for field in fields(sampler)}
