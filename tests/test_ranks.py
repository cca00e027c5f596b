"""The processes of a launch: each number goes to one of them, and a counter is waited for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from dflash_mcmc import ranks
from dflash_mcmc.ranks import Team
from tests.conftest import ROOT

PROGRAM = """
import sys, time
from dflash_mcmc.ranks import Team
team = Team("run")
team.add("here", 1)
team.wait("here", team.size)  # so that none takes all before the others are there
mine = []
for number in team.take(40):
    mine.append(number)
    time.sleep(0.01 if team.rank else 0.002)
team.add("done", 1)
team.wait("done", team.size)
print(*mine)
"""


def test_outside_a_launch_there_is_one_process():
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank(), ranks.local_world_size()) == (0, 1, 0, 1)
    team = Team("run")
    assert list(team.take(5)) == [0, 1, 2, 3, 4]
    assert list(team.take(7)) == [6]  # the counter has gone one beyond
    assert [team.add("other", 2), team.add("other", 0)] == [2, 2]
    team.wait("other", 2)


def test_each_number_goes_to_one_process():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE,
                                  text=True) for rank in range(3)]
    taken = [[int(number) for number in process.communicate(timeout=120)[0].split()] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(number for numbers in taken for number in numbers) == list(range(40))
    assert sum(bool(numbers) for numbers in taken) >= 2


def test_a_restart_begins_with_counters_of_its_own(monkeypatch):
    first = Team("run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Team("run").name != first.name
