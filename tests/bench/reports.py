"""`python -m tests.bench.reports [RECORDS...]` prints the processor time and memory of reports of synthetic runs.

Each report is of four runs: greedy decoding, and 8 chains of draws and of power sampling without and with a blend.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from dflash_mcmc.process import program
from tests.bench.__main__ import table
from tests.report.folders import record, write

_CONDITIONS = {"greedy": 1, "temp": 8, "ps": 8, "blend_ps": 8}
"""Chains of each condition."""
_PARENT = get_context("spawn")


def measured(records: int, folder: Path) -> dict[str, float]:
    """A row of the table: a report of about this number of records, in a process of its own."""
    drawn = np.random.default_rng(records)
    for condition, chains in _CONDITIONS.items():
        lines = [_record(drawn, f"p{problem}", chain, condition)
                 for problem in range(max(2, records // len(_CONDITIONS) // chains)) for chain in range(chains)]
        write(folder / str(records), condition, lines, num_chains=chains)
    with _PARENT.Pool(1) as pool:
        seconds, megabytes = pool.apply(_reported, (folder / str(records),))
    return {"records": records, "processor s": seconds, "ms a record": 1000.0 * seconds / records, "peak MB": megabytes}


def _record(drawn: np.random.Generator, problem: str, chain: int, condition: str) -> dict:
    right, proposals = drawn.random() < 0.4, 32 * condition.endswith("ps")
    trace = [{"block": step // 2, "log_p": -50.0 * drawn.random(), "decision": ("accept", "reject")[step % 2]}
             for step in range(proposals)]
    return record(problem, "correct" if right else "wrong", chain, answer="42" if right else str(drawn.integers(20)),
                  log_p=-50.0 * drawn.random(), log_q=-60.0 * drawn.random(), text="An answer of some words. " * 20,
                  proposals=proposals, accepted=proposals // 2, moved=proposals // 3, trace=trace)


def _reported(folder: Path) -> tuple[float, float]:
    from dflash_mcmc.report.build import build

    build([folder])
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024.0


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = argparse.ArgumentParser("python -m tests.bench.reports", description="Measures reports of synthetic runs.")
    parser.add_argument("records", nargs="*", type=int, default=[20_000, 60_000, 200_000], metavar="RECORDS")
    with tempfile.TemporaryDirectory() as folder:
        print(table([measured(records, Path(folder)) for records in parser.parse_args(arguments).records]))


if __name__ == "__main__":
    main()
