"""The paths of the server: completions, models, health and metrics."""

import asyncio
import copy
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dflash_mcmc.api import prompts as read_prompts
from dflash_mcmc.chains import build
from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset import stop_strings
from dflash_mcmc.engine.batching.stop_strings import TokenTexts
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.ops import Chain
from dflash_mcmc.rng import Key
from dflash_mcmc.serve.answers import Bodies, TextScorer, error_of
from dflash_mcmc.serve.options import ServeOptions, model_name
from dflash_mcmc.serve.requests import Chat, RequestFields, Text, config_of, sampler_of
from dflash_mcmc.serve.workers import DrawnAnswer, Order, started
from dflash_mcmc.types import ChainResult, Trajectory

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
        from dflash_mcmc.engine.batching.prompt_encoder import id_bound
        from dflash_mcmc.engine.batching.stop_strings import texts_of

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
