"""Writes files. Neither the end of the process nor a full disk leaves a partial file."""

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dflash_mcmc.errors import UserError, note, writing
from dflash_mcmc.store.schema import Damaged, Schema, has_zeros

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
        with _opened(path) as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:  # another process has just removed it
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a file that can be read") from error


def each_line(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yields the complete lines of a file, without their line feeds, from an offset at which a line begins.

    What follows them is a line without a line feed, or blocks of zeros that a power loss leaves at the end of a file. It holds
    one line at a time, however long the file is. Raises UserError as `read_regular` does.
    """
    if not is_there(path):
        return
    zeros: list[bytes] = []  # lines with blocks of zeros count only if another line follows them
    try:
        with _opened(path) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                zeros.append(line[:-1])
                if not has_zeros(line):
                    yield from zeros
                    zeros = []
    except FileNotFoundError:  # another process has just removed it
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a file that can be read") from error


def _opened(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def objects_of(path: Path, schema: Schema, advice: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's complete lines; none without the file.

    Raises UserError, which ends with `advice`, for a line that is damaged or has another schema, and as `read_regular` does.
    """
    for line_number, line in enumerate(each_line(path), start=1):
        try:
            found = schema.read(line)
        except Damaged as error:
            raise UserError(f"{path}: line {line_number}: {error}; {advice}") from error
        yield found


def make_folder(folder: Path, field: str) -> list[Path]:
    """Makes a folder and its parents. Returns those that were not there, the innermost first.

    Args:
        field: the option that an error names. Raises UserError.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{field}: cannot make {folder}: {error.strerror}; allowed: a folder that can be "
                        "written to") from error
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, the innermost first, up to the first one that has content."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def refuse_link(path: Path) -> None:
    """Raises UserError for a link: what a run writes or cuts must be in its own folder."""
    if path.is_symlink():
        raise UserError(f"{path}: is a link to {os.readlink(path)!r:.80}; allowed: a regular file, which a run may change; "
                        "put a copy of the file here")


def open_to_extend(path: Path) -> IO[bytes]:
    """The file, unbuffered, to add lines at its end; a new one if there is none.

    Whatever follows its last complete line is removed first: a part of a line that a killed process has left, or zeros that a
    power loss has left. Raises UserError, also for a link.
    """
    refuse_link(path)
    with writing(path):
        if is_there(path):
            length = sum(len(line) + 1 for line in each_line(path))
            if rest := read_regular(path, length):
                if has_zeros(rest):
                    note(f"{path}: {len(rest):,} bytes at its end were removed: blocks of zeros, as after a power loss. What "
                         "was written there is done again")
                with open(path, "rb+", opener=_without_links) as file:
                    file.truncate(length)
        return open(path, "ab", buffering=0, opener=_without_links)


def open_to_append(path: Path) -> IO[bytes]:
    """The file, to add output of any kind at its end; a new one if there is none. Raises UserError, also for a link."""
    refuse_link(path)
    is_there(path)  # a pipe would wait for a reader
    with writing(path):
        return open(path, "ab", opener=_without_links)


def _without_links(path: str, flags: int) -> int:
    """For `open`: a link that appears between a check and the opening is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # nobody can put a link there before
    with writing(path):
        try:
            with open(temporary, "xb", opener=_without_links) as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
