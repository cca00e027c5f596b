"""What every request passes: the key, the limits of its body, one line of log, and counters.

The counters are in the text format of Prometheus (version 0.0.4).
"""

from __future__ import annotations

import asyncio
import bisect
import hmac
import json
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.serve.answers import Refused

if TYPE_CHECKING:
    from fastapi import Request

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_HELP = {
    "requests_total": "Requests by path and status.",
    "answers_total": "Drawn answers, by reason of their end.",
    "prompt_tokens_total": "Tokens of prompts.",
    "generated_tokens_total": "Tokens of answers.",
    "token_forwards_total": "Positions at which the target was evaluated.",
    "proposals_total": "Metropolis-Hastings proposals.",
    "accepted_total": "Accepted proposals.",
    "moved_total": "Accepted proposals that differ from the sequence they replace.",
    "dropped_total": "Chains that ended early, because the client had gone or the time was over.",
    "engine_failures_total": "Failures of the engine."}


class Metrics:
    """Counters, which any thread may add to."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[tuple[str, str]]()
        self._buckets, self._seconds = [0] * (len(_BOUNDS) + 1), 0.0

    def add(self, name: str, amount: int = 1, labels: str = "") -> None:
        """Adds to a counter of `_HELP`. Labels are written as `path="/health",status="200"`."""
        with self._lock:
            self._counts[name, labels] += amount

    def took(self, seconds: float) -> None:
        """Adds a request to the histogram of times."""
        with self._lock:
            self._buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def text(self, gauges: dict[str, float]) -> str:
        """All counters, the histogram, and gauges by name."""
        with self._lock:
            counts, buckets, seconds = Counter(self._counts), list(self._buckets), self._seconds
        lines = []
        for name, meaning in _HELP.items():
            counted = sorted((labels, count) for (own, labels), count in counts.items() if own == name) or [("", 0)]
            lines += [f"# HELP dflash_mcmc_{name} {meaning}", f"# TYPE dflash_mcmc_{name} counter"]
            lines += [f"dflash_mcmc_{name}{{{labels}}} {count}" if labels else f"dflash_mcmc_{name} {count}"
                      for labels, count in counted]
        lines += ["# HELP dflash_mcmc_request_seconds Seconds from a request to the end of its answer.",
                  "# TYPE dflash_mcmc_request_seconds histogram"]
        upto = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), buckets, strict=True):
            upto += count
            lines.append(f'dflash_mcmc_request_seconds_bucket{{le="{bound}"}} {upto}')
        lines += [f"dflash_mcmc_request_seconds_sum {seconds:.6f}", f"dflash_mcmc_request_seconds_count {upto}"]
        for name, value in gauges.items():
            lines += [f"# TYPE dflash_mcmc_{name} gauge", f"dflash_mcmc_{name} {value:g}"]
        return "\n".join(lines) + "\n"


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_LOOPBACK = re.compile(r"localhost|([a-z0-9-]+\.)+localhost|127(\.\d{1,3}){3}|::1")
_MOST_DISCARDED = 64 * 2**20
"""Bytes of a body that is too long that are read and forgotten, so that its client reads the answer."""


FAILED = Refused(500, "the server failed; its log says why")
"""The answer to a mistake of ours."""


class Gate:
    """An ASGI application in front of another one.

    Args:
        app: the application.
        key: the key that requests of `/v1` must have; None for none.
        metrics: counts requests.
        hosts: names in Host and Origin that are allowed besides loopback ones and the address that a request came to.
    """

    def __init__(self, app: Any, key: str | None, metrics: Metrics, hosts: Sequence[str]):
        self._app, self._key, self._metrics = app, None if key is None else key.encode(), metrics
        self._hosts = {name.lower() for name in hosts} - {"0.0.0.0", "::"}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handles a request. A failure of the application is an answer with status 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noting(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if refusal := self._refusal(scope):
                await _reply(noting, refusal)
            elif scope["path"].startswith("/v1") and not self._may_enter(scope):
                await _reply(noting, Refused(401, "the request has no key, or a wrong one; allowed: the header Authorization: "
                                             "Bearer KEY with the server's key", code="invalid_api_key"))
            else:
                await self._app(scope, receive, noting)
        except Exception:  # a mistake of ours must not end the server
            traceback.print_exc(file=sys.stderr)
            if not status:
                await _reply(noting, FAILED)
        finally:
            self._log(scope, status, time.perf_counter() - started)

    def _may_enter(self, scope: dict[str, Any]) -> bool:
        """Whether the request has the key. The comparison takes the same time for every key of the same length."""
        if self._key is None:
            return True
        header = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        kind, _, key = header.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

    def _refusal(self, scope: dict[str, Any]) -> Refused | None:
        """Why a request is refused whatever its path: a web page of another site may have sent it.

        A page can send texts and forms to every address without asking, but no JSON (CORS). A name that its owner points at
        this machine (DNS rebinding) lets a page read answers, and is in Host.
        """
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        for name, header in (("Host", headers.get(b"host", "")), ("Origin", headers.get(b"origin"))):
            if header is not None and not self._is_known(header.rpartition("//")[2], scope):
                return Refused(403, str(ConfigError(name, header, "a name of this machine, such as localhost, or one of "
                                                    "serve.allowed_hosts")), code="wrong_host")
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and scope["path"].startswith("/v1") and kind != "application/json":
            return Refused(415, str(ConfigError("Content-Type", headers.get(b"content-type"), "application/json")))
        return None

    def _is_known(self, host: str, scope: dict[str, Any]) -> bool:
        """Whether a host with or without a port is of this machine, or allowed."""
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        return bool("*" in self._hosts or name in self._hosts or name == str((scope.get("server") or [None])[0])
                    or _LOOPBACK.fullmatch(name))

    def _log(self, scope: dict[str, Any], status: int, seconds: float) -> None:
        path = next((each for each in PATHS if scope["path"] in (each, each + "/")), "other")
        self._metrics.add("requests_total", 1, f'path="{path}",status="{status}"')
        self._metrics.took(seconds)
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {scope['method'][:10]} {path} {status} {seconds:.3f}s"
        print(" ".join(filter(None, [line, scope.get("dflash_mcmc")])), file=sys.stderr, flush=True)


class HeldBytes:
    """The bytes of all bodies that are being read.

    Args:
        most: more are refused.
    """

    def __init__(self, most: int):
        self._most, self._held = most, 0

    @contextmanager
    def of_request(self) -> Iterator[Callable[[int], None]]:
        """A context with a function that adds bytes of one request; its end takes them off. The function raises Refused."""
        mine = 0

        def add(size: int) -> None:
            nonlocal mine
            if self._held + size > self._most:
                raise Refused(503, f"the bodies of all requests have {self._held + size} bytes; allowed: at most {self._most} "
                              "(serve.max_held_bytes); try again later", code="too_many_bytes")
            self._held, mine = self._held + size, mine + size

        try:
            yield add
        finally:
            self._held -= mine


async def body_of(request: Request, most: int, seconds: float, held: Callable[[int], None]) -> bytes:
    """The body of a request. Raises Refused for one that is too long or comes too slowly.

    Args:
        held: takes the number of bytes that are kept; see `HeldBytes`.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(499, "the client has gone")
                size += len(message.get("body", b""))
                if size <= most:
                    held(len(message.get("body", b"")))
                    body += message.get("body", b"")
                if not message.get("more_body", False) or size > most + _MOST_DISCARDED:
                    break
    except TimeoutError as error:
        raise Refused(408, f"the body did not come in {seconds:g} s (serve.body_seconds)", code="timeout") from error
    if size > most:
        raise Refused(413, f"body: given {size} bytes or more; allowed: at most {most} (serve.max_body_bytes)")
    return bytes(body)


async def _reply(send: Any, error: Refused) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
