"""The socket of the server, clients that send slowly, and signals.

The first SIGTERM or Ctrl-C ends the listening. Requests that have begun get their answers, and the process ends with exit code
0. A second signal ends it at once, with exit code 143 or 130.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_mcmc.errors import ConfigError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 1024
_LOOK_SECONDS = 0.5
"""Between two looks at whether a client that has ended its side is still there."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, before a model is loaded. Raises ConfigError for an address that cannot be used."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a machine is a UnicodeError
        raise ConfigError("serve.host", host, f"an address of this machine ({getattr(error, 'strerror', error)})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        allowed = f"a port of {host} that is free and may be used ({error.strerror}), or 0 for any free one"
        raise ConfigError("serve.port", port, allowed) from error
    listener.set_inheritable(False)
    return listener


class PatientProtocol(H11Protocol):
    """Closes a connection whose header does not come, and answers a client that has ended its side of the connection.

    Such a client waits for its answer, or it is gone; the end that it sends looks the same. Therefore it gets an interim
    answer (status 100) from time to time, which every client of HTTP/1.1 passes over. A client that is gone resets the
    connection.
    """

    header_seconds = 10.0
    """Seconds in which a header must have come."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a header."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Ends the waiting if the header is there."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._expiry is None and self.conn.trailing_data[0]:
            self._wait()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open for the answer to a request that is whole."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._look_for_client()
        return True

    def _look_for_client(self) -> None:
        cycle = self.cycle
        if not (cycle.response_started or self.transport.is_closing()) and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(_LOOK_SECONDS, self._look_for_client)

    def _wait(self) -> None:
        self._expiry = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


class Server(uvicorn.Server):
    """A server that ends with its requests after one signal, and at once after two.

    Attributes:
        received: the signals so far.
    """
    should_exit: bool
    """uvicorn's own: whether the serving ends after the requests that have begun."""

    def __init__(self, app: Any, header_seconds: float):
        protocol = type("Protocol", (PatientProtocol,), {"header_seconds": header_seconds})
        super().__init__(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_level="warning",
                                        access_log=False, server_header=False, timeout_keep_alive=30))
        self.received: list[int] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the serving. uvicorn's own version would raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self.handle_exit) for signum in _SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end. After an earlier signal it ends the process, whatever its threads do."""
        self.received.append(sig)
        if len(self.received) > 1:
            os._exit(128 + sig)
        self.should_exit = True
        os.write(2, b"stopping: no new requests are taken; a second signal ends those that have begun\n")

    def serve_on(self, listener: socket.socket) -> None:
        """Serves until a signal comes."""
        asyncio.run(self.serve([listener]))
