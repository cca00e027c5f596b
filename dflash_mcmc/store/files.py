"""Writes files. Neither the end of the process nor a full disk leaves a partial file."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import IO

from dflash_mcmc.errors import UserError, note, writing
from dflash_mcmc.store.lines import has_zeros, whole_lines

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
          (stat.S_ISBLK, "a device"))


def is_there(path: Path) -> bool:
    """Whether a regular file, or a link to one, has this path. Raises UserError for anything else, such as a pipe."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{path}: is a link to {os.readlink(path)!r:.80}, which does not exist; allowed: a regular file; "
                            "remove the link") from None
        return False
    except OSError as error:  # a link to itself, a file in place of a folder, or no permission
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a regular file") from error
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "no file")
        raise UserError(f"{path}: is {kind}; allowed: a regular file; move it away")
    return True


def read_regular(path: Path, offset: int = 0) -> bytes | None:
    """The content of a file from an offset on; None if there is no file. Never waits for a writer.

    Raises UserError for anything but a regular file, and for one that cannot be read.
    """
    if not is_there(path):
        return None
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:  # another process has just removed it
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a file that can be read") from error


def open_to_extend(path: Path) -> IO[bytes]:
    """The file, unbuffered, to add lines at its end; a new one if there is none.

    Whatever follows its last complete line is removed first: a part of a line that a killed process has left, or zeros that a
    power loss has left. Raises UserError.
    """
    with writing(path):
        if is_there(path):
            cut_torn_line(path)
        return path.open("ab", buffering=0)


def append_line(path: Path, file: IO, line: bytes) -> None:
    """Appends the whole line or nothing. The file is unbuffered and has no other writer. Raises UserError."""
    with writing(path):
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "a line was written in part: is the disk full?")
        except OSError:
            file.truncate(size)  # a partial line would join the next one
            raise


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replaces the file: readers see the old or the new content, never a part. Raises UserError.

    Args:
        durable: whether this holds even if the machine fails at that moment.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    with writing(path):
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)


def cut_torn_line(path: Path) -> None:
    """Removes what follows the last complete line: a line without a line feed, or blocks of zeros. Zeros are told."""
    content = read_regular(path) or b""
    length = whole_lines(content)[1]
    if length == len(content):
        return
    if has_zeros(content[length:]):
        note(f"{path}: {len(content) - length:,} bytes at its end were removed: blocks of zeros, as after a power loss. What "
             "was written there is done again")
    with path.open("rb+") as file:
        file.truncate(length)
