"""What every refusal is held to: one line, which says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_mcmc.config import command
from dflash_mcmc.errors import UserError


@contextmanager
def refused(*parts: str, start: str = "") -> Iterator[None]:
    """What is done inside is refused with a UserError of one line, which begins with `start` and has these parts in it."""
    with pytest.raises(UserError) as caught:
        yield
    told = str(caught.value)
    assert told.startswith(start)
    assert "\n" not in told
    for part in parts:
        assert part in told


def command_is_refused(arguments: list[str], *parts: str, start: str = "") -> None:
    """A command line of the entrypoint is."""
    command.prepare()
    with refused(*parts, start=start):
        command.check_command(arguments)
