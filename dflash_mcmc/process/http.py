"""The one reader of other servers' replies, with limits on total time and size: a slow or endless reply ends with one line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

MAX_REPLY_BYTES = 1 << 26
_MAX_TOLD = 400
"""Characters of a refusal that an error repeats."""


class NoReplyError(Exception):
    """A server has not replied with JSON. The message is one line."""

    def __init__(self, reason: str, status: int | None = None, timed_out: bool = False):
        super().__init__(" ".join(reason.encode(errors="replace").decode().split()))
        self.status, self.timed_out = status, timed_out
        """The status of a refusal, and whether the time ran out."""


def fetch_json(url: str, body: object = None, *, seconds: float, headers: Mapping[str, str] | None = None,
               max_bytes: int = MAX_REPLY_BYTES) -> Any:
    """The JSON of a reply; POST if there is a body. Redirects are not followed: they would take a key to another host.

    A timer shuts the connection down after `seconds` in all, whatever the server sends until then.

    Raises:
        NoReplyError: for a server that cannot be reached, takes longer, sends more than `max_bytes`, half a reply, another
            status than 200, or no JSON of valid Unicode.
    """
    import httpx

    sockets: list[socket.socket] = []
    late = threading.Event()

    def opened(event: str, told: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            sockets.append(told["return_value"].get_extra_info("socket"))

    def end() -> None:
        late.set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        with (httpx.Client(timeout=seconds) as client,
              client.stream("GET" if body is None else "POST", url, json=body, extensions={"trace": opened},
                            headers={"Accept-Encoding": "identity", **(headers or {})}) as reply):
            read = bytearray()
            for part in reply.iter_raw():
                read += part
                if len(read) > max_bytes:
                    raise NoReplyError(f"a reply of more than {max_bytes:,} bytes")
        if reply.status_code != 200:
            said = bytes(read[:_MAX_TOLD]).decode(errors="replace")
            raise NoReplyError(f"status {reply.status_code}" + (f": {said}" if said else ""), reply.status_code)
        found = json.loads(read)
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate can be written to no file
        return found
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        if late.is_set() or isinstance(error, httpx.TimeoutException):
            raise NoReplyError(f"no complete reply in {seconds:g} s", timed_out=True) from error
        raise NoReplyError(f"{type(error).__name__}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise NoReplyError("a reply that is no JSON of valid Unicode") from error
    finally:
        timer.cancel()
