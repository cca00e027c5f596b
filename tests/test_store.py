"""The store: torn lines are dropped, corrupt files refused, two writers kept apart."""

from __future__ import annotations

import json
import multiprocessing
import time

import pytest

from dflash_mcmc.errors import RunBusy, UserError
from dflash_mcmc.store import RECORDS, RunStore, read_records, write_atomically


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


def test_a_corrupt_line_in_the_middle_is_refused_with_its_number(tmp_path):
    write(tmp_path, record("a"), record("b"))
    path = tmp_path / RECORDS
    path.write_bytes(b"{bad\n" + path.read_bytes())
    before = path.read_bytes()
    with pytest.raises(UserError, match="line 1 is no record"), RunStore.open(tmp_path):
        pass
    assert path.read_bytes() == before


def test_a_repeated_record_is_refused(tmp_path):
    write(tmp_path, record("a"))
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(UserError, match="line 2 repeats problem a, chain 0"), RunStore.open(tmp_path):
        pass


def _hold(folder, opened, release):
    with RunStore.open(folder):
        opened.set()
        release.wait(30)


def test_a_second_writer_is_refused_and_the_kernel_frees_the_lock(tmp_path):
    context = multiprocessing.get_context("spawn")
    opened, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, opened, release))
    holder.start()
    assert opened.wait(60)
    with pytest.raises(RunBusy, match=f"process {holder.pid}"), RunStore.open(tmp_path):
        pass
    holder.kill()
    holder.join()
    write(tmp_path, record("a"))


def test_a_recorded_sample_is_not_recorded_again(tmp_path):
    with RunStore.open(tmp_path) as store:
        store.append(record("a"))
        with pytest.raises(ValueError, match="is recorded already"):
            store.append(record("a"))
    assert len(read_records(tmp_path)) == 1


def test_what_a_killed_process_was_replacing_is_cleaned_up(tmp_path):
    write(tmp_path, record("a"))
    (tmp_path / ".run.json.123.tmp").write_text("{")
    write(tmp_path, record("b"))
    assert not list(tmp_path.glob(".*"))


def test_a_folder_of_which_nothing_came_is_removed(tmp_path):
    with RunStore.open(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_not_a_number_is_refused_before_it_is_written(tmp_path):
    with RunStore.open(tmp_path) as store:
        store.append(record("a"))
        with pytest.raises(ValueError, match="JSON compliant"):
            store.append(record("b", log_p=float("nan")))
    assert len(read_records(tmp_path)) == 1


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    with RunStore.open(tmp_path) as store:
        store.append(record("a"))

        class Full:
            def write(self, line):
                return 3

            fileno, close = store._file.fileno, store._file.close

        monkeypatch.setattr(store, "_file", Full())
        with pytest.raises(OSError, match="disk full"):
            store.append(record("b"))


def test_sessions_add_up(tmp_path):
    with RunStore.open(tmp_path) as store:
        store.write_session({"seed": 0}, {"command": ["one"]})
        store.write_session({"seed": 0}, {"command": ["two"]})
    run = json.loads((tmp_path / "run.json").read_text())
    assert [session["command"] for session in run["sessions"]] == [["one"], ["two"]]


def test_atomic_write_leaves_no_other_file(tmp_path):
    write_atomically(tmp_path / "x.json", "1")
    write_atomically(tmp_path / "x.json", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "2"


def _rank(folder, rank: int, size: int, counters, problems, delay: float):
    """One process of a team whose counters are shared memory."""
    team = SharedTeam(rank, size, counters)
    with RunStore.open(folder, team) as store:
        seen = sorted(store.recorded())
        time.sleep(delay)
        for problem in problems:
            store.append(record(problem))
        team.add("done", 1)
        team.wait("done", size)
        store.reread()
        counters[f"seen {rank}"] = seen
        counters[f"all {rank}"] = sorted(store.recorded())


class SharedTeam:
    """What `dflash_mcmc.ranks.Team` promises, without a launcher."""

    def __init__(self, rank: int, size: int, counters):
        self.rank, self.size, self.counters = rank, size, counters

    def add(self, counter: str, amount: int) -> int:
        with self.counters["lock"]:
            self.counters[counter] = self.counters.get(counter, 0) + amount
            return self.counters[counter]

    def wait(self, counter: str, value: int) -> None:
        deadline = time.monotonic() + 30
        while self.add(counter, 0) < value:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_processes_of_a_team_write_a_file_each_and_read_all(tmp_path):
    write(tmp_path, record("before"))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        counters = manager.dict()
        counters["lock"] = manager.Lock()
        ranks = [context.Process(target=_rank, args=(tmp_path, rank, 2, counters, [f"by {rank}"], 1.0)) for rank in (1, 0)]
        for process in ranks:
            process.start()
        while counters.get("mended", 0) < 2:
            time.sleep(0.01)
        with pytest.raises(RunBusy, match="being written by process"), RunStore.open(tmp_path):
            pass
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
        assert counters["seen 0"] == counters["seen 1"] == [("before", 0)]
        assert counters["all 0"] == counters["all 1"] == [("before", 0), ("by 0", 0), ("by 1", 0)]
    assert [r["problem"] for r in read_records(tmp_path)] == ["by 1", "before", "by 0"]
    assert (tmp_path / "records.1.jsonl").is_file()
    with RunStore.open(tmp_path) as store:
        assert len(store.records) == 3


def test_a_torn_line_of_any_process_is_dropped_and_a_record_of_two_is_refused(tmp_path):
    write(tmp_path, record("a"))
    other = tmp_path / "records.1.jsonl"
    other.write_text(json.dumps(record("b")) + "\n" + '{"problem": "c"')
    with RunStore.open(tmp_path) as store:
        assert store.recorded() == {("a", 0), ("b", 0)}
    assert other.read_text().count("\n") == 1
    other.write_text(json.dumps(record("a")) + "\n")
    with pytest.raises(UserError, match=r"repeats problem a, chain 0 of .*records\.1\.jsonl: line 1"), RunStore.open(tmp_path):
        pass
