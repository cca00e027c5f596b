"""The address of the server, and signals.

The first SIGTERM or Ctrl-C ends the listening. Requests that have begun get their answers, and the process ends with exit code
0. A second signal ends it at once, with exit code 143 or 130.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from dflash_mcmc.errors import ConfigError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, before a model is loaded. Raises ConfigError for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a machine is a UnicodeError
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            allowed = f"a port of {host} that is free and may be used ({reason}), or 0 for any free one"
            raise ConfigError("serve.port", port, allowed) from error
        raise ConfigError("serve.host", host, f"an address of this machine ({reason})") from error


class Server(uvicorn.Server):
    """A server that ends with its requests after one signal, and at once after two.

    Attributes:
        received: the signals so far.
    """
    should_exit: bool
    """uvicorn's own: whether the serving ends after the requests that have begun."""

    def __init__(self, app: Any, connections: int):
        super().__init__(uvicorn.Config(app, ws="none", lifespan="off", log_level="warning", access_log=False,
                                        server_header=False, timeout_keep_alive=30, limit_concurrency=connections))
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
