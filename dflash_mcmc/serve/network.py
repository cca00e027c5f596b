"""The address of the server, and uvicorn."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

from dflash_mcmc.errors import ConfigError


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, before a model is loaded. Raises ConfigError for an address that cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a machine is a UnicodeError
        raise ConfigError("serve.port", port, f"a port of serve.host={host} that is free, or 0 for any free one "
                          f"({getattr(error, 'strerror', error)})") from error


def server_of(app: Any) -> uvicorn.Server:
    """The server of an application. Of more than 2,048 connections at once the others get status 503."""
    return uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="warning", access_log=False,
                                         server_header=False, timeout_keep_alive=30, limit_concurrency=2048))
