"""A sample that kills its process is named; without it the others are drawn as they were."""

import os
import re
import signal
import subprocess

import pytest

from dflash_mcmc.store.folder import Attempts, RunStore
from tests import processes
from tests.composing import composed
from tests.conftest import ROOT
from tests.runs import execute, folder_of, records_of, start, wait_for_records

DEADLY = """
import os, signal, sys
from dflash_mcmc import __main__
from dflash_mcmc.chains import build

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


def draw(folder, poison: str, *more: str) -> subprocess.CompletedProcess:
    return processes.run(["-c", DEADLY, *GREEDY, *more], folder, POISON=poison, PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_a_deadly_sample_is_named_and_left_out(tmp_path):
    whole = records_of(execute(composed(tmp_path / "sound", *GREEDY)).folder)
    (tmp_path / "poisoned").mkdir()
    deadly, chain = list(whole)[2]
    dead = [draw(tmp_path / "poisoned", deadly, f"hardware.num_slots={slots}") for slots in (2, 1, 1)]
    assert [each.returncode for each in dead] == [-signal.SIGKILL] * 3
    assert "never finished" not in dead[0].stderr + dead[1].stderr
    assert re.search(f"begun and never finished: .*problem {deadly}, chain {chain} \\(2 times\\).*; if one of them kills its "
                     "process, hardware.num_slots=1 shows which, and dataset.ids leaves it out", dead[2].stderr)
    ids = ",".join(problem for problem, _ in whole if problem != deadly)
    assert draw(tmp_path / "poisoned", deadly, f"dataset.ids=[{ids}]", "dataset.limit=null").returncode == 0
    folder = next((tmp_path / "poisoned/outputs/demo").iterdir())
    del whole[deadly, chain]
    assert records_of(folder) == whole


KEY, OTHER = ("a", 0), ("b", 1)


@pytest.fixture
def die(tmp_path):
    """Begins samples and ends without a word."""
    def begin(*keys):
        with RunStore.open(tmp_path) as store:
            attempts = Attempts(store)
            for key in keys:
                attempts.note(key, begun=True)

    return begin


def suspects(folder, *pending) -> str | None:
    with RunStore.open(folder) as store:
        return Attempts(store).suspects(pending)


def test_what_was_in_progress_at_two_deaths_is_named_the_most_deaths_first(tmp_path, die):
    die(KEY, OTHER)
    assert suspects(tmp_path, KEY, OTHER) is None
    die(KEY)
    assert suspects(tmp_path, KEY, OTHER).startswith("begun and never finished: problem a, chain 0 (2 times); if one")
    for _ in range(2):
        die(OTHER, *[("c", chain) for chain in range(4)])
    assert suspects(tmp_path, KEY, OTHER, *[("c", chain) for chain in range(4)]).startswith(
        "begun and never finished: problem b, chain 1 (3 times), problem a, chain 0 (2 times), problem c, chain 0 (2 times) "
        "and 3 more; if one")
    assert suspects(tmp_path, ("d", 0)) is None


def test_what_is_given_up_is_no_death(tmp_path, die):
    for _ in range(5):
        die(KEY)
        with RunStore.open(tmp_path) as store:
            Attempts(store).note(KEY, begun=False)
    assert suspects(tmp_path, KEY) is None


def test_a_torn_line_is_none_and_the_next_one_is_whole(tmp_path, die):
    die(KEY)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('["b", 1, tr')
    die(KEY)
    assert "problem a, chain 0 (2 times)" in suspects(tmp_path, KEY)
    assert (tmp_path / "attempts.jsonl").read_text().count("\n") == 2


def test_when_a_run_is_complete_the_files_go(tmp_path, die):
    die(KEY)
    with RunStore.open(tmp_path) as store:
        Attempts(store).close(complete=False)
        assert len(list(tmp_path.glob("attempts*"))) == 1
        Attempts(store).close(complete=True)
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
        begun = Attempts(store).unfinished()
        assert len(begun) > len(store.records)
        assert not any(count for key, count in begun.items() if key not in store.recorded())
