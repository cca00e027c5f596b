"""What every request passes: hosts and origins, the key, the limit of its body, a line of log, and counters for Prometheus."""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.serve.answers import Refused

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import Message, Receive, Scope, Send

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COUNTED = {
    "requests": ("Requests by path and status.", ("path", "status")),
    "answers": ("Drawn answers, by reason of their end.", ("finish_reason",)),
    "prompt_tokens": ("Tokens of prompts.", ()),
    "generated_tokens": ("Tokens of answers.", ()),
    "token_forwards": ("Positions at which the target was evaluated.", ()),
    "proposals": ("Metropolis-Hastings proposals.", ()),
    "accepted": ("Accepted proposals.", ()),
    "moved": ("Accepted proposals that differ from the sequence they replace.", ()),
    "dropped": ("Chains that ended early, because the client had gone or the time was over.", ()),
    "engine_failures": ("Failures of the engine.", ())}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_LOOPBACK = ("localhost", "*.localhost", "127.0.0.1", "::1", "[::1]")
_MOST_DISCARDED = 64 * 2**20
"""Bytes of a body that is too long that are read and forgotten, so that its client reads the answer."""


class Metrics:
    """Counters, which any thread may add to."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._counters = {name: Counter(f"dflash_mcmc_{name}", meaning, labels, registry=self._registry)
                          for name, (meaning, labels) in _COUNTED.items()}
        self._gauges = {name: Gauge(f"dflash_mcmc_{name}", f"Answers that are {name}.", registry=self._registry)
                        for name in ("waiting", "live")}
        self.seconds = Histogram("dflash_mcmc_request_seconds", "Seconds from a request to the end of its answer.",
                                 buckets=_BOUNDS, registry=self._registry)

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        """Adds to a counter of `_COUNTED`, with the values of its labels."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def text(self, waiting: int, live: int) -> bytes:
        """All numbers in the text format of Prometheus."""
        self._gauges["waiting"].set(waiting)
        self._gauges["live"].set(live)
        return generate_latest(self._registry)


def guarded(app: Any, key: str | None, metrics: Metrics, hosts: Sequence[str]) -> Any:
    """An ASGI application in front of another one, with Starlette's middleware for hosts and origins.

    A name that its owner points at this machine (DNS rebinding) lets a page of another site read answers, and is in Host. A
    page sends its Origin, and its JSON waits for a preflight request (CORS).

    Args:
        app: the application.
        key: the key that requests of `/v1` must have; None for none.
        metrics: counts requests.
        hosts: names in Host and Origin that are allowed besides those of this machine; `*` allows all.
    """
    names = [*_LOOPBACK, *(name.lower() for name in hosts if name not in ("0.0.0.0", "::"))]
    origins = "|".join(re.escape(name).replace(r"\*\.", r"([a-z0-9-]+\.)+").replace(r"\*", ".*") for name in names)
    known = re.compile(rf"https?://({origins})(:\d+)?", re.IGNORECASE)
    inner = CORSMiddleware(_Guard(app, key, known if "*" not in hosts else None), allow_origin_regex=known.pattern,
                           allow_methods=["GET", "POST"], allow_headers=["*"])
    return _Logged(TrustedHostMiddleware(inner, names, www_redirect=False), metrics)


class _Guard:
    """Refuses requests without the key, POST requests without JSON, which a page of any site may send, and foreign origins."""

    def __init__(self, app: Any, key: str | None, origins: re.Pattern[str] | None):
        self._app, self._key, self._origins = app, None if key is None else key.encode(), origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refused := self._refusal(scope):
            await JSONResponse(refused.body(), refused.status, {"Connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        origin, kind = headers.get("origin"), headers.get("content-type", "")
        if origin is not None and self._origins is not None and not self._origins.fullmatch(origin):
            return Refused(403, str(ConfigError("Origin", origin, "a name of this machine, such as localhost, or one of "
                                                "serve.allowed_hosts")), code="wrong_host")
        if not scope["path"].startswith("/v1"):
            return None
        if scope["method"] == "POST" and kind.partition(";")[0].strip().lower() != "application/json":
            return Refused(415, str(ConfigError("Content-Type", kind or None, "application/json")))
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1")
        # The comparison takes the same time for every key of the same length.
        if self._key is None or (scheme.lower() == "bearer" and hmac.compare_digest(key, self._key)):
            return None
        return Refused(401, "the request has no key, or a wrong one; allowed: the header Authorization: Bearer KEY with the "
                       "server's key", code="invalid_api_key")


class _Logged:
    """Writes a line for each request and counts it."""

    def __init__(self, app: Any, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = next((each for each in PATHS if scope["path"] in (each, each + "/")), "other")
            seconds = time.perf_counter() - started
            self._metrics.add("requests", path=path, status=str(status))
            self._metrics.seconds.observe(seconds)
            line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {scope['method'][:10]} {path} {status} {seconds:.3f}s"
            print(" ".join(filter(None, [line, scope.get("dflash_mcmc")])), file=sys.stderr, flush=True)


async def body_of(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request. Raises Refused for one that is too long or comes too slowly."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(499, "the client has gone")
                size += len(message.get("body", b""))
                if size <= most:
                    body += message.get("body", b"")
                if not message.get("more_body", False) or size > most + _MOST_DISCARDED:
                    break
    except TimeoutError as error:
        raise Refused(408, f"the body did not come in {seconds:g} s (serve.body_seconds)", code="timeout") from error
    if size > most:
        raise Refused(413, f"body: given {size} bytes or more; allowed: at most {most} (serve.max_body_bytes)")
    return bytes(body)
