"""What every request passes: hosts and origins, the key, the limit of its body, a line of log, and numbers for Prometheus."""

from __future__ import annotations

import hmac
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse

from dflash_mcmc.serve.answers import error_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dflash_mcmc.serve.options import ServeOptions
    from dflash_mcmc.serve.workers import Workers

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LOOPBACK = ("localhost", "*.localhost", "127.0.0.1", "::1", "[::1]")


class Metrics:
    """Numbers for Prometheus."""

    def __init__(self, workers: Workers):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("dflash_mcmc_requests", "Requests by path and status.", ("path", "status"), registry=registry)
        self.seconds = Histogram("dflash_mcmc_request_seconds", "Seconds from a request to the end of its answer.",
                                 buckets=_BOUNDS, registry=registry)
        self.tokens = Counter("dflash_mcmc_generated_tokens", "Tokens of answers.", registry=registry)
        self.forwards = Counter("dflash_mcmc_token_forwards", "Positions of the target's forwards.", registry=registry)
        for place, name in enumerate(("waiting", "live")):
            gauge = Gauge(f"dflash_mcmc_{name}", f"Answers that are {name}.", registry=registry)
            gauge.set_function(lambda place=place: workers.counts[place])  # type: ignore[misc]


def guard(app: FastAPI, options: ServeOptions, metrics: Metrics) -> None:
    """Puts the guards in front of an application.

    A name that its owner points at this machine (DNS rebinding) lets a page of another site read answers, and is in Host. A
    page sends its Origin. `serve.allowed_hosts` has the names that are allowed besides those of this machine; `*` allows all.
    """
    hosts = [name.lower() for name in (*options.allowed_hosts, options.host) if name not in ("0.0.0.0", "::")]
    names = [*_LOOPBACK, *hosts]
    origins = "|".join(re.escape(name).replace(r"\*\.", r"([a-z0-9-]+\.)+").replace(r"\*", ".*") for name in names)
    pattern = ".*" if "*" in names else rf"(?i:https?://({origins})(:\d+)?)"
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
    app.add_middleware(CORSMiddleware, allow_origin_regex=pattern, allow_methods=["GET", "POST"], allow_headers=["*"])
    app.add_middleware(_Guard, options=options, origins=re.compile(pattern), metrics=metrics,
                       paths=[route.path for route in app.routes])  # type: ignore[attr-defined]


class _Guard:
    """Refuses foreign origins, requests without the key and bodies that are too long. Writes and counts each request."""

    def __init__(self, app: ASGIApp, options: ServeOptions, origins: re.Pattern[str], metrics: Metrics, paths: Sequence[str]):
        self._app, self._origins, self._metrics, self._paths = app, origins, metrics, paths
        self._key, self._most = options.api_key, options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the beginning and the end of the application
            return await self._app(scope, receive, send)
        started, status, size = time.perf_counter(), 500, 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most:
                raise HTTPException(413, f"body: given {size} bytes or more; allowed: {self._most} (serve.max_body_bytes)")
            return message

        try:
            if refused := self._refusal(scope):
                code, body = error_of(refused)
                await JSONResponse(body, code)(scope, receive, noting)
            else:
                await self._app(scope, limited, noting)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            seconds = time.perf_counter() - started
            self._metrics.requests.labels(path=path, status=str(status)).inc()
            self._metrics.seconds.observe(seconds)
            line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {scope['method'][:10]} {path} {status} {seconds:.3f}s"
            print(line, file=sys.stderr, flush=True)

    def _refusal(self, scope: Scope) -> HTTPException | None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and not self._origins.fullmatch(origin):
            return HTTPException(403, f"Origin: given {origin!r:.120}; allowed: a name of this machine, such as localhost, "
                                 "or one of serve.allowed_hosts")
        if self._key is None or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":  # CORSMiddleware answers
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # The comparison takes the same time for every key of the same length.
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode()):
            return None
        return HTTPException(401, "the request has no key, or a wrong one; allowed: the header Authorization: Bearer KEY")
