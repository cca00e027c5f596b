"""How generations are drawn by each decoder, the prompt of the agent's workload, the tables of the workloads, measures of
degeneration (how much a text repeats itself), and the figure of the comparison.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.engine import slots
from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import Each, Observations, Table
from dflash_mcmc.process import ranks
from dflash_mcmc.report.figure import INK, MARKERS, OTHER, PALETTE, legend_below, panels
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.statistics import paired
from dflash_mcmc.statistics.intervals import Clusters
from dflash_mcmc.statistics.outcomes import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.speculation import Speculation
    from dflash_mcmc.probe import Unit
    from dflash_mcmc.sampler import Sampler
    from dflash_mcmc.settings import Settings


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


def key_of(arm: str, seed: int, unit: Unit, temperature: float) -> Key:
    """The key of a generation. All arms have keys of their own, except `same_key`, which has those of `plain`."""
    name = PLAIN if arm == SAME_KEY else arm
    return Key(seed).fold_in("sampled_verify", name, f"{temperature:g}", unit.problem, unit.chain)


def speculation_of(arm: str, drafter: Drafter | None, window: int) -> Speculation | None:
    """The rule of a decoder, `speculative_match`, `same_key` or a fault, for an engine; None for `plain`."""
    if arm == PLAIN:
        return None
    from dflash_mcmc.engine.speculative import rules
    from dflash_mcmc.engine.speculative.speculation import Speculation

    rule, fault = rules.matching(None if arm in (SAME_KEY, MATCH) else arm, window)
    return Speculation(rule, drafter, shared_noise=True, temperature=0.0, noisy=arm not in (SAME_KEY, MATCH), fault=fault)


def draw(config: Settings, model: LanguageModel, speculation: Speculation | None, sampler: Sampler,
         tasks: Sequence[GenerationTask], keys: Sequence[Key]) -> list[dict]:
    """Draws the generations of all tasks in one batch, and returns a cell of a record for each.

    `seconds` is the time of the batch divided by the number of tasks.
    """
    longest = max(len(task.prompt) for task in tasks)
    # Rows of the cache are as long as the longest prompt and `max_new_tokens`, whatever the horizon of a task.
    total = max(len(task.prompt) + task.horizon for task in tasks)
    own: Any = config  # a dataclass, as every component
    sized = dataclasses.replace(own, dataset=dataclasses.replace(own.dataset, max_new_tokens=total - longest))
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


def summary(records: Sequence[dict]) -> Summary:
    """The tables `short`, `long`, `agent` and `same_key`, each where the records have its workload."""
    drawn: dict[str, Generations] = {name: defaultdict(list) for name in WORKLOADS}
    for record in records:
        # A unit that a decoder failed to draw is left out for all decoders, so that pairs stay pairs.
        if not any("failure" in cell for cell in record["cells"]):
            for cell, seconds in zip(record["cells"], record["seconds"], strict=True):
                drawn[record["workload"]][cell["temperature"], cell["decoder"]].append({**record, **cell, "seconds": seconds})
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


_LEVEL = 1e-3
"""A smaller p-value means that the decoder does not draw from the law of plain sampling."""
_PANELS = {"tokens_per_forward": ("Tokens per target forward", ""),
           "same_first_token": ("Same first token", "share of a problem's generations"),
           "histogram_p": ("Token histogram against plain", f"p-value (line: {_LEVEL:g})"),
           "distinct_4": ("New 4-grams (long)", "share of 4-grams"),
           "tool_call_share": ("Tool-call success", "share of answers")}


def figure(tables: dict[str, list[dict]]) -> Figure:
    """Tokens per forward, first token, histograms, degeneration and tool calls. Panels without values are left out."""
    rows = [(name, row) for name in (SHORT, LONG, AGENT) for row in tables.get(name, [])]
    decoders = list(dict.fromkeys(row["decoder"] for _, row in rows))
    series = list(dict.fromkeys((name, row["temperature"]) for name, row in rows))
    looks = [(PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]) for index in range(len(series))]
    columns = [column for column in _PANELS if any(row.get(column) is not None for _, row in rows)]
    drawn, places = panels((2.2 + 2.3 * len(columns), 1.5 + 0.38 * len(decoders)), 1, len(columns), sharey=True)
    for axes, column in zip(places, columns, strict=True):
        for number, (each, (colour, marker)) in enumerate(zip(series, looks, strict=True)):
            own = [row for name, row in rows if (name, row["temperature"]) == each and row.get(column) is not None]
            heights = [decoders.index(row["decoder"]) + 0.12 * (number - 0.5 * (len(series) - 1)) for row in own]
            for row, y in zip(own, heights, strict=True):
                if row.get(f"{column}_low") is not None:
                    axes.plot([row[f"{column}_low"], row[f"{column}_high"]], [y, y], color=OTHER, linewidth=1.2, zorder=1)
            axes.plot([row[column] for row in own], heights, color=colour, marker=marker, markersize=5, linestyle="none",
                      zorder=2, label=f"{each[0]}, T = {each[1]:g}")
        axes.set(title=_PANELS[column][0], xlabel=_PANELS[column][1])
        if column == "histogram_p":
            axes.set_xscale("log")
            axes.axvline(_LEVEL, color=INK, linestyle="--", linewidth=1.0)
    places[0].set_yticks(range(len(decoders)), decoders)
    places[0].set_ylim(len(decoders) - 0.5, -0.5)
    legend_below(drawn, len(series))
    return drawn
