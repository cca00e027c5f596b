"""Limits of memory and time for the chat template of a checkpoint, which is a program of its authors.

A template can loop for ever or fill the memory. A process cannot limit itself to one function, so the first conversation of
each template is rendered in a process of its own, once without and once with tools. That takes a tenth of a second. Later
conversations are rendered without limits. The template of the embedded model needs no trial.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dflash_mcmc.dataset.inputs import template_program
from dflash_mcmc.errors import UserError

MEGABYTES = 512
SECONDS = 10
_WALL_SECONDS = 120
"""Where other processes keep the machine busy, processor time passes more slowly."""
_COPIES = 16
"""Bytes of memory for each character of the conversation as JSON, besides MEGABYTES."""
_OWN = Path(__file__).parents[2] / "assets" / "tiny" / "chat_template.jinja"
_tried: dict[tuple[str, bool], str | None] = {}
"""What each template exceeded, with and without tools; None if it kept the limits."""


def check(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
          **flags: object) -> None:
    """Raises UserError if the tokenizer's chat template needs more than MEGABYTES or SECONDS for its first conversation.

    Args:
        messages: the conversation.
        tools: JSON schemas of tools; None without tools.
        flags: other variables of the template, such as `enable_thinking`.
    """
    try:
        template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    except Exception:  # the tokenizer has none, or it is no text: rendering reports it
        return
    key = (template, bool(tools))
    if not isinstance(template, str) or template == _own():
        return
    if key not in _tried:
        _tried[key] = _exceeded(template, {
            **tokenizer.special_tokens_map, "messages": list(messages), "tools": list(tools) if tools else None,
            "documents": None, **flags})
    if reason := _tried[key]:
        roles = ", ".join(dict.fromkeys(str(turn.get("role")) for turn in messages))
        raise UserError(f"model.chat: given a tokenizer whose chat template {reason} for the conversation of {roles}; "
                        f"allowed: at most {SECONDS} seconds and {MEGABYTES} MB, or model.chat=false")


def _exceeded(template: str, values: dict[str, Any]) -> str | None:
    """Renders the template in another process. Returns what it exceeded; None if it keeps the limits. Raises UserError."""
    content = json.dumps(values, default=str)
    room = MEGABYTES + (_COPIES * len(content) >> 20)
    request = (f'{{"path": {json.dumps(sys.path)}, "megabytes": {room}, "seconds": {SECONDS}, '
               f'"template": {json.dumps(template)}, "values": {content}}}')
    try:
        done = subprocess.run([sys.executable, "-I", template_program.__file__], input=request, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, timeout=_WALL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"takes more than {_WALL_SECONDS} seconds"
    except OSError as error:
        raise UserError(f"model.chat: cannot start {sys.executable}, which renders the chat template under limits of time "
                        f"and memory: {error.strerror}; allowed: an interpreter that can be started, or "
                        "model.chat=false") from error
    if done.returncode == template_program.TOO_LARGE:
        return f"takes more than {MEGABYTES} MB"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {SECONDS} seconds of the processor"
    if done.returncode < 0:
        return f"ends its process with {signal.Signals(-done.returncode).name}"
    if done.returncode:
        raise RuntimeError(f"the program that tries a chat template failed: {done.stderr.strip()[-500:]}")
    return None


@cache
def _own() -> str:
    return _OWN.read_text(encoding="utf-8")
