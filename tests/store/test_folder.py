"""The store: torn lines are dropped, corrupt files refused, several processes draw one run and no sample twice."""

import errno
import json
import math
import multiprocessing
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from dflash_mcmc.errors import RunBusy, UserError
from dflash_mcmc.store import folder as store_folder
from dflash_mcmc.store.files import to_line
from dflash_mcmc.store.folder import RunStore, closed
from dflash_mcmc.store.records import RECORDS, read_records, read_text
from tests.processes import HANG, ROOT


def record(problem: str, chain: int = 0, **rest) -> dict:
    return {"problem": problem, "chain": chain, **rest}


def write(folder, *records):
    with RunStore.open(folder) as store:
        for entry in records:
            store.append(entry)


def test_records_come_back_in_order(tmp_path):
    entries = [record("a", text="ü\n\u2028\ud83d\x00"), record("b", 1, log_p=-1.25)]
    write(tmp_path / "run", *entries)
    write(tmp_path / "run", record("c"))
    with RunStore.open(tmp_path / "run") as store:
        assert store.records == [*entries, record("c")]
        assert store.recorded() == {("a", 0), ("b", 1), ("c", 0)}
    assert read_records(tmp_path / "run") == [*entries, record("c")]


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_dropped_at_any_byte(tmp_path, cut):
    write(tmp_path, record("a"), record("b", text="0123456789"))
    path = tmp_path / RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [r["problem"] for r in read_records(tmp_path)] == ["a"]
    with RunStore.open(tmp_path) as store:
        assert [r["problem"] for r in store.records] == ["a"]
        store.append(record("b", text="0123456789"))
    assert path.read_bytes() == whole


def test_a_repeated_record_counts_once_and_is_told(tmp_path, capsys):
    """A file server that takes a live process for dead gives its claims away; the sample is the same."""
    write(tmp_path, record("a"), record("b"))
    (tmp_path / "records.1.jsonl").write_text((to_line(record("b", seconds=2.0)) + to_line(record("c"))).decode())
    with RunStore.open(tmp_path) as store:
        assert store.records == [record("a"), record("b"), record("c")]
        assert store.places == [(0, 0), (0, 1), (1, 1)]
    assert read_records(tmp_path) == store.records
    told = capsys.readouterr().err
    assert "records.1.jsonl: line 1 repeats problem b, chain 0; the record in" in told
    assert "records.jsonl: line 2 is used" in told


def test_fields_that_nothing_needs_are_in_the_file_alone(tmp_path):
    with RunStore.open(tmp_path, not_in_memory=("tokens",)) as store:
        store.append(record("a", tokens=[1, 2], text="x"))
        assert store.records == [record("a", text="x")]
    assert read_records(tmp_path) == [record("a", tokens=[1, 2], text="x")]


def test_opening_holds_one_line_and_claims_read_no_file_of_its_own(tmp_path, monkeypatch):
    """A folder of 20,000 records opened with 872 MB, because all lines and their left-out fields were in memory at once."""
    write(tmp_path, *(record(str(number), tokens=list(range(1000))) for number in range(100)))
    size = (tmp_path / RECORDS).stat().st_size
    tracemalloc.start()
    with RunStore.open(tmp_path, not_in_memory=("tokens",)) as store:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        monkeypatch.setattr("dflash_mcmc.store.files.each_line", lambda *given: pytest.fail("reads its own file again"))
        assert list(store.take((name, 0) for name in ("0", "new"))) == [("new", 0)]
    assert peak < size / 2


@pytest.mark.slow
def test_a_listing_of_some_time_ago_hides_no_ones_records(tmp_path, another, monkeypatch):
    """As network file systems give it: without the file that another machine has just made."""
    holder, _, _ = another(tmp_path)
    _, _, _ = another(tmp_path, problems=["b"], recorded=["a"])
    holder.kill()
    holder.join()
    with monkeypatch.context() as stale:
        stale.setattr("dflash_mcmc.store.records.record_files", lambda folder, others=False: {0: folder / RECORDS})
        store = RunStore.open(tmp_path)
        opened = store.__enter__()
    assert not opened.claim(("a", 0))
    opened.refresh()
    assert opened.recorded() == {("a", 0)}
    store.__exit__(None, None, None)


def _hold(folder, opened, release, problems=(), recorded=()):
    store_folder._SYNC_SECONDS = math.inf  # records keep their locks until the folder is left, however slow the machine is
    with RunStore.open(folder) as store:
        claimed = [problem for problem in problems if store.claim((problem, 0))]
        for problem in recorded:
            store.append(record(problem))
        opened.put(claimed)
        release.wait(HANG)


@pytest.fixture
def another():
    """Starts a process that holds a run open, with samples claimed and samples recorded, until it is killed."""
    context, started = multiprocessing.get_context("spawn"), []

    def start(folder, problems=(), recorded=()):
        opened, release = context.Queue(), context.Event()
        process = context.Process(target=_hold, args=(folder, opened, release, problems, recorded))
        process.start()
        started.append((process, release))
        return process, release, opened.get(timeout=HANG)

    yield start
    for process, _ in started:
        process.kill()
        process.join()


def test_what_one_process_draws_no_other_begins_until_it_dies(tmp_path, another):
    holder, _, claimed = another(tmp_path, problems=["a", "b"])
    assert claimed == ["a", "b"]
    with RunStore.open(tmp_path) as store:
        assert list(store.take([("a", 0), ("b", 0), ("b", 1)])) == [("b", 1)]
        with pytest.raises(ValueError, match="being drawn by another process"):
            store.append(record("a"))
        holder.kill()
        holder.join()
        assert list(store.take([("a", 0), ("b", 0), ("b", 1)])) == [("a", 0), ("b", 0)]
        store.append(record("a"))


def test_processes_write_a_file_each_and_see_each_others_records(tmp_path, another):
    write(tmp_path, record("before"))
    with RunStore.open(tmp_path) as store:
        store.append(record("mine"))
        _, release, _ = another(tmp_path, recorded=["other"])
        assert not store.claim(("other", 0))
        assert [r["problem"] for r in store.records] == ["before", "mine"]  # it is claimed until it is on the disk
        store.refresh()
        assert [r["problem"] for r in store.records] == ["before", "mine", "other"]
        assert store.places == [(0, 0), (0, 1), (1, 0)]
        release.set()
        assert [r["problem"] for r in read_records(tmp_path)] == ["before", "mine", "other"]
    assert (tmp_path / "records.1.jsonl").read_text().count("\n") == 1
    with RunStore.open(tmp_path) as store:
        assert len(store.records) == 3


def test_a_sample_that_was_recorded_since_the_last_look_is_not_claimed(tmp_path, another):
    with RunStore.open(tmp_path) as store:
        process, release, _ = another(tmp_path, recorded=["a"])
        release.set()
        process.join(HANG)
        assert store.recorded() == set()
        assert not store.claim(("a", 0))
        assert store.recorded() == {("a", 0)}


def test_one_process_leads_and_the_next_one_when_it_leaves(tmp_path, another):
    with RunStore.open(tmp_path) as store:
        assert store.lead()
        process, _, _ = another(tmp_path)
    assert leads(tmp_path) == "True"
    with RunStore.open(tmp_path) as store:
        store.lead()
        assert leads(tmp_path) == "False"
    assert process.is_alive()


@pytest.mark.slow
def test_who_does_not_lead_waits_for_one_that_leaves_and_no_longer(tmp_path):
    """One that leads may draw for hours what was asked of it alone."""
    with RunStore.open(tmp_path) as store:
        assert store.lead()
        waits = subprocess.Popen([sys.executable, "-c", LEADS.replace("lead()", f"lead({HANG}.0)"), tmp_path],
                                 stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert leads(tmp_path, "lead(0.2)") == "False"
        assert waits.poll() is None
    assert waits.communicate(HANG)[0].split() == ["True"]


LEADS = """
import pathlib, sys
from dflash_mcmc.store.folder import RunStore
with RunStore.open(pathlib.Path(sys.argv[1])) as store:
    print(store.lead())
"""


def leads(folder, call: str = "lead()") -> str:
    """What another process prints that opens the run and asks to lead."""
    command = [sys.executable, "-c", LEADS.replace("lead()", call), folder]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_a_run_is_open_once_in_a_process_and_closed_to_all_while_it_is_rewritten(tmp_path, another):
    with RunStore.open(tmp_path), pytest.raises(RunBusy, match="this process has that run open"), RunStore.open(tmp_path):
        pass
    process, _, _ = another(tmp_path)
    with pytest.raises(RunBusy, match="being written by another process"), closed(tmp_path):
        pass
    process.kill()
    process.join()
    opens = LEADS.replace("with RunStore", "print('opens', flush=True)\nwith RunStore")
    with closed(tmp_path):
        waits = subprocess.Popen([sys.executable, "-c", opens, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert waits.stdout.readline() == "opens\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(0.5)
    assert waits.communicate(timeout=HANG)[0].split() == ["True"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="not Linux")
def test_a_folder_that_cannot_be_made_is_one_line():
    """Where no folder can be made the kernel may say that there is none, as it does where another process removed it."""
    with pytest.raises(UserError, match=r"paths.outputs: cannot write to /proc/none/run: No such file"):
        RunStore.open(Path("/proc/none/run")).__enter__()


def test_a_folder_without_locks_is_one_line(tmp_path, monkeypatch):
    def unsupported(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    with pytest.raises(UserError, match=r"paths.outputs: cannot lock .*No locks available; allowed: .*NFS 4"):
        RunStore.open(tmp_path).__enter__()


def test_what_a_dead_process_left_is_not_mistaken_for_what_a_live_one_writes(tmp_path, another):
    """Temporary files are cleaned up only by a process that is alone, a torn line only by the one that takes the file."""
    process, _, _ = another(tmp_path, recorded=["a"])
    (tmp_path / ".run.json.123.tmp").write_text("{")
    with (tmp_path / RECORDS).open("a") as file:
        file.write('{"problem": "b"')  # it is in the middle of a line
    write(tmp_path, record("c"))
    assert (tmp_path / ".run.json.123.tmp").exists()
    assert (tmp_path / RECORDS).read_text().endswith('{"problem": "b"')
    process.kill()
    process.join()
    write(tmp_path, record("d"))
    assert not list(tmp_path.glob(".*"))
    assert [r["problem"] for r in read_records(tmp_path)] == ["a", "d", "c"]


def test_a_copied_folder_without_its_lock_file_is_whole(tmp_path, another):
    write(tmp_path / "one", record("a"))
    (tmp_path / "one" / "lock").unlink()
    (tmp_path / "one" / "records.3.jsonl").write_bytes(to_line(record("b")))
    with RunStore.open(tmp_path / "one") as store:
        assert store.recorded() == {("a", 0), ("b", 0)}


def test_a_recorded_sample_and_not_a_number_are_not_recorded(tmp_path):
    with RunStore.open(tmp_path) as store:
        store.append(record("a"))
        for refused, message in ((record("a"), "is recorded already"), (record("b", log_p=math.nan), "JSON compliant")):
            with pytest.raises(ValueError, match=message):
                store.append(refused)
    assert len(read_records(tmp_path)) == 1


def test_folders_of_which_nothing_came_are_removed(tmp_path):
    with RunStore.open(tmp_path / "new" / "name" / "run"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_record_does_not_stay(tmp_path, monkeypatch):
    """`tests/launchers/test_faults.py` fills real disks."""
    with RunStore.open(tmp_path) as store:
        store.append(record("a"))
        whole, file = (tmp_path / RECORDS).read_bytes(), store._file

        class Full:
            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, line):
                return file.write(line[:3])

        with monkeypatch.context() as disk:
            disk.setattr(store, "_file", Full())
            with pytest.raises(UserError, match=r"records\.jsonl: .*disk full.*run the same command again"):
                store.append(record("b"))
        assert (tmp_path / RECORDS).read_bytes() == whole
        store.append(record("b"))
    assert read_records(tmp_path) == [record("a"), record("b")]


def test_sessions_add_up(tmp_path):
    with RunStore.open(tmp_path) as store:
        store.write_session({"seed": 0}, {"command": ["one"]})
        store.write_session({"seed": 0}, {"command": ["two"]})
    run = json.loads((tmp_path / "run.json").read_text())
    assert [session["command"] for session in run["sessions"]] == [["one"], ["two"]]


def test_where_a_run_is_wanted_a_folder_of_runs_is_told_its_runs(tmp_path):
    for name in ("ps", "greedy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match=rf"config.yaml: cannot be read: .*: {tmp_path}/greedy or {tmp_path}/ps$"):
        read_text(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"a run folder has it next to its records$"):
        read_text(tmp_path / "ps" / "run.json")
