"""A synthetic prompt of a coding agent with tools, of a requested length, and the check of the answer's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dflash_mcmc.rng import Key, Stream

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


class AgentPrompt(NamedTuple):
    """A rendered prompt."""

    tokens: np.ndarray
    """int64 (length,)."""
    has_tools: bool
    """Whether the chat template shows the tools to the model."""


def messages(key: Key, num_lines: int) -> list[dict[str, str]]:
    """A conversation: a system turn with `num_lines` lines of code, and a user turn that needs a tool."""
    stream = Stream(key)

    def line(number: int) -> str:
        verb, noun, value = stream.choice(_VERBS), stream.choice(_NOUNS), stream.integer(0, 1000)
        head = "" if number % 20 else f"# src/{noun}_{number // 20}.py\n"
        return f"{head}def {verb}_{noun}_{number}(x): return x + {value}\n"

    code = "".join(line(number) for number in range(num_lines))
    return [{"role": "system", "content": _SYSTEM + code},
            {"role": "user", "content": _REQUEST.format(path="src/main.py")}]


def prompt(render: Callable[[list[dict[str, str]], list[dict] | None], np.ndarray], key: Key, length: int) -> AgentPrompt:
    """The prompt with as many lines of code as fit into `length` tokens. A prompt without lines may be longer than that.

    Args:
        render: (messages, tools) -> token ids int64.
    """
    tools = list(TOOLS)
    low, high = 0, 1
    while len(render(messages(key, high), tools)) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(render(messages(key, middle), tools)) <= length else (low, middle)
    chosen = messages(key, low)
    tokens = render(chosen, tools)
    return AgentPrompt(tokens, not np.array_equal(tokens, render(chosen, None)))


def has_call(text: str) -> bool:
    """Whether an answer has tool calls, all of them are JSON, and all name a known tool with its required arguments.

    Hermes and Qwen use this format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    """
    found = _CALL.findall(text)
    return bool(found) and all(map(_is_call, found))


def _is_call(text: str) -> bool:
    try:
        call = json.loads(text)
    except ValueError:
        return False
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return False
    required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
    return call.get("name") in required and set(required[call["name"]]) <= call["arguments"].keys()
