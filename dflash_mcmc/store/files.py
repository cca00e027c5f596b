"""Writes files. Neither the end of the process nor a full disk leaves a partial file."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import IO

from dflash_mcmc.errors import writing


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


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replaces the file: readers see the old or the new content, never a part. Raises UserError.

    Args:
        durable: whether this holds even if the machine fails at that moment.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    with writing(path):
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)


def cut_torn_line(path: Path) -> None:
    """Removes a last line without a line feed."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("rb+") as file:
            file.truncate(content.rfind(b"\n") + 1)
