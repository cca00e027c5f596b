"""The bodies of requests and of answers in the format of OpenAI, and the paths of the server that lead from one to the other.

Unknown fields of requests are refused. Answers, errors included, have further fields under `dflash_mcmc`.
"""

import asyncio
import copy
import dataclasses
import json
import re
import reprlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import cached_property, partial
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dflash_mcmc.api import prompts as read_prompts
from dflash_mcmc.chains import build
from dflash_mcmc.components import name_of, registered
from dflash_mcmc.config.schema import Condition, Config, checked
from dflash_mcmc.dataset import stop_strings
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, one_line
from dflash_mcmc.ops import Chain, Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.serve.options import ServeOptions, model_name
from dflash_mcmc.serve.workers import DrawnAnswer, Order, started
from dflash_mcmc.store import records
from dflash_mcmc.tokenizer import TokenTexts, id_bound, texts_of
from dflash_mcmc.types import ChainResult, Cost, Trajectory

_LARGEST = 2**63 - 1
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
_IGNORED = ("temperature", "top_p")
"""Fields that many clients send always. A sampler that lacks them draws by its own law."""


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _StreamOptions(_Object):
    include_usage: bool = False


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

    model: str | None = None
    user: str | None = None
    n: int = Field(1, ge=1)
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-_LARGEST, le=_LARGEST)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    sampler: dict[str, Any] = {}
    """Fields of the sampler, and `name` if another one was asked for."""
    return_token_ids: bool = False
    return_sampling_mask: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Leaves out what is null. Raises UserError for an unknown field."""
        if not isinstance(given, dict):
            return given
        for name in given:
            if name not in cls.model_fields:
                raise UserError(f"{name[:80]!r}: unknown field{did_you_mean(name, cls.model_fields)}; allowed: "
                                f"{', '.join(cls.model_fields)}, with fields of the sampler in sampler")
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("sampler", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    def given(self) -> dict[str, float]:
        """The given fields of `Sampling`."""
        given = self.model_dump(include=set(Sampling.model_fields), exclude_unset=True)
        return {name: 0 if (name, value) == ("top_k", -1) else value for name, value in given.items()}  # both keep all


class Chat(RequestFields):
    """A request of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False


class Text(RequestFields):
    """A request of `/v1/completions`."""

    prompt: str | _TokenIds | Annotated[list[str | _TokenIds], Field(min_length=1, fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: bool = False


def config_of(server: Config, sampler: Sampler, max_tokens: int, max_width: int) -> Config:
    """The checked configuration of a request. Raises UserError.

    Args:
        server: the server's configuration as it was composed; it is not changed.
        max_tokens: longest answer.
        max_width: most operations that a chain may ask for together.
    """
    config = copy.deepcopy(server)
    config.condition = Condition(name=None, sampler=None, blend=None)
    config.sampler, config.dataset.max_new_tokens = sampler, max_tokens
    config = checked(config)
    if config.sampler.needs_draft and not (server.sampler.needs_draft or server.blend.needs_draft):
        raise ConfigError("sampler", name_of(sampler), "one without a draft, or this sampler from the start")
    if (width := config.sampler.width()) > max_width:
        raise ConfigError("sampler", f"one that draws {width} sequences together", f"at most {max_width} (serve.max_width)")
    return config


def sampler_of(own: Sampler, asked: Mapping[str, Any], common: Mapping[str, float]) -> tuple[Sampler, dict[str, float]]:
    """The sampler of a request, and those of its common fields that have no effect. Raises ConfigError.

    Args:
        own: the server's sampler, whose fields are the defaults unless `asked` names another one.
        asked: fields of the sampler, and `name` for another one.
        common: the fields that requests of every server have: temperature, top_p, top_k, min_p, and penalties.
    """
    fields, options = {name: value for name, value in asked.items() if name != "name"}, registered("sampler")
    name = asked.get("name", name_of(own))
    if not isinstance(name, str) or name not in options:
        raise ConfigError("sampler", name, f"one of {', '.join(options)}{did_you_mean(str(name), options)}")
    for field, value in fields.items():
        if field in ("function", "self"):  # a file that would be run here; Python's own argument
            raise ConfigError(f"sampler.{field}", value, "nothing in a request")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"sampler.{field}", value, "a number of 64 bits")
    same = name == name_of(own)
    if name == "temperature" and common.get("temperature") == 0.0:
        if same and own.law().has_penalty:
            raise ConfigError("temperature", 0.0, "a number > 0 with this server's penalties, which sampler=greedy lacks")
        name, same = "greedy", False
    cls: Any = options[name].cls
    names = {field.name for field in dataclasses.fields(cls)}
    neutral = {name: field.default for name, field in Sampling.model_fields.items()}
    neutral |= {"temperature": 0.0} if cls.is_deterministic else {}
    ignored: dict[str, float] = {}
    for field, value in common.items():
        if field in names and (field, value) != ("temperature", 0.0):
            if fields.setdefault(field, value) != value:
                raise ConfigError(field, value, f"nothing, since sampler.{field} is given")
        elif value == neutral[field] or (cls.is_deterministic and field in ("top_p", "top_k", "min_p")):
            pass
        elif field in _IGNORED:
            ignored[field] = value
        else:
            raise ConfigError(field, value, f"{neutral[field]:g} with sampler={name}, which has no such field; its fields, in "
                              f"sampler: {', '.join(sorted(names))}")
    return cls(**{**({field: getattr(own, field) for field in names} if same else {}), **fields}), ignored


_REASONS = {records.STOP_ID: "stop", records.STOP_STRING: "stop", records.LENGTH: "length"}


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer to an error."""
    status, message, param = 500, "the server failed; its log says why", None
    if isinstance(error, RequestValidationError):
        errors = error.errors()
        place = errors[0]["loc"][:2]
        param = place[1] if len(place) == 2 and isinstance(place[1], str) else "body"
        words = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in errors if each["loc"][:2] == place)
        given = error.body if param == "body" else errors[0]["input"]
        allowed = "a JSON object, as application/json" if param == "body" else " or ".join(words)
        status, message = 400, f"{param}: given {reprlib.repr(given)}; allowed: {allowed}"
    elif isinstance(error, UserError):
        status, message, param = 400, str(error), str(error).partition(":")[0]
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": one_line(message), "type": kind, "param": param and one_line(param), "code": None}}


class TextScorer:
    """Log p of each token of a text at temperature 1, and the most likely token at its place.

    The text is forced once the sampler's chain has ended. The place of a token that is not the most likely one costs a further
    forward, which draws that one.

    Args:
        echo: whether the tokens of the prompt are scored too, from the second on.
        top: whether the most likely tokens are wanted.
    """

    def __init__(self, echo: bool, top: bool):
        self.echo, self._top = echo, top
        self.path: Trajectory | None = None
        self.most_likely: list[tuple[int, float]] | None = None

    def after(self, start: Callable[[], Chain]) -> Chain:
        """The chain of a sampler, and then the operations that score its text."""
        with closing(start()) as chain:
            result = yield from chain
        text = result.trajectory.sequence
        first = 1 if self.echo else len(result.trajectory.prompt)
        greedy = SamplingParams(temperature=0.0)
        path = Trajectory.start(text[:first])
        if first < len(text):
            path = yield Score(path, text[first:], greedy)
        self.path = path
        if not self._top:
            return result
        self.most_likely = []
        for position in range(path.length):
            # log q of temperature 0 is 0 for the most likely token, and -inf for others.
            one: Trajectory = path.prefix(position + 1)
            if path.log_q[position] != 0.0:
                one = yield Draw(path.prefix(position), position + 1, greedy, Key(0))
            self.most_likely.append((int(one.tokens[position]), float(one.log_p[position])))
        return result


class Bodies(NamedTuple):
    """The bodies of the answers to a request."""

    id: str
    created: int
    model: str
    seed: int
    chat: bool
    prompt_tokens: int
    texts: TokenTexts | None
    """Tells the bytes of tokens; None if log p was not asked for."""
    token_ids: bool
    """Whether the token ids were asked for."""
    echoes: Sequence[str]
    """By answer: the prompt's text, if it was asked for, or nothing."""
    scorers: Sequence[TextScorer | None]
    """By answer: the log probabilities, where more than those of the answer's own tokens were asked for."""

    def whole(self, answers: Mapping[int, DrawnAnswer]) -> dict[str, Any]:
        """The body with all answers, by their numbers."""
        choices = [self._choice(number, answers[number], "message") for number in sorted(answers)]
        return {**self._top(""), "choices": choices, "usage": self.usage(answers.values())}

    async def events(self, ended: AsyncIterator[tuple[int, DrawnAnswer]], include_usage: bool) -> AsyncIterator[bytes]:
        """Each answer as a server-sent event when it ends: a chain may replace any token until then."""
        top, answers = self._top(".chunk"), list[DrawnAnswer]()
        try:
            async for number, answer in ended:
                answers.append(answer)
                yield _event({**top, "choices": [self._choice(number, answer, "delta")]})
        except (UserError, HTTPException) as error:  # the status has been sent
            yield _event(error_of(error)[1])
            return
        if include_usage:
            yield _event({**top, "choices": [], "usage": self.usage(answers)})
        yield b"data: [DONE]\n\n"

    def usage(self, answers: Iterable[DrawnAnswer]) -> dict[str, int]:
        """Tokens of prompts and answers, and the cost of the chains in token-forwards."""
        costs = [(answer.cost.token_forwards, answer.cost.prompt_forwards) for answer in answers]
        drawn = sum(answer.result.trajectory.length for answer in answers)
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": drawn, "total_tokens": self.prompt_tokens + drawn,
                "token_forwards": Cost.together(costs) if costs else 0}

    def _top(self, kind: str) -> dict[str, Any]:
        name = ("chat.completion" + kind) if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model,
                "dflash_mcmc": {"seed": self.seed}}

    def _choice(self, number: int, answer: DrawnAnswer, key: str) -> dict[str, Any]:
        path, text = answer.result.trajectory, self.echoes[number] + answer.text
        content = {key: {"role": "assistant", "content": text}} if self.chat else {"text": text}
        ids = {"token_ids": path.tokens.tolist()} if self.token_ids else {}
        details = {"log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum()),
                   "proposals": answer.result.proposals, "accepted": answer.result.accepted, "moved": answer.result.moved,
                   "token_forwards": answer.cost.token_forwards, "finish_reason": answer.finish_reason,
                   "tokens": path.tokens.tolist()}
        if self.texts is not None and np.isfinite(path.log_q).all():
            details["token_log_q"] = path.log_q.tolist()
        return {"index": number, **content, **ids, **path.sampling_mask(),
                "logprobs": self.texts and self._logprobs(path, self.scorers[number], self.texts),
                "finish_reason": _REASONS[answer.finish_reason], "dflash_mcmc": details}

    def _logprobs(self, path: Trajectory, scorer: TextScorer | None, texts: TokenTexts) -> dict[str, Any]:
        most_likely = None
        if scorer is not None and scorer.path is not None:
            path, most_likely = scorer.path, scorer.most_likely
        tokens, log_p = path.tokens.tolist(), path.log_p.tolist()
        if self.chat:
            content = [{"token": piece.decode(errors="replace"), "logprob": value, "bytes": list(piece), "top_logprobs": []}
                       for piece, value in zip(texts.shown(tokens), log_p, strict=True)]
            return {"content": content, "refusal": None}
        tops: list[Any] | None = most_likely and [{texts.shown([token])[0].decode(errors="replace"): value}
                                                  for token, value in most_likely]
        if scorer is not None and scorer.echo:  # the first token follows nothing
            tokens, log_p, tops = [*path.prompt.tolist(), *tokens], [None, *log_p], tops and [None, *tops]
        pieces = [piece.decode(errors="replace") for piece in texts.shown(tokens)]
        offsets = list(accumulate(map(len, pieces[:-1]), initial=0)) if pieces else []
        return {"tokens": pieces, "token_logprobs": log_p, "top_logprobs": tops, "text_offset": offsets}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


_LOOKS_SECONDS = 0.5
"""Between two looks at whether a client that waits is still there."""
_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LOOPBACK = ("localhost", "*.localhost", "127.0.0.1", "::1", "[::1]")
_LOGS = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
_LOGS["loggers"]["uvicorn"]["level"] = "WARNING"
_LOGS["handlers"]["access"]["stream"] = "ext://sys.stderr"
_Key = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


class Service:
    """Answers requests with a model that is loaded here. Raises UserError for an engine that cannot be started.

    Args:
        options: limits.
        config: the configuration of model and sampler, as it was composed.
    """

    def __init__(self, options: ServeOptions, config: Config):
        self.options, self.name, self._config = options, model_name(config), config
        self._target, self.workers, self._longest_prompt = started(config, options)
        self._started, self._registry = int(time.time()), (registry := CollectorRegistry())
        self._requests = Counter("dflash_mcmc_requests", "Requests for answers by status.", ("status",), registry=registry)
        self._seconds = Histogram("dflash_mcmc_request_seconds", "Seconds from a request to the end of its answers.",
                                  buckets=_BOUNDS, registry=registry)
        self._generated = Counter("dflash_mcmc_generated_tokens", "Tokens of answers.", registry=registry)
        self._forwards = Counter("dflash_mcmc_token_forwards", "Positions of the target's forwards.", registry=registry)
        for place, name in enumerate(("waiting", "live")):
            gauge = Gauge(f"dflash_mcmc_{name}", f"Answers that are {name}.", registry=registry)
            gauge.set_function(lambda place=place: self.workers.counts[place])  # type: ignore[misc]
        # A tokenizer is used by one thread at a time, and a long prompt must not hold up the other connections.
        self._reader = ThreadPoolExecutor(1, "dflash_mcmc serve reads")
        self._reader.submit(int).result()  # the thread runs from the start

    def server(self) -> uvicorn.Server:
        """The server, which closes the engine at its end. Of more than 2,048 connections the others get status 503.

        A name that its owner points at this machine (DNS rebinding) would let a page of another site read answers: the header
        Host must be allowed. So must the Origin of a page before its browser sends JSON, which FastAPI asks for.
        """
        @asynccontextmanager
        async def life(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.get_running_loop().run_in_executor(self._reader, self.workers.close)
            self._reader.shutdown()

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
        keyed = [Depends(self.check_key)]
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], dependencies=keyed)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"], dependencies=keyed)
        app.add_api_route("/v1/models", self.models, methods=["GET"], dependencies=keyed)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/metrics", self.numbers, methods=["GET"])
        for kind in (UserError, RequestValidationError, HTTPException, Exception):
            app.add_exception_handler(kind, self._refused)
        listens = [self.options.host] if self.options.host not in ("0.0.0.0", "::") else []
        hosts = [*_LOOPBACK, *map(str.lower, [*self.options.allowed_hosts, *listens])]
        origins = "|".join(re.escape(name).replace(r"\*", ".*") for name in hosts)
        app.add_middleware(RequestBodyLimitMiddleware, max_body_size=self.options.max_body_bytes)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
        app.add_middleware(CORSMiddleware, allow_origin_regex=rf"(?i:https?://({origins})(:\d+)?)",
                           allow_methods=["GET", "POST"], allow_headers=["*"])
        return uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="on", log_config=_LOGS, server_header=False,
                                             timeout_keep_alive=30, limit_concurrency=2048))

    async def check_key(self, given: _Key) -> None:
        """Raises HTTPException for a request without the key. The comparison takes the same time for keys of one length."""
        key = self.options.api_key
        if key is not None and (given is None or not secrets.compare_digest(given.credentials.encode(), key.encode())):
            raise HTTPException(401, "the request has no key, or a wrong one; allowed: the header Authorization: Bearer KEY")

    async def chat(self, asked: Chat, request: Request) -> Response:
        """`/v1/chat/completions`."""
        limits = [each for each in (asked.max_completion_tokens, asked.max_tokens) if each is not None]
        asked.max_tokens = min(limits, default=None)
        return await self._answer(request, asked, [asked.messages], asked.logprobs, top=False, echo=False)

    async def completions(self, asked: Text, request: Request) -> Response:
        """`/v1/completions`."""
        several = isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int)
        prompts: Any = asked.prompt if several else [asked.prompt]
        return await self._answer(request, asked, prompts, asked.logprobs is not None, bool(asked.logprobs), asked.echo)

    async def models(self) -> Response:
        """`/v1/models`."""
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "dflash_mcmc"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """`/health`: status 503 from a failure of the engine to the next answer."""
        waiting, live = self.workers.counts
        state, status = ("failing", 503) if self.workers.failing else ("ok", 200)
        return JSONResponse({"status": state, "waiting": waiting, "live": live}, status)

    async def numbers(self) -> Response:
        """`/metrics`, for Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, asked: RequestFields, prompts: Sequence[Any], logprobs: bool, top: bool,
                      echo: bool) -> Response:
        """The answers to a request.

        Args:
            logprobs, top: whether log p of the tokens is asked for, and the most likely token at each place.
            echo: whether the prompt is a part of the answer's text and of its log probabilities.
        """
        if asked.model not in (None, self.name):
            raise HTTPException(404, f"model: given {asked.model!r:.120}; allowed: {self.name!r}")
        loop = asyncio.get_running_loop()
        bodies, orders, ignored = await loop.run_in_executor(
            self._reader, self._read, asked, prompts, logprobs, top, echo)
        self.workers.order(orders)
        ended = self._ended(bodies, orders)
        named = ", ".join(f"{name}={value:g}" for name, value in ignored.items())
        headers = {"X-Dflash-Mcmc-Ignored": named} if named else {}
        if asked.stream:
            events = bodies.events(ended, asked.stream_options.include_usage)
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        return JSONResponse(bodies.whole(await _unless_gone(request, ended)), headers=headers)

    async def _ended(self, bodies: Bodies, orders: Sequence[Order]) -> AsyncIterator[tuple[int, DrawnAnswer]]:
        """The answers as they end, each with its number. Raises what the orders raise. Orders that are left are given up."""
        numbers, answers = {asyncio.wrap_future(order.future): number for number, order in enumerate(orders)}, []
        started, pending = time.perf_counter(), set(numbers)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=numbers.__getitem__):
                    answers.append(answer := future.result())
                    yield numbers[future], answer
            usage = bodies.usage(answers)
            self._requests.labels(status="200").inc()
            self._seconds.observe(time.perf_counter() - started)
            self._generated.inc(usage["completion_tokens"])
            self._forwards.inc(usage["token_forwards"])
        finally:
            for future in numbers:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # asyncio prints one that nobody has asked for

    def _read(self, asked: RequestFields, prompts: Sequence[Any], logprobs: bool, top: bool,
              echo: bool) -> tuple[Bodies, list[Order], dict[str, float]]:
        """The bodies, the orders, and the fields without effect. Raises UserError."""
        if len(prompts) * asked.n > self.options.max_waiting:
            raise ConfigError("n", asked.n, f"at most {self.options.max_waiting} answers in a request, over all its prompts "
                              "(serve.max_waiting)")
        longest = self._config.dataset.max_new_tokens
        max_tokens = longest if asked.max_tokens is None else asked.max_tokens
        if not (0 if echo else 1) <= max_tokens <= longest:
            raise ConfigError("max_tokens", max_tokens, f"1 to {longest} (dataset.max_new_tokens of the server); 0 with echo")
        if echo and logprobs and self._config.blend.needs_draft:
            raise ConfigError("echo", True, "false with logprobs, since a draft's blocks begin where the prompt ends")
        strings = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        stop = tuple(self._config.dataset.stop if strings is None else stop_strings(strings, "stop"))
        fields = asked.sampler | ({"sampling_mask": True} if asked.return_sampling_mask else {})
        sampler, ignored = sampler_of(self._config.sampler, fields, asked.given())
        config = config_of(self._config, sampler, max(1, max_tokens), self.options.max_width)
        encoded = [self._tokens(config, prompt) for prompt in prompts]
        orders, echoes, scorers = list[Order](), list[str](), list[TextScorer | None]()
        for index, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
            text = "" if not echo else prompt if isinstance(prompt, str) else self._target.decode(tokens)
            for number in range(asked.n):  # the keys are those of `dflash_mcmc.sample`
                key = Key(asked.seed).fold_in(f"{index:05d}", number)
                chain = partial(build.begun, config, config.sampler, tokens, key, self._target)
                scorer = TextScorer(echo, top) if logprobs and (echo or top) else None
                begin: Any = chain if max_tokens else partial(_no_answer, tokens)
                orders.append(Order(begin if scorer is None else partial(scorer.after, begin), stop, Future()))
                echoes.append(text)
                scorers.append(scorer)
        chat = isinstance(asked, Chat)
        bodies = Bodies(("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12), int(time.time()), self.name, asked.seed,
                          chat, sum(map(len, encoded)), self._texts if logprobs else None, asked.return_token_ids, echoes,
                          scorers)
        return bodies, orders, ignored

    def _tokens(self, config: Config, prompt: Any) -> np.ndarray:
        """The token ids of a prompt. Raises UserError."""
        if isinstance(prompt, str) and not re.fullmatch("[^\ud800-\udfff]+", prompt):
            raise ConfigError("prompt", prompt, "a text of at least one character, without lone surrogates")
        field = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
        try:
            (read,) = read_prompts.by_id([self._target.encode(prompt, True) if isinstance(prompt, str) else prompt]).values()
            tokens = read_prompts.token_ids(config, self._target, "00000", read)
        except UserError as error:  # names the argument of Python
            error.args = (str(error).replace("prompts:", f"{field}:", 1),)
            raise
        if len(tokens) > self._longest_prompt:
            raise ConfigError(field, f"a prompt of {len(tokens)} tokens", f"at most {self._longest_prompt} "
                              "(serve.max_prompt_tokens)")
        return tokens

    async def _refused(self, _: Request, error: Exception) -> Response:
        """The answer to an error. Starlette raises one that is a mistake of ours again, and uvicorn prints it."""
        status, body = error_of(error)
        self._requests.labels(status=str(status)).inc()
        return JSONResponse(body, status, getattr(error, "headers", None))

    @cached_property
    def _texts(self) -> TokenTexts:
        return texts_of(self._target.tokenizer, id_bound(self._target.tokenizer))


def _no_answer(prompt: np.ndarray) -> Chain:
    return ChainResult(Trajectory.start(prompt))
    yield


async def _unless_gone(request: Request, ended: AsyncIterator[tuple[int, DrawnAnswer]]) -> dict[int, DrawnAnswer]:
    """All answers by their numbers. Raises HTTPException if the client goes."""
    async def whole() -> dict[int, DrawnAnswer]:
        return {number: answer async for number, answer in ended}

    drawing = asyncio.create_task(whole())
    while not (await asyncio.wait({drawing}, timeout=_LOOKS_SECONDS))[0]:
        if await request.is_disconnected():
            drawing.cancel()
            raise HTTPException(499, "the client has gone")
    return drawing.result()
