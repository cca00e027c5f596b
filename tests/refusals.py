"""Checks of errors: one line that contains the given value and the allowed ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_mcmc.config import command
from dflash_mcmc.errors import UserError


@contextmanager
def refused(*parts: str, start: str = "") -> Iterator[None]:
    """Expects a UserError of one line that begins with `start` and contains all of `parts`."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert message.startswith(start)
    assert "\n" not in message
    for part in parts:
        assert part in message


def command_is_refused(arguments: list[str], *parts: str, start: str = "") -> None:
    """Expects such an error for a command line of `python -m dflash_mcmc`."""
    command.prepare()
    with refused(*parts, start=start):
        command.check_command(arguments)
