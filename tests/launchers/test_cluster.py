"""The cluster for tests of the SLURM launcher leaves no processes or files, and says why it cannot start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launchers.cluster import Cluster, ClusterError
from tests.launchers.cluster_cleanup import processes
from tests.processes import HANG


def test_nothing_is_left_of_a_killed_process(slurm):
    program = f"""
import os, signal
from tests.launchers.cluster import Cluster
with Cluster(nodes=1) as cluster:
    job = cluster.submit("setsid sleep 600 & sleep 600")
    cluster.wait_until(lambda: cluster.state(job) == "RUNNING")
    print(cluster.folder, flush=True)
    os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=HANG)
    assert answer.returncode == -signal.SIGKILL
    folder = Path(answer.stdout.strip())
    assert folder != slurm.folder
    slurm.wait_until(lambda: not folder.exists())
    assert processes(folder) == []
    assert set(slurm.node_states().values()) == {"idle"}


def test_a_failed_start_reports_the_reason_and_leaves_nothing(slurm):
    cluster = Cluster(nodes=1, extra_lines=["PartitionName=other Nodes=n9"])
    with pytest.raises(ClusterError, match=r"slurmctld ended with exit code 1:\n(.*\n)*.*n9"):
        cluster.start()
    assert not cluster.folder.exists()
    assert processes(cluster.folder) == []


@pytest.mark.slow
def test_skipped_tests_are_reported(tmp_path):
    test = f"{__file__}::test_nothing_is_left_of_a_killed_process"
    command = [sys.executable, "-m", "pytest", "-m", "slurm", "-p", "no:cacheprovider", test]
    answer = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    line = "SLURM cannot be installed here: no apt-get, and these are missing: "
    assert [text for text in answer.stdout.splitlines() if text.startswith(line)], answer.stdout + answer.stderr
    assert "1 skipped" in answer.stdout
