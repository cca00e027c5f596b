"""The paths of the server: completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from dflash_mcmc.api import prompts as read_prompts
from dflash_mcmc.api.choices import Samplers
from dflash_mcmc.chains import build
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.rng import Key
from dflash_mcmc.serve import answers, fields
from dflash_mcmc.serve.answers import DrawnAnswer, Envelope, Refused, Reply, Teller, TextScorer
from dflash_mcmc.serve.fields import RequestFields
from dflash_mcmc.serve.gate import PATHS, Metrics, body_of, guarded
from dflash_mcmc.serve.options import ServeOptions, model_name
from dflash_mcmc.serve.workers import Order, started
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.stop_strings import TokenTexts
    from dflash_mcmc.ops import Chain

_CHARACTERS = 64
"""Characters of a request's texts for each token of the longest prompt. A token of English has four."""


class Service:
    """Answers requests with a model that is loaded here. Raises UserError for an engine that cannot be started.

    Args:
        options: limits.
        config: the configuration of model and sampler, as it was composed.
    """

    def __init__(self, options: ServeOptions, config: Config):
        self.options, self.name, self._config, self.metrics = options, model_name(options, config), config, Metrics()
        self._target, self.workers, self._longest_prompt = started(
            config, options, lambda: self.metrics.add("engine_failures"))
        self._samplers = Samplers(config, options.max_width, options.max_steps)
        self._most_characters = options.max_prompt_characters or _CHARACTERS * self._longest_prompt
        self._started, self._asked = int(time.time()), Counter[bytes]()
        # A tokenizer is used by one thread at a time, and a long prompt must not hold up the other connections.
        self._reader = ThreadPoolExecutor(1, "dflash_mcmc serve reads")
        self._reader.submit(int).result()  # the thread runs from the start

    def app(self) -> Any:
        """The ASGI application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/metrics", self.numbers, methods=["GET"])
        app.add_exception_handler(Refused, _refused)
        app.add_exception_handler(HTTPException, _unknown)
        app.add_exception_handler(Exception, _failed)
        names = [*self.options.allowed_hosts, self.options.host]
        return guarded(app, self.options.api_key, self.metrics, names)

    def close(self, seconds: float | None = None) -> None:
        """Ends the threads after the orders that there are; waits at most so many seconds for the one that draws."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.workers.close(seconds)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._answer(request, chat=True)

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._answer(request, chat=False)

    async def models(self) -> Response:
        """`/v1/models`."""
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "dflash_mcmc"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """`/health`: status 200 if requests are answered."""
        waiting, live = self.workers.counts
        idle = time.monotonic() - self.workers.stepped if waiting + live else 0.0
        state = ("failing" if self.workers.failing else "stopped" if not self.workers.alive
                 else "stalled" if idle > self.options.stalled_seconds else "ok")
        busy = {"seconds_since_step": round(idle, 3)} if waiting + live else {}
        return JSONResponse({"status": state, "waiting": waiting, "live": live, **busy}, 200 if state == "ok" else 503)

    async def numbers(self) -> Response:
        """`/metrics`, for Prometheus."""
        waiting, live = self.workers.counts
        return Response(self.metrics.text(waiting, live), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, chat: bool) -> Response:
        body = await body_of(request, self.options.max_body_bytes, self.options.body_seconds)
        asked, orders, scorers, seed, prompt_tokens = await asyncio.get_running_loop().run_in_executor(
            self._reader, self._read, body, chat)
        heading = Envelope(("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12), int(time.time()), self.name, seed, chat)
        request.scope["dflash_mcmc"] = f"n={len(orders)} seed={seed} prompt={prompt_tokens}"
        named = ", ".join(f"{name}={value:g}" for name, value in asked.ignored.items())
        headers = {"X-Dflash-Mcmc-Ignored": named} if named else {}
        heard: asyncio.Queue[Reply | int] = asyncio.Queue()
        tellers = self._tellers(asked, orders, heard)
        told = [order._replace(chain=partial(own.begun, order.chain)) for own, order in zip(tellers, orders, strict=True)]
        numbers = self.workers.order(told)
        parts = self._parts(request, asked, told, heard, tellers, scorers, numbers, prompt_tokens)
        if asked.stream:
            events = answers.events(heading, parts, prompt_tokens, asked.stream_options.include_usage)
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        replies = await _unless_gone(request, parts)
        return JSONResponse(answers.whole(heading, replies, prompt_tokens), headers=headers)

    def _reply(self, asked: RequestFields, number: int, answer: DrawnAnswer, teller: Teller,
               scorer: TextScorer | None) -> Reply:
        """What follows the part of an answer that was told before. Raises Refused if they do not fit together."""
        if not answer.text.startswith(teller.text):
            raise Refused(500, "the tokenizer changed a text that was told before; ask without stream")
        return Reply(number, answer.result.trajectory, answer.text[len(teller.text):], teller.begin, answer,
                     self._texts if asked.logprobs else None, asked.return_token_ids, scorer)

    def _tellers(self, asked: RequestFields, orders: Sequence[Order], heard: asyncio.Queue[Reply | int]) -> list[Teller]:
        """A teller for each order. The parts of answers and the numbers of those that have ended come into the queue."""
        loop, texts = asyncio.get_running_loop(), self._texts if asked.logprobs else None
        piece = self.options.stream_tokens if asked.stream and asked.in_order else 0

        def put(item: Reply | int) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, item)

        def teller(number: int, order: Order) -> Teller:
            order.future.add_done_callback(lambda _: put(number))
            return Teller(lambda path, text, begin: put(Reply(number, path, text, begin, None, texts, asked.return_token_ids)),
                          self._target.decode, order.stop, piece)

        return [teller(number, order) for number, order in enumerate(orders)]

    async def _parts(self, request: Request, asked: RequestFields, orders: Sequence[Order], heard: asyncio.Queue[Reply | int],
                     tellers: Sequence[Teller], scorers: Sequence[TextScorer | None], numbers: Sequence[int],
                     prompt_tokens: int) -> AsyncIterator[Reply | str]:
        """The parts of answers as they are told, and a text where none has come for a time. Raises Refused."""
        clock, whole = asyncio.get_running_loop().time, list[Reply]()
        late, quiet = clock() + self.options.request_seconds, clock() + self.options.keep_alive_seconds
        try:
            while len(whole) < len(orders):
                if clock() >= late:
                    raise Refused(504, f"not finished in {self.options.request_seconds:g} s (serve.request_seconds)",
                                  code="timeout")
                try:
                    item = await asyncio.wait_for(heard.get(), max(0.0, min(late, quiet) - clock()))
                except TimeoutError:
                    yield f"{len(whole)} of {len(orders)} answers, {sum(teller.steps for teller in tellers)} operations"
                else:
                    if isinstance(item, int):
                        answer = orders[item].future.result()
                        whole.append(item := self._reply(asked, item, answer, tellers[item], scorers[item]))
                    yield item
                quiet = clock() + self.options.keep_alive_seconds
            self._count(request, whole, prompt_tokens)
        finally:
            if left := self.workers.drop(numbers):
                self.metrics.add("dropped", left)

    def _read(self, body: bytes, chat: bool) -> tuple[RequestFields, list[Order], list[TextScorer | None], int, int]:
        """The request, its orders and what scores their texts, its seed and the tokens of its prompts. Raises Refused."""
        asked = fields.read(fields.parsed(body), chat, self.name)
        characters = sum(map(_characters, asked.prompts))
        if characters > self._most_characters:
            raise Refused(400, str(ConfigError("messages" if chat else "prompt", f"{characters:,} characters", f"at most "
                                               f"{self._most_characters:,} (serve.max_prompt_characters)")),
                          "messages" if chat else "prompt", "context_length_exceeded")
        count, most = len(asked.prompts) * asked.n, min(self.options.max_choices, self.options.max_waiting)
        if count > most:
            fields.refuse("n", asked.n, f"at most {most} answers in a request, over all its prompts (serve.max_choices, "
                          "serve.max_waiting)")
        longest = self._config.dataset.max_new_tokens
        max_tokens = longest if asked.max_tokens is None else asked.max_tokens
        if max_tokens > longest:
            fields.refuse("max_tokens", max_tokens, f"at most {longest} (dataset.max_new_tokens of the server)")
        if asked.logprobs:  # before anything is drawn, and not in the thread of the connections: a large vocabulary takes long
            fields.allowed("logprobs", lambda: self._texts)
        sampler, common, ignored = self._samplers.adapted(asked.sampler, asked.openai, self.options.client_temperature)
        config = fields.allowed("sampler", lambda: self._samplers.config_for(sampler, common, max(1, max_tokens)))
        prompts = [self._tokens(config, prompt) for prompt in asked.prompts]
        seed = self._seed(prompts) if asked.seed is None else asked.seed
        stop = tuple(self._config.dataset.stop if asked.stop is None else asked.stop)
        in_order = ((config.sampler.draws_once or config.sampler.is_deterministic) and not config.dataset.must_end
                    and (config.decoder.is_null or config.decoder.keeps_tokens()))
        orders = list(self._orders(config, prompts, asked.n, seed, stop, empty=max_tokens == 0))
        scorers = self._scorers(asked, prompts)
        orders = [order if own is None or not asked.logprobs else order._replace(chain=partial(own.after, order.chain))
                  for order, own in zip(orders, scorers, strict=True)]
        # A body is not held while its answers are drawn.
        asked = asked.model_copy(update={"prompts": (), "ignored": ignored, "in_order": in_order})
        return asked, orders, scorers, seed, sum(map(len, prompts))

    def _seed(self, prompts: Sequence[np.ndarray]) -> int:
        """The seed of a request that has none."""
        if self.options.seed is None:
            return secrets.randbits(31)
        name = Key(0).fold_in(*(token for prompt in prompts for token in (*prompt.tolist(), -1))).digest
        self._asked[name] += 1
        return Key(self.options.seed).fold_in(name.hex(), self._asked[name]).integer(2**31)

    def _scorers(self, asked: RequestFields, prompts: Sequence[np.ndarray]) -> list[TextScorer | None]:
        if not asked.top and not asked.echo:
            return [None] * (len(prompts) * asked.n)
        if asked.echo and asked.logprobs and self._config.blend.needs_draft:
            fields.refuse("echo", True, "false with logprobs, since a draft's blocks begin where the prompt ends")
        texts = [each if isinstance(each, str) else self._target.decode(tokens)
                 for each, tokens in zip(asked.prompts, prompts, strict=True)]
        return [TextScorer(text if asked.echo else None, asked.top) for text in texts for _ in range(asked.n)]

    def _orders(self, config: Config, prompts: Sequence[np.ndarray], n: int, seed: int,
                stop: tuple[str, ...], empty: bool) -> Iterator[Order]:
        """An order for each prompt and answer. The keys are those of `dflash_mcmc.sample`. `empty`: answers have no token."""
        for index, tokens in enumerate(prompts):
            for number in range(n):
                key = Key(seed).fold_in(f"{index:05d}", number)
                yield Order(lambda tokens=tokens, key=key: _no_answer(tokens) if empty else build.begun(  # type: ignore
                    config, config.sampler, tokens, key, self._target), stop, Future())

    def _tokens(self, config: Config, prompt: Any) -> np.ndarray:
        chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        tokens = fields.allowed("messages" if chat else "prompt", lambda: self._encoded(config, prompt))
        if len(tokens) > self._longest_prompt:
            raise Refused(400, str(ConfigError("messages" if chat else "prompt", f"a prompt of {len(tokens)} tokens",
                                               f"at most {self._longest_prompt} (serve.max_prompt_tokens)")),
                          "messages" if chat else "prompt", "context_length_exceeded")
        return tokens

    def _encoded(self, config: Config, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            if not prompt or any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ConfigError("prompt", prompt, "a text of at least one character, without lone surrogates")
            prompt = self._target.encode(prompt, True)
        (read,) = read_prompts.by_id([prompt]).values()
        if isinstance(read, Conversation):
            read = read._replace(special_tokens_in_text=self.options.special_tokens_in_text)
        return read_prompts.token_ids(config, self._target, "00000", read)

    @cached_property
    def _texts(self) -> TokenTexts:
        from dflash_mcmc.engine.batching.prompt_encoder import id_bound
        from dflash_mcmc.engine.batching.stop_strings import texts_of

        return texts_of(self._target.tokenizer, id_bound(self._target.tokenizer))

    def _count(self, request: Request, replies: Sequence[Reply], prompt_tokens: int) -> None:
        numbers = answers.usage(replies, prompt_tokens)  # it counts a prompt once for all of its answers
        request.scope["dflash_mcmc"] += "".join(f" {key}={numbers[key]}" for key in ("completion_tokens", "token_forwards"))
        for name in ("prompt_tokens", "token_forwards"):
            self.metrics.add(name, numbers[name])
        for answer in (reply.answer for reply in replies if reply.answer is not None):
            self.metrics.add("answers", finish_reason=answer.finish_reason)
            for name, amount in (("generated_tokens", answer.result.trajectory.length), ("proposals", answer.result.proposals),
                                 ("accepted", answer.result.accepted), ("moved", answer.result.moved)):
                self.metrics.add(name, amount)


def _no_answer(prompt: np.ndarray) -> Chain:
    return ChainResult(Trajectory.start(prompt))
    yield


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


async def _unless_gone(request: Request, parts: AsyncIterator[Reply | str]) -> list[Reply]:
    """The whole answers among parts, by their numbers. Raises Refused, also if the client goes."""
    async def whole() -> list[Reply]:
        return sorted([part async for part in parts if isinstance(part, Reply)], key=lambda part: part.number)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    drawing, leaving = asyncio.create_task(whole()), asyncio.create_task(gone())
    try:
        await asyncio.wait({drawing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not drawing.done():
            raise Refused(499, "the client has gone")
        return drawing.result()
    finally:
        leaving.cancel()
        drawing.cancel()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(error.body(), error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to a mistake of ours. Starlette then raises the error again, and uvicorn prints it."""
    return JSONResponse(Refused(500, "the server failed; its log says why").body(), 500)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    there = f"; allowed: {', '.join(PATHS)}" if error.status_code == 404 else ""
    refused = Refused(error.status_code, f"{request.method} {request.url.path[:80]!r}: {error.detail}{there}")
    return JSONResponse(refused.body(), error.status_code, error.headers)
