"""The decoders that are compared, the workloads, and how generations are drawn.

The agent's workload is a synthetic prompt of a coding agent with tools, of a requested length. Tool calls are checked.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.engine import slots
from dflash_mcmc.process import ranks
from dflash_mcmc.rng import Key, Stream

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.speculation import Speculation
    from dflash_mcmc.probe import Unit
    from dflash_mcmc.sampler import Sampler

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


class Arm(NamedTuple):
    """A decoder in the comparison."""

    name: str
    """`plain`, `speculative_match`, `same_key` (speculative_match with the keys of plain), or a fault."""

    @property
    def fault(self) -> str | None:
        """The name of the fault; None for a correct decoder."""
        return None if self.name in (PLAIN, SAME_KEY, MATCH) else self.name

    def key(self, seed: int, unit: Unit, temperature: float) -> Key:
        """The key of a generation. All arms have keys of their own, except `same_key`, which has those of `plain`."""
        name = PLAIN if self.name == SAME_KEY else self.name
        return Key(seed).fold_in("sampled_verify", name, f"{temperature:g}", unit.problem, unit.chain)

    def speculation(self, drafter: Drafter | None, draft_temperature: float, window: int) -> Speculation | None:
        """The rule, for an engine; None for `plain`."""
        if self.name == PLAIN:
            return None
        from dflash_mcmc.engine.speculative import rules
        from dflash_mcmc.engine.speculative.speculation import Speculation

        rule, fault = rules.matching(self.fault, window)
        return Speculation(rule, drafter, shared_noise=True, temperature=draft_temperature, noisy=self.fault is not None,
                           fault=fault)


def draw(config: Config, model: LanguageModel, speculation: Speculation | None, sampler: Sampler,
         tasks: Sequence[GenerationTask], keys: Sequence[Key]) -> list[dict]:
    """Draws the generations of all tasks in one batch, and returns a cell of a record for each.

    `seconds` is the time of the batch divided by the number of tasks.
    """
    longest = max(len(task.prompt) for task in tasks)
    # Rows of the cache are as long as the longest prompt and `max_new_tokens`, whatever the horizon of a task.
    total = max(len(task.prompt) + task.horizon for task in tasks)
    sized = dataclasses.replace(config, dataset=dataclasses.replace(config.dataset, max_new_tokens=total - longest))
    engine = slots.engine_of(sized, model, longest, len(tasks) * ranks.place().total, None, speculation)
    chains = [(number, sampler.chain(task.prompt, task.horizon, key))
              for number, (task, key) in enumerate(zip(tasks, keys, strict=True))]
    start, cells = time.perf_counter(), dict[int, dict]()
    for done in engine.run(iter(chains)):
        costs = {"target_forwards": done.cost.target_forwards}
        cells[done.tag] = ({"failure": done.failure, **costs} if done.result is None else
                           {"tokens": done.result.trajectory.tokens.tolist(), **costs})
    seconds = (time.perf_counter() - start) / len(tasks)
    return [{**cells[number], "seconds": seconds} for number in range(len(tasks))]


class AgentPrompt(NamedTuple):
    """A rendered prompt."""

    tokens: np.ndarray
    """int64 (length,)."""
    has_tools: bool
    """Whether the chat template shows the tools to the model."""


def agent_messages(key: Key, num_lines: int) -> list[dict[str, str]]:
    """A conversation: a system turn with `num_lines` lines of code, and a user turn that needs a tool."""
    stream = Stream(key)

    def line(number: int) -> str:
        verb, noun, value = stream.choice(_VERBS), stream.choice(_NOUNS), stream.integer(0, 1000)
        head = "" if number % 20 else f"# src/{noun}_{number // 20}.py\n"
        return f"{head}def {verb}_{noun}_{number}(x): return x + {value}\n"

    code = "".join(line(number) for number in range(num_lines))
    return [{"role": "system", "content": _SYSTEM + code},
            {"role": "user", "content": _REQUEST.format(path="src/main.py")}]


def agent_prompt(render: Callable[[list[dict[str, str]], list[dict] | None], np.ndarray], key: Key,
                 length: int) -> AgentPrompt:
    """The prompt with as many lines of code as fit into `length` tokens. A prompt without lines may be longer than that.

    Args:
        render: (messages, tools) -> token ids int64.
    """
    tools = list(TOOLS)
    low, high = 0, 1
    while len(render(agent_messages(key, high), tools)) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(render(agent_messages(key, middle), tools)) <= length else (low, middle)
    chosen = agent_messages(key, low)
    tokens = render(chosen, tools)
    return AgentPrompt(tokens, not np.array_equal(tokens, render(chosen, None)))


def has_call(text: str) -> bool:
    """Whether an answer has tool calls, all of them are JSON, and all name a known tool with its required arguments.

    Hermes and Qwen use this format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    """
    calls = _CALL.findall(text)
    return bool(calls) and all(map(_is_call, calls))


def _is_call(text: str) -> bool:
    try:
        call = json.loads(text)
    except ValueError:
        return False
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return False
    required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
    return call.get("name") in required and set(required[call["name"]]) <= call["arguments"].keys()
