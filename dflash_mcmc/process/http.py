"""The one reader of other servers' replies, with limits on total time and size: a slow or endless reply ends with one line."""

import contextlib
import json
import os
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from dflash_mcmc.errors import ConfigError

_SECONDS = 5.0


@cache
def reachable() -> bool:
    """Whether the hub can be reached. If one request fails, the hub's libraries are set to use only their local cache.

    By default the libraries would try five times, with growing pauses, and print a line for each try.
    """
    import huggingface_hub.constants as hub

    if not hub.HF_HUB_OFFLINE:
        try:
            import httpx

            httpx.head(hub.ENDPOINT, timeout=_SECONDS)
            return True
        except Exception:  # no route, no DNS entry, an unusable proxy: the hub cannot be reached
            import datasets.config

            hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False


MAX_REPLY_BYTES = 1 << 26
_POLL_SECONDS = 0.1
_MAX_TOLD = 400
"""Characters of a refusal that an error repeats."""


class NoReplyError(Exception):
    """A server has not replied with JSON. The message is one line."""

    def __init__(self, reason: str, status: int | None = None, timed_out: bool = False):
        super().__init__(" ".join(reason.encode(errors="replace").decode().split()))
        self.status, self.timed_out = status, timed_out
        """The status of a refusal, and whether the time ran out."""


def fetch_json(url: str, body: object = None, *, seconds: float, headers: Mapping[str, str] | None = None,
               max_bytes: int = MAX_REPLY_BYTES, stopped: threading.Event | None = None) -> Any:
    """The JSON of a reply; POST if there is a body. Redirects are not followed: they would take a key to another host.

    A thread that no exit of the process waits for talks to the server. It is given up after `seconds` in all, or when
    `stopped` is set, whatever the server sends until then.

    Raises:
        NoReplyError: for a server that cannot be reached, takes longer, sends more than `max_bytes`, half a reply, another
            status than 200, or no JSON of valid Unicode, and if `stopped` is set.
    """
    sockets: list[socket.socket] = []
    outcome: queue.SimpleQueue[tuple[int, bytes] | Exception] = queue.SimpleQueue()

    def opened(event: str, told: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            sockets.append(told["return_value"].get_extra_info("socket"))

    def talk() -> None:
        try:
            import httpx

            # the longest silence is more than the caller waits
            with (httpx.Client(timeout=2 * seconds, verify=_trusted()) as client,
                  client.stream("GET" if body is None else "POST", url, json=body, extensions={"trace": opened},
                                headers={"Accept-Encoding": "identity", **(headers or {})}) as reply):
                read = bytearray()
                for part in reply.iter_raw():
                    read += part
                    if len(read) > max_bytes:
                        break
                outcome.put((reply.status_code, bytes(read)))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=talk, daemon=True).start()
    end, found = time.monotonic() + seconds, None
    while found is None and time.monotonic() < end and not (stopped and stopped.is_set()):
        with contextlib.suppress(queue.Empty):
            found = outcome.get(timeout=_POLL_SECONDS)
    if found is None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if stopped and stopped.is_set():
            raise NoReplyError("stopped")
        raise NoReplyError(f"no complete reply in {seconds:g} s", timed_out=True)
    if isinstance(found, Exception):
        raise NoReplyError(f"{type(found).__name__}: {found}") from found
    status, read = found
    if len(read) > max_bytes:
        raise NoReplyError(f"a reply of more than {max_bytes:,} bytes")
    if status != 200:
        said = read[:_MAX_TOLD].decode(errors="replace")
        raise NoReplyError(f"status {status}" + (f": {said}" if said else ""), status)
    try:
        value = json.loads(read)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate can be written to no file
    except (ValueError, RecursionError) as error:
        raise NoReplyError("a reply that is no JSON of valid Unicode") from error
    return value


def check_url(field: str, url: str | None) -> None:
    """Raises ConfigError for anything but a URL of http or https. A URL that may hold a secret is not repeated."""
    allowed = "an http(s) URL without user, password and query, such as http://localhost:8000/v1"
    try:
        parts = urlsplit(url or "")
        host, secret = parts.hostname, parts.username is not None or bool(parts.query or parts.fragment)
    except ValueError as error:
        raise ConfigError(field, url, allowed) from error
    if secret or not host or parts.scheme not in ("http", "https"):
        raise ConfigError(field, "a URL with a user or a query" if secret else url, allowed)


def api_key(field: str, variable: str | None) -> str:
    """The key in a variable of the environment; empty without one. Nothing stores or repeats it.

    Raises ConfigError if it is missing, or no single word that a header can hold.
    """
    if not variable:
        return ""
    allowed = "a variable of the environment that holds one key, or null for an endpoint without keys"
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable):  # somebody may have typed the key itself
        raise ConfigError(field, "something else than capitals, digits and _", allowed)
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(field, variable, f"{allowed} of printable characters" if key else allowed)
    return key


@cache
def _trusted() -> ssl.SSLContext:
    """The certificates that are trusted. Reading them takes 20 ms."""
    import httpx

    return httpx.create_ssl_context()
