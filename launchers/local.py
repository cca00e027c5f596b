"""One command on all GPUs of this machine: one process per GPU, and all draw every run together.

    python launchers/local.py experiment=guided_power_sampling condition=ps
    python launchers/local.py -m experiment=guided_power_sampling condition=greedy,ps sampler.alpha=2,4
    python launchers/local.py --processes 2 -m experiment=demo condition=greedy,temp        on CPUs, with two processes

The arguments are a command line of `python -m dflash_mcmc`. Each process goes through all points and draws the samples that
no other process has claimed: points of unequal length leave no GPU idle. The first process shows the progress, reports points
that failed and prints the table of all points. The command returns the exit code of this process. If another process dies,
this is reported and the others draw its share (`accelerate launch` would end them as well).
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from dflash_mcmc.config.command import check_command
from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import UserError
from dflash_mcmc.process import program
from dflash_mcmc.process.stopping import SIGNALS

_POLL_SECONDS = 0.2


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    given, command = _parser().parse_known_args(arguments)
    jobs = check_command(command).jobs  # so that a mistake is reported once, by this process
    count = _num_groups(jobs) if given.processes is None else given.processes
    if count < 1:
        raise UserError(f"--processes: given {count}; allowed: at least 1")
    started = [_start(number, count, command) for number in range(count)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and this one waits for the others

    def pass_on(sent: int, frame: object) -> None:
        for process in started:
            process.send_signal(sent)

    for known in SIGNALS:
        signal.signal(known, pass_on)
    running = dict(enumerate(started))
    while running:
        for number in [number for number, process in running.items() if process.poll() is not None]:
            _report_death(number, running.pop(number).returncode)
        time.sleep(_POLL_SECONDS)
    first = started[0].returncode
    sys.exit(first if first >= 0 else 128 - first)


def _num_gpus() -> int:
    """Number of GPUs. Raises UserError if there are none."""
    import torch

    if not (count := torch.cuda.device_count()):
        raise UserError("--processes: not given, and PyTorch finds no GPU; allowed: a number of processes to share the CPU")
    return count


def _num_groups(jobs: Sequence[Job]) -> int:
    """Number of processes: one for each group of GPUs that share a model. Raises UserError if there are too few."""
    gpus, each = _num_gpus(), max((job.config.engine.num_devices() for job in jobs), default=1)
    if gpus < each:
        raise UserError(f"engine.tensor_parallel_size * engine.pipeline_parallel_size: given {each}; allowed: at most {gpus}, "
                        "the GPUs of this machine")
    return gpus // each


def _start(number: int, count: int, command: list[str]) -> subprocess.Popen:
    """Starts a process with the environment variables of torchrun."""
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return subprocess.Popen([sys.executable, "-m", "dflash_mcmc", *command],
                            env={**os.environ, **{name: str(value) for name, value in place.items()}})


def _report_death(number: int, code: int) -> None:
    if code < 0:
        what = "nothing recorded is lost: run the same command again" if number == 0 else "the others draw its share"
        print(f"process {number} died of {signal.Signals(-code).name}; {what}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = program.OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="python launchers/local.py [--processes N] [group=option ...] [field=value ...]",
                                     allow_abbrev=False)
    parser.add_argument("--processes", type=int, metavar="N",
                        help="default: one for each GPU, or each group of GPUs that shares a model")
    return parser


if __name__ == "__main__":
    main()
