"""The frame of the project's command lines: exit codes, and errors of one line.

Exit codes: 0 done; 2 a mistake in the command, the configuration or the files; 130 stopped with Ctrl-C; 141 the reader of the
output, such as `head`, has closed it; 143 stopped by SIGTERM, SIGUSR1 or SIGUSR2, with more to draw.
DFLASH_MCMC_TRACEBACK=1 shows the traceback of an error that is otherwise printed in one line.
"""

import argparse
import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from dflash_mcmc.errors import UserError, of_memory, of_the_disk, tell
from dflash_mcmc.process import ranks
from dflash_mcmc.process.stopping import Stopped

STOPPED, NO_READER, USER_ERROR = 143, 141, 2
_COLLECTING = 50_000, 20, 10
"""Thresholds of the garbage collector. With Python's own it takes a sixth of a short run, for objects that stay anyway."""
_HINT = "nothing recorded is lost: run the same command again to continue"


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises UserError for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def command(body: Callable[[list[str]], None]) -> Callable[..., NoReturn]:
    """Decorator that makes a program of its body, which takes the arguments; None means those of the command line."""
    @functools.wraps(body)
    def main(arguments: list[str] | None = None) -> NoReturn:
        if arguments is None:  # else the process is another program's
            gc.set_threshold(*_COLLECTING)
        sys.exit(guarded(lambda: body(sys.argv[1:] if arguments is None else arguments)))

    return main


def print_error(reason: object) -> None:
    """Prints an error in one line. In a launch of several processes the line has the number of the process."""
    process = f" (process {ranks.rank()})" if ranks.rank() else ""
    tell(f"error{process}: {reason}")


def guarded(body: Callable[[], None]) -> int:
    """Runs a program and returns its exit code. A mistake of the user is printed in one line."""
    try:
        body()
        print(end="", flush=True)
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (UserError, OSError, RuntimeError) as error:
        shown = of_the_disk(error) or of_memory(error) or error
        if os.environ.get("DFLASH_MCMC_TRACEBACK") or not isinstance(shown, UserError):
            raise
        print_error(shown)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"\nstopped; {_HINT}", file=sys.stderr)
        return 130
    except Stopped as stopped:
        print(f"\nstopped by {stopped}; {_HINT}", file=sys.stderr)
        return STOPPED
