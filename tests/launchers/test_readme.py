"""Runs the commands of the documentation that need SLURM on the cluster."""

import shlex

from tests.launchers.test_grid import Submitter
from tests.pages import NEEDS_SLURM, PAGES, commands, marked


def test_the_grid_of_the_documentation(slurm, tmp_path):
    submit, status = marked(commands(*PAGES), NEEDS_SLURM)
    submitter = Submitter(slurm, tmp_path)
    for command in (submit, status):
        assert command.startswith("python -m dflash_mcmc.grid ")
        # The nodes of the test cluster have two cores.
        few = ["hardware=slurm_cpu", "cpus=1", "memory_gb=1"] if command == submit else []
        output = submitter.run(*shlex.split(command)[3:], *few).stdout
    assert "alpha=4" in output
    submitter.wait()
    records = submitter.records()
    assert [len(found) for found in records] == [8, 8, 8]  # greedy has the same run for alpha 2 and 4
