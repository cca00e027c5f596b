"""The body of a request: every field is used, or refused with one line that names it, the given value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from dflash_mcmc.dataset import stop_strings
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, reason_of
from dflash_mcmc.serve.answers import Refused
from dflash_mcmc.store.schema import loaded

PENALTIES = {"temperature": (0.0, 1e6), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "frequency_penalty": (-2.0, 2.0),
             "presence_penalty": (-2.0, 2.0), "repetition_penalty": (0.0, 1e6)}
"""Sampling fields of OpenAI and of vLLM and their bounds. `top_k` is a whole number, and read apart."""
_BOTH = ("model", "n", "seed", "stop", "max_tokens", "stream", "stream_options", "sampler", "logprobs", "return_token_ids",
         "return_sampling_mask", "top_k", *PENALTIES)
_KNOWN = {True: (*_BOTH, "messages", "max_completion_tokens", "top_logprobs"), False: (*_BOTH, "prompt", "echo")}
_UNUSED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that say nothing about the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "suffix": ("",), "best_of": (1,), "modalities": (["text"],)}
"""Fields of OpenAI that are refused unless they have a value that changes nothing."""
LARGEST_SEED = 2**63 - 1
_KINDS: dict[type, tuple[str, Any]] = {bool: ("true or false", False), str: ("a text", None), dict: ("an object", {})}


class RequestFields(NamedTuple):
    """A request, whose fields have the right types and bounds."""

    chat: bool
    prompts: Sequence[Any]
    """Conversations, texts or lists of token ids."""
    n: int
    seed: int | None
    stop: tuple[str, ...] | None
    max_tokens: int | None
    logprobs: bool
    top: bool
    """Whether the most likely token at the place of each token is asked for."""
    echo: bool
    """Whether the prompt is a part of the answer's text and of its log probabilities."""
    token_ids: bool
    """Whether the answer has its token ids (`return_token_ids`, as vLLM has it)."""
    stream: bool
    include_usage: bool
    sampler: Mapping[str, Any]
    """`name`, if another sampler was asked for, and fields of the sampler."""
    openai: Mapping[str, float]
    """The given fields of `PENALTIES`, and `top_k`."""
    ignored: Mapping[str, float] = {}
    """Those of them without an effect (`serve.client_temperature`)."""
    in_order: bool = False
    """Whether the sampler draws the tokens of an answer in order, and changes none."""


def refuse(field: str, given: object, allowed: str) -> NoReturn:
    """Raises Refused for a wrong field."""
    raise Refused(400, str(ConfigError(field, given, allowed)), field)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refused."""
    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number of JSON")

    try:
        content = loaded(body.decode(), parse_constant=constant)
    except ValueError as error:
        raise Refused(400, f"body: cannot be read: {reason_of(error, 160)}; allowed: a JSON object in UTF-8") from error
    if not isinstance(content, dict):
        refuse("body", type(content).__name__, "a JSON object")
    return content


def read(body: Mapping[str, Any], chat: bool, model: str) -> RequestFields:
    """The request of a body. Raises Refused."""
    asked = {name: value for name, value in body.items() if value is not None and name not in _UNUSED}
    for name, value in asked.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                refuse(name, value, "nothing: this server does not have it")
        elif name not in _KNOWN[chat]:
            near = did_you_mean(name, _KNOWN[chat])
            raise Refused(400, f"{name[:80]!r}: unknown field{near}; allowed: {', '.join(_KNOWN[chat])}, with fields of the "
                          "sampler in sampler", name[:80])
    if (named := _of(asked, "model", str)) not in (None, model):
        raise Refused(404, str(ConfigError("model", named, repr(model))), "model", "model_not_found")
    openai = {name: _number(asked, name, *bounds) for name, bounds in PENALTIES.items() if name in asked}
    if (top_k := _whole(asked, "top_k", -1, 2**31)) is not None:
        openai["top_k"] = max(top_k, 0)  # -1 keeps all, too
    options = _of(asked, "stream_options", dict)
    if set(options) - {"include_usage", "include_obfuscation"} or not all(isinstance(on, bool) for on in options.values()):
        refuse("stream_options", options, '{"include_usage": true or false}')
    logprobs, top, echo, stream = *_logprobs(asked, chat), _of(asked, "echo", bool), _of(asked, "stream", bool)
    if stream and (top or echo):
        refuse("stream", True, f"false with {'echo' if echo else 'the most likely tokens'}, since the text is read at its end")
    return RequestFields(chat, _prompts(asked, chat), _whole(asked, "n", 1, 10_000) or 1,
                 _whole(asked, "seed", -LARGEST_SEED, LARGEST_SEED), _stop(asked), _max_tokens(asked, 0 if echo else 1),
                 logprobs, top, echo, _of(asked, "return_token_ids", bool), stream,
                 options.get("include_usage", False),
                 {**_sampler(asked), **({"sampling_mask": True} if _of(asked, "return_sampling_mask", bool) else {})}, openai)


def _max_tokens(asked: Mapping[str, Any], least: int) -> int | None:
    limits = [_whole(asked, name, least, 2**31) for name in ("max_completion_tokens", "max_tokens") if name in asked]
    if len(set(limits)) > 1:
        refuse("max_tokens", limits[1], f"nothing, or {limits[0]}, since max_completion_tokens is given")
    return limits[0] if limits else None


def _sampler(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    value = asked.get("sampler", {})
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name", ""), str):
        refuse("sampler", value, 'a name, or an object of a sampler\'s fields, such as {"name": "power_mh", "alpha": 4}')
    for name, number in value.items():
        if isinstance(number, int) and not -LARGEST_SEED <= number <= LARGEST_SEED:
            refuse(f"sampler.{name[:80]}", number, "a number of 64 bits")
    return value


def _prompts(asked: Mapping[str, Any], chat: bool) -> Sequence[Any]:
    if chat:
        messages = asked.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
            refuse("messages", messages, "a list of at least one message with role and content")
        return [[_turn(turn) for turn in messages]]
    prompt = asked.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or _is_ids(each) for each in prompt):
        return prompt
    refuse("prompt", prompt, "a text, a list of texts, or lists of token ids")


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A message. Parts of text become one text; parts of other kinds are refused."""
    content = turn.get("content")
    if not isinstance(content, list):
        return {name: value for name, value in turn.items() if value is not None}
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            refuse("messages", part, "content that is a text, or parts of the type text")
    return {**turn, "content": "".join(part["text"] for part in content)}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_whole(each) and 0 <= each < 2**31 for each in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(asked: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = asked.get(name)
    if value is not None and (not _is_whole(value) or not low <= value <= high):
        refuse(name, value, f"a whole number >= {low} and <= {high}")
    return value


def _number(asked: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = asked[name]
    # In this order: a whole number of thousands of digits is no float, and NaN is not between bounds.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        refuse(name, value, f"a number >= {low:g} and <= {high:g}")
    return float(value)


def _of(asked: Mapping[str, Any], name: str, kind: type) -> Any:
    words, default = _KINDS[kind]
    value = asked.get(name, default)
    if name in asked and not isinstance(value, kind):
        refuse(name, value, words)
    return value


def _stop(asked: Mapping[str, Any]) -> tuple[str, ...] | None:
    value = asked.get("stop")
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        refuse("stop", value, "a text or a list of texts")
    return tuple(allowed("stop", lambda: stop_strings(strings, "stop")))


def _logprobs(asked: Mapping[str, Any], chat: bool) -> tuple[bool, bool]:
    """Whether log p of the tokens is asked for, and whether the most likely tokens are. No others are known."""
    field = "top_logprobs" if chat else "logprobs"
    if (top := _whole(asked, field, 0, 20) or 0) > 1:
        refuse(field, top, "0, or 1: the most likely token")
    wanted = _of(asked, "logprobs", bool) if chat else "logprobs" in asked
    if top and not wanted:
        refuse(field, top, "0 without logprobs=true")
    return wanted, bool(top)


def allowed(param: str, make: Callable[[], Any]) -> Any:
    """The value that `make` returns. A UserError of it becomes a refused request."""
    try:
        return make()
    except UserError as error:
        raise Refused(400, str(error), param) from error
