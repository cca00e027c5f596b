"""Whose turn it is to run a model: a run changes the model's attention and taps its layers, so threads take turns."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_mcmc.errors import UserError


class Turn:
    """Lets one thread at a time use a model. A turn may be ended by another thread than the one that took it."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    @contextmanager
    def taken(self, nests: bool) -> Iterator[None]:
        """A context that begins when no other thread uses the model.

        Args:
            nests: whether the thread whose turn it is may take it again, for an inner use that ends before the outer one.

        Raises:
            UserError: if this thread has the turn and may not take it again. It would wait for itself.
        """
        if self._owner == threading.get_ident():
            if not nests:
                raise UserError("engine: given a second call while a stream of the same model is open; allowed: after the "
                                "stream has ended or is closed")
            yield
            return
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = 0
