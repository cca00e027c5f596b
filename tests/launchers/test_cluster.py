"""The cluster for tests of the SLURM launcher behaves like a real one and leaves no processes or files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.launchers.cluster import Cluster, ClusterError
from tests.launchers.cluster_cleanup import processes
from tests.processes import HANG


def test_job_runs_on_nodes(slurm, tmp_path):
    assert slurm.node_states() == dict.fromkeys(["n1", "n2", "n3", "n4"], "idle")
    output = tmp_path / "output"
    job = slurm.submit("srun sh -c 'echo $SLURMD_NODENAME $SLURM_NTASKS'", "--nodelist=n2,n3", "--ntasks=2",
                       "--ntasks-per-node=1", f"--output={output}")
    slurm.wait_until(lambda: slurm.states(job) == ["COMPLETED"])
    assert sorted(output.read_text().splitlines()) == ["n2 2", "n3 2"]


def test_a_requeued_job_knows_that_it_was_requeued(slurm, tmp_path):
    output = tmp_path / "output"
    job = slurm.submit(f"echo $SLURM_RESTART_COUNT >> {output}; [ $SLURM_RESTART_COUNT ] || sleep 60")
    slurm.wait_until(output.exists)
    slurm.run("scontrol", "requeue", str(job))
    slurm.wait_until(lambda: slurm.states(job) == ["REQUEUED", "COMPLETED"])
    assert output.read_text() == "\n1\n"


def test_job_of_a_crashed_node_is_requeued(slurm, tmp_path):
    output = tmp_path / "output"
    job = slurm.submit(f"echo $$ >> {output}; [ $SLURM_RESTART_COUNT ] || sleep 60", "--nodelist=n4")
    slurm.wait_until(output.exists)
    slurm.kill_node("n4")
    pid = int(output.read_text())
    # A zombie is a killed process that its parent has not waited for.
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert slurm.state(job) == "PENDING"
    assert slurm.node_states()["n4"].startswith("down")
    slurm.start_node("n4")
    slurm.wait_until(lambda: slurm.states(job) == ["NODE_FAIL", "COMPLETED"])
    assert len(output.read_text().splitlines()) == 2


def test_too_much_memory_ends_a_job(slurm):
    job = slurm.submit(f"{sys.executable} -c 'import time; x = bytearray(2**28); time.sleep(60)'", "--mem=64")
    slurm.wait_until(lambda: slurm.states(job) in (["FAILED"], ["OUT_OF_MEMORY"]))


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


def test_skipped_tests_are_reported(tmp_path):
    command = [sys.executable, "-m", "pytest", "-m", "slurm", "-p", "no:cacheprovider", f"{__file__}::test_job_runs_on_nodes"]
    answer = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    line = "SLURM cannot be installed here: no apt-get, and these are missing: "
    assert [text for text in answer.stdout.splitlines() if text.startswith(line)], answer.stdout + answer.stderr
    assert "1 skipped" in answer.stdout
