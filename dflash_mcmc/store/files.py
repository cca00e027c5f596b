"""Writing files so that no end of the process, and no full disk, leaves a part of what was meant."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import IO

from dflash_mcmc.errors import writing


def append_line(path: Path, file: IO, line: bytes) -> None:
    """Adds all of a line to an unbuffered file to which nobody else writes, or nothing. Raises UserError."""
    with writing(path):
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "a line was written in part: is the disk full?")
        except OSError:
            file.truncate(size)  # no later line may join a part of this one
            raise


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """The file is the old one or the new one, never a part. `durable`: also when the machine fails just then.

    Raises UserError where it cannot be written.
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
    """Cuts off a torn last line."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("rb+") as file:
            file.truncate(content.rfind(b"\n") + 1)
