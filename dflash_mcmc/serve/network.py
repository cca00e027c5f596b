"""The address of the server, and signals.

The first SIGTERM or Ctrl-C ends the listening. Requests that have begun get their answers, and the process ends with exit code
0. A second signal ends it at once, with exit code 143 or 130.
"""

from __future__ import annotations

import errno
import os
import socket
from types import FrameType
from typing import Any

import uvicorn

from dflash_mcmc.errors import ConfigError


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
    """A server that ends with its requests after one signal, and at once after two."""
    should_exit: bool
    """uvicorn's own: whether the serving ends after the requests that have begun."""

    def __init__(self, app: Any, connections: int):
        super().__init__(uvicorn.Config(app, ws="none", lifespan="off", log_level="warning", access_log=False,
                                        server_header=False, timeout_keep_alive=30, limit_concurrency=connections))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end. After an earlier signal it ends the process, whatever its threads do.

        uvicorn's own notes each signal, and raises it again at the end.
        """
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        os.write(2, b"stopping: no new requests are taken; a second signal ends those that have begun\n")
