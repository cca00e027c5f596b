"""A server in a thread of the test's process."""

import asyncio
import threading
from typing import Self

from dflash_mcmc.serve import options
from dflash_mcmc.serve.app import Service
from tests import processes


class Served:
    """A server on a port of its own, from its construction to `stop`."""

    def __init__(self, overrides: list[str]):
        plan, config = options.compose(overrides)
        self.listener = options.listening(plan.host, plan.port)
        self.port = self.listener.getsockname()[1]
        self.service = Service(plan, config)
        self.server = self.service.server()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.listener])))
        self._thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(processes.HANG)
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
