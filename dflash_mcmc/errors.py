"""Errors that the user can fix: each is one line, and shows a traceback only on request."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path


class UserError(Exception):
    """One line that names the mistake and the allowed values. The process ends with exit code 2."""


class ConfigError(UserError, ValueError):
    """A wrong value of a configuration field: `field: given X; allowed: Y`. A ValueError, as Python programs expect."""

    def __init__(self, field: str, given: object, allowed: str):
        text = given if isinstance(given, str) and given.startswith("nothing") else repr(given)
        super().__init__(f"{shortened(field)}: given {shortened(text)}; allowed: {allowed}")


class UnknownName(ConfigError):
    """A field or an option that does not exist. The line says what does."""

    def __init__(self, line: str):
        UserError.__init__(self, line)


class RunBusy(UserError):
    """Another process is writing this run folder."""


_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Control characters, which can move a terminal's cursor or change its settings; marks without a width and of the direction of
writing, which can hide or reorder a text; and halves of characters, which cannot be written."""
_LONGEST_LINE, _TAIL = 4_000, 500
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EISDIR,
                errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENXIO, errno.ELOOP)


def of_the_disk(error: BaseException) -> UserError | None:
    """A UserError for a file that cannot be written; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _OF_THE_DISK:
        return None
    return UserError(f"{error.filename or 'a file'}: cannot be written: {error.strerror}; recorded samples are "
                     "safe; fix this and run the same command again")


def of_memory(error: BaseException) -> UserError | None:
    """The UserError for an allocation by PyTorch that failed; None for any other error."""
    text = str(error)
    # PyTorch is not imported here. It names its GPU error so, and a CPU's is a RuntimeError.
    if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in text:
        return None
    reason = " ".join(text.split())
    return UserError(f"hardware.memory_gb: the memory ran out while the run was computing ({reason[:160]}); allowed: a lower "
                     "hardware.memory_gb or hardware.num_slots, or less memory for other programs. Nothing recorded is lost: "
                     "the same command continues")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a write that fails for lack of space or permission into a UserError."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise of_the_disk(error) or error from error


@cache
def note(text: str) -> None:
    """Prints a hint that is no error: one line on stderr, once, from the first process of a launch."""
    if not int(os.environ.get("RANK", 0)):
        tell(text)


def tell(text: object) -> None:
    """Prints a text as one line on stderr."""
    print(one_line(text), file=sys.stderr, flush=True)


def printable(text: str, keep: str = "") -> str:
    """A text as a terminal can show it: other characters are shown as escapes such as `\\x1b`, but for those of `keep`."""
    return _UNPRINTED.sub(lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text)


def one_line(text: object) -> str:
    """A text as one line for a terminal. Of a very long text the middle is left out.

    Ids, answers, names and paths come from files of others, and may have any characters.
    """
    shown = printable(str(text))
    if len(shown) <= _LONGEST_LINE:
        return shown
    left_out = len(shown) - _LONGEST_LINE
    return f"{shown[: _LONGEST_LINE - _TAIL]} [... {left_out:,} characters ...] {shown[-_TAIL:]}"


def reason_of(error: BaseException, most: int = 300) -> str:
    """The message of another library's error in one line of at most so many characters; its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 3] + "..."


def did_you_mean(word: str, known: Iterable[str], meant: Sequence[str] = ()) -> str:
    """` (did you mean 'alpha'?)` for the most similar word, after what else may be `meant`; an empty text without either."""
    names = {each.lower(): each for each in known}
    every = [*meant, *(repr(names[near]) for near in difflib.get_close_matches(word.lower(), names, 1, 0.8 if meant else 0.6))]
    return f" (did you mean {' or '.join(every)}?)" if every else ""


def shortened(text: str) -> str:
    """The first 120 characters of a text."""
    return text if len(text) <= 120 else text[:117] + "..."
