"""The body of a request: every field is used, or refused with one line that names it, the given value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_mcmc.dataset import stop_strings
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, reason_of
from dflash_mcmc.serve.answers import Refused
from dflash_mcmc.store.schema import loaded

_UNUSED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that say nothing about the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "suffix": ("",), "best_of": (1,), "modalities": (["text"],)}
"""Fields of OpenAI that are refused unless they have a value that changes nothing."""
LARGEST_SEED = 2**63 - 1
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _StreamOptions(_Object):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(_Object):
    """Sampling fields of OpenAI and of vLLM."""

    temperature: float = Field(1.0, ge=0, le=1e6)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0, le=1e6)


class RequestFields(Sampling):
    """The fields of both kinds of requests."""

    model: str = ""
    n: int = Field(1, ge=1, le=10_000)
    seed: int | None = Field(None, ge=-LARGEST_SEED, le=LARGEST_SEED)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    sampler: Any = {}
    """`name`, if another sampler was asked for, and fields of the sampler."""
    return_token_ids: bool = False
    return_sampling_mask: bool = False
    logprobs: Any = None
    """Once the request is read: whether log p of the tokens is asked for."""
    echo: bool = False
    """Whether the prompt is a part of the answer's text and of its log probabilities."""
    # What the server sets.
    prompts: Sequence[Any] = ()
    """Conversations, texts or lists of token ids."""
    top: bool = False
    """Whether the most likely token at the place of each token is asked for. No others are known."""
    openai: Mapping[str, float] = {}
    """The given fields of `Sampling`."""
    ignored: Mapping[str, float] = {}
    """Those of them without an effect (`serve.client_temperature`)."""
    in_order: bool = False
    """Whether the sampler draws the tokens of an answer in order, and changes none."""


class _Chat(RequestFields):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=1)


class _Text(RequestFields):
    prompt: str | _TokenIds | Annotated[list[str | _TokenIds], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=1)


_OURS = ("prompts", "top", "openai", "ignored", "in_order")


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
    given = {name: value for name, value in body.items() if value is not None and name not in _UNUSED}
    for name in _NEUTRAL.keys() & given.keys():
        if (value := given.pop(name)) not in _NEUTRAL[name]:
            refuse(name, value, "nothing: this server does not have it")
    asked = _validated(_Chat if chat else _Text, given, (*_OURS, *["echo"] * chat))
    if asked.model not in ("", model):
        raise Refused(404, str(ConfigError("model", asked.model, repr(model))), "model", "model_not_found")
    if isinstance(asked, _Chat):
        prompts, logprobs, top = [[_turn(turn) for turn in asked.messages]], asked.logprobs, asked.top_logprobs == 1
        limits = {asked.max_completion_tokens, asked.max_tokens} - {None}
    else:
        several = isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int)
        prompts, logprobs, top = asked.prompt if several else [asked.prompt], asked.logprobs is not None, asked.logprobs == 1
        limits = {asked.max_tokens} - {None}
    if top and not logprobs:
        refuse("top_logprobs", 1, "0 without logprobs=true")
    if asked.stream and (top or asked.echo):
        what = "echo" if asked.echo else "the most likely tokens"
        refuse("stream", True, f"false with {what}, since the text is read at its end")
    if len(limits) > 1:
        refuse("max_tokens", asked.max_tokens, f"nothing, or that of max_completion_tokens, {asked.max_completion_tokens}")
    if 0 in limits and not asked.echo:
        refuse("max_tokens", 0, "a whole number >= 1")
    strings = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    openai = {name: getattr(asked, name) for name in Sampling.model_fields if name in given}
    if openai.get("top_k") == -1:
        openai["top_k"] = 0  # both keep all
    return asked.model_copy(update={
        "prompts": prompts, "messages": (), "prompt": "", "logprobs": logprobs, "top": top, "openai": openai,
        "max_tokens": limits.pop() if limits else None,
        "sampler": _sampler(asked.sampler) | ({"sampling_mask": True} if asked.return_sampling_mask else {}),
        "stop": None if strings is None else allowed("stop", lambda: stop_strings(strings, "stop"))})


def _validated(fields: type[RequestFields], given: Mapping[str, Any], ours: Sequence[str]) -> Any:
    known = [name for name in fields.model_fields if name not in ours]
    for name in given:
        if name not in known:
            raise Refused(400, f"{name[:80]!r}: unknown field{did_you_mean(name, known)}; allowed: {', '.join(known)}, with "
                          "fields of the sampler in sampler", name[:80])
    try:
        return fields.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    name = str(errors[0]["loc"][0])
    words = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in errors if each["loc"][0] == name)
    refuse(name, given.get(name), " or ".join(words))


def _sampler(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name", ""), str):
        refuse("sampler", value, 'a name, or an object of a sampler\'s fields, such as {"name": "power_mh", "alpha": 4}')
    for name, number in value.items():
        if isinstance(number, int) and not -LARGEST_SEED <= number <= LARGEST_SEED:
            refuse(f"sampler.{name[:80]}", number, "a number of 64 bits")
    return value


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A message. Parts of text become one text; parts of other kinds are refused."""
    content = turn.get("content")
    if not isinstance(content, list):
        return {name: value for name, value in turn.items() if value is not None}
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            refuse("messages", part, "content that is a text, or parts of the type text")
    return {**turn, "content": "".join(part["text"] for part in content)}


def allowed(param: str, make: Callable[[], Any]) -> Any:
    """The value that `make` returns. A UserError of it becomes a refused request."""
    try:
        return make()
    except UserError as error:
        raise Refused(400, str(error), param) from error
