"""Where a process stands among those that draw together."""

from __future__ import annotations

import pytest

from dflash_mcmc.process import ranks


@pytest.mark.parametrize(("environment", "place", "waits"), [
    ({}, (0, 1), True),
    ({"RANK": "0", "WORLD_SIZE": "3"}, (0, 3), True),
    ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3), False),
    ({"DFLASH_MCMC_SHARD": "3/8"}, (3, 8), False),
    # The first process of a job stays for its others.
    ({"DFLASH_MCMC_SHARD": "3/8", "RANK": "0", "WORLD_SIZE": "2"}, (6, 16), True),
    ({"DFLASH_MCMC_SHARD": "3/8", "RANK": "1", "WORLD_SIZE": "2"}, (7, 16), False),
])
def test_place_among_the_processes_of_a_run(monkeypatch, environment, place, waits):
    for name in ("RANK", "WORLD_SIZE", ranks.SHARD):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks.place() == place
    assert ranks.waits() == waits
