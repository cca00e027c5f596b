"""A sample that kills its process is found, recorded as an error and passed over; the others are drawn as without it."""

from __future__ import annotations

import os
import signal

import pytest

from dflash_mcmc.store.attempts import Attempts
from dflash_mcmc.store.folder import RunStore
from tests import processes
from tests.composing import composed
from tests.conftest import ROOT
from tests.runs import execute, folder_of, records_of, start, wait_for_records

DEADLY = """
import os, signal, sys
from dflash_mcmc import __main__
from dflash_mcmc.runner import build

chain = build.chain

def deadly(config, sampler, problem, number, *rest):
    if (problem, number) == (os.environ["POISON"], 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return chain(config, sampler, problem, number, *rest)

build.chain = deadly
__main__.main(sys.argv[1:])
"""
"""A run in which one sample makes the system kill the process, as one that needs too much memory does."""
GREEDY = ("experiment=demo", "condition=greedy", "dataset.limit=6", "dataset.max_new_tokens=32", "tracker=none")


def draw(folder, poison: str) -> int:
    done = processes.run(["-c", DEADLY, *GREEDY, "hardware.num_slots=4"], folder, POISON=poison, PYTHONPATH=str(ROOT))
    return done.returncode


def test_a_deadly_sample_is_passed_over_after_its_third_death_alone(tmp_path):
    poisoned = tmp_path / "poisoned"
    poisoned.mkdir()
    whole = records_of(execute(composed(tmp_path / "sound", *GREEDY)).folder)
    key = list(whole)[2]
    assert [draw(poisoned, poison=key[0]) for _ in range(6)] == [-signal.SIGKILL] * 5 + [0]
    folder = next((poisoned / "outputs/demo").iterdir())
    records = records_of(folder)
    failed = records.pop(key)
    assert failed["verdict"] == "not_drawn"
    assert failed["reason"] == ("the process died 5 times while this sample was being drawn, 3 times with no other task "
                                "in progress")
    assert failed["tokens"] == []
    del whole[key]
    assert records == whole
    assert not list(folder.glob("attempts*"))


KEY, OTHER = ("a", 0), ("b", 1)


@pytest.fixture
def die(tmp_path):
    """Begins samples and ends without a word."""
    def begin(*keys, alone=False):
        with RunStore.open(tmp_path) as store:
            attempts = Attempts(store, 3)
            for key in keys:
                attempts.begin(key, alone)

    return begin


def looked_at(folder, key):
    with RunStore.open(folder) as store:
        attempts = Attempts(store, 3)
        return attempts.is_suspect(key), attempts.failure(key)


def test_it_takes_three_deaths_alone(tmp_path, die):
    die(KEY, OTHER)
    assert looked_at(tmp_path, KEY) == (False, None)
    die(KEY)
    assert looked_at(tmp_path, KEY) == (True, None)
    assert looked_at(tmp_path, OTHER) == (False, None)
    die(KEY, OTHER)  # a process that was in company then: no proof
    assert looked_at(tmp_path, KEY) == (True, None)
    for _ in range(2):
        die(KEY, alone=True)
        assert looked_at(tmp_path, KEY) == (True, None)
    die(KEY, alone=True)
    suspect, failure = looked_at(tmp_path, KEY)
    assert suspect
    assert "died 6 times" in failure
    assert "3 times with no other task in progress" in failure


def test_of_the_suspects_the_one_that_was_killed_alone_comes_first(tmp_path, die):
    for _ in range(2):
        die(KEY, OTHER)
    die(OTHER, alone=True)
    with RunStore.open(tmp_path) as store:
        assert Attempts(store, 3).suspects([KEY, OTHER, ("c", 0)]) == [OTHER, KEY]


def test_what_is_given_up_is_no_death(tmp_path, die):
    for _ in range(5):
        die(KEY)
        with RunStore.open(tmp_path) as store:
            Attempts(store, 3).give_up(KEY)
    assert looked_at(tmp_path, KEY) == (False, None)


def test_a_torn_line_is_none_and_the_next_one_is_whole(tmp_path, die):
    die(KEY)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('["b", 1, tr')
    die(KEY)
    assert looked_at(tmp_path, KEY) == (True, None)
    assert (tmp_path / "attempts.jsonl").read_text().count("\n") == 2


def test_when_a_run_is_complete_the_files_go(tmp_path, die):
    die(KEY)
    with RunStore.open(tmp_path) as store:
        Attempts(store, 3).close(complete=True)
    assert not list(tmp_path.glob("attempts*"))


@pytest.mark.slow
def test_ctrl_c_is_no_death(tmp_path):
    """Stopped again and again, no sample becomes suspect."""
    for new in (1, 2):
        with start(tmp_path, "dataset.limit=12", "num_chains=2", "hardware.num_slots=4", "tracker=none", until=1) as run:
            wait_for_records(tmp_path, new, run)
            os.kill(run.pid, signal.SIGINT)
            run.communicate(timeout=processes.HANG)
            assert run.returncode == 130
    folder = folder_of(tmp_path)
    with RunStore.open(folder) as store:
        attempts = Attempts(store, 3)
        begun = list(attempts._deaths)
        assert len(begun) > len(store.records)
        assert not any(attempts.is_suspect(key) for key in begun if key not in store.recorded())


def test_what_another_process_drew_at_the_last_look_and_gave_up_since_is_no_death(tmp_path, die):
    die(KEY, alone=True)
    die(KEY, alone=True)
    with RunStore.open(tmp_path) as store:
        drawing = Attempts(store, 3)
        drawing.begin(KEY, alone=True)
        looked = Attempts(store, 3)
        drawing.give_up(KEY)
        assert looked.failure(KEY) is None
