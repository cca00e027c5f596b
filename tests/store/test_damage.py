"""Damaged run folders: each command ends with one line, or with the records that were written. No traceback and no hang."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_mcmc.api.runs import read as read_table
from dflash_mcmc.errors import UserError
from dflash_mcmc.regrade import grader_config, regrade
from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.store import folder
from dflash_mcmc.store.files import CHECKSUM, IDENTITY, Damaged, each_line, from_line, to_line, write_atomically
from dflash_mcmc.store.folder import Attempts, RunStore
from dflash_mcmc.store.records import DAMAGED, NUM_FILES, hash_of, read_records, record_line, sample_schema
from dflash_mcmc.types import Grade
from tests.processes import HANG
from tests.report.folders import record, write
from tests.store.damage import all_ways, records_path, shapes

RECORDS = [record(f"p{number}", "correct" if number % 2 else "wrong", chain, text=f"so \\boxed{{{number}}}", rule="", walls=[],
                  same_string=None, grader="math 4", trace=[{"block": 1, "log_ratio": -0.5, "decision": "moved"}])
           for number in range(3) for chain in range(2)]
WAYS = all_ways(seed=22, flips=60)
SHORT = all_ways(seed=22, flips=16)
SOME = [damage for number, damage in enumerate(SHORT) if number % 13 == 1 or damage.name.endswith(
    (" as lock", "pipe as records.jsonl"))]


class Hangs(BaseException):
    """A command does not come to an end."""


@contextmanager
def bounded() -> Iterator[None]:
    def end(*_) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Pool:
    """Grades every text as correct."""

    def __init__(self):
        self._given: list = []

    def submit(self, tag, text, gold, question) -> None:
        self._given.append(tag)

    def finished(self, wait: bool) -> list:
        given, self._given = self._given, []
        return [(tag, Grade("correct", "1")) for tag in given]


@pytest.fixture(scope="module")
def regrading():
    return grader_config([])


@pytest.fixture
def whole(tmp_path) -> Path:
    return write(tmp_path / "demo", "ps", RECORDS, num_chains=2)


def opened(folder: Path) -> list[dict]:
    """The records as a run reads them; the attempts are read too, and one is written."""
    with RunStore.open(folder, schema=sample_schema()) as store:
        attempts = Attempts(store)
        attempts.note(("new", 0), begun=True)
        attempts.close(complete=False)
        if store.is_described():
            store.write_config('{"name": "demo"}')
        return list(store.records)


def commands(folder: Path, regrading) -> dict:
    return {"report": lambda: read(run_folders([folder]))[0][0].records,
            "lenient": lambda: read(run_folders([folder]), lenient=True)[0][0].records,
            "regrade": lambda: [{**again, **again["before"]} for again in regrade(folder, regrading, Pool()).records],
            "read": lambda: read_table(folder).to_dict("records"), "run": lambda: opened(folder)}


def outcome(command) -> tuple[list[dict] | None, str]:
    """(records, error) of a command; the error is one line."""
    try:
        with bounded():
            return command(), ""
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    return None, message


def check(damage, folder: Path, regrading) -> None:
    """Whatever the damage, each record is one that was written, unless the field was changed to an allowed value."""
    damage.apply(folder)
    original = {(found["problem"], found["chain"]): found for found in RECORDS}
    for name, command in commands(folder, regrading).items():
        found, error = outcome(command)
        where = f"{damage.name}: {name}: {error}"
        if damage.noticed and name != "lenient":
            assert found is None, where
            assert str(folder) in error, where
        if damage.noticed is False:
            assert found is not None, where
        if found is not None and "=" not in damage.name and not damage.name.startswith("no "):
            assert len(found) <= len(original), where
            if name in ("run", "report", "lenient"):
                assert all(each == original[each["problem"], each["chain"]] for each in found), where


@pytest.mark.parametrize("damage", [pytest.param(damage, id=damage.name) for damage in SOME])
def test_damage_is_one_line_or_harmless(damage, whole, regrading):
    check(damage, whole, regrading)


@pytest.mark.slow
def test_json_of_a_wrong_shape_is_one_line_or_harmless(tmp_path, regrading):
    for number, damage in enumerate(shapes()):
        check(damage, write(tmp_path / str(number), "ps", RECORDS[:2], num_chains=2), regrading)


@pytest.mark.parametrize("name", ["records.jsonl", "records.1.jsonl", "attempts.jsonl", "lock"])
def test_a_link_in_a_run_folder_is_refused_before_anything_is_cut(whole, name):
    aim = whole.with_name("precious")
    aim.write_bytes(b"a line without its end")
    (whole / name).unlink(missing_ok=True)
    (whole / name).symlink_to(Path("..") / aim.name)  # an error shows the first 80 characters of it
    with pytest.raises(UserError, match=rf"{name}: is a link to .*precious'; allowed: a regular file"):
        opened(whole)
    assert aim.read_bytes() == b"a line without its end"


def test_a_temporary_file_has_a_new_name_and_follows_no_link(tmp_path, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr("os.replace", lambda source, aim: (names.append(Path(source).name), replace(source, aim)))
    for _ in range(2):
        write_atomically(tmp_path / "file", "content")
    assert len({*names, "file"}) == 3
    aim = tmp_path / "precious"
    aim.write_text("kept")
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    write_atomically(tmp_path / "file", "content")
    (tmp_path / names[2]).symlink_to(aim)
    with pytest.raises(UserError, match="File exists"):
        write_atomically(tmp_path / "file", "other")
    assert (aim.read_text(), (tmp_path / "file").read_text()) == ("kept", "content")


def test_a_file_that_cannot_be_replaced_keeps_its_content_and_leaves_no_other(tmp_path, monkeypatch):
    def full(source, aim):
        assert Path(source).read_text() == "2"
        raise OSError(errno.ENOSPC, "disk full")

    write_atomically(tmp_path / "x.json", "1")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="disk full"):
        write_atomically(tmp_path / "x.json", "2")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "1")]


def test_records_of_another_run_are_refused_with_file_and_line(whole):
    """Older records without the hash stay readable. The list of old and new ones is what each run wrote."""
    one, other = (hash_of(json.loads((whole / "run.json").read_text())["identity"]), "0" * 12)
    path = records_path(whole)
    with RunStore.open(whole, schema=sample_schema(), digest=one) as store:
        store.append(record("new", rule="", walls=[], same_string=None))
    assert [found["problem"] for found in read_records(whole)] == [*(found["problem"] for found in RECORDS), "new"]
    assert all(IDENTITY not in found for found in read_records(whole))
    mine = path.read_bytes()
    path.write_bytes(mine + record_line(RECORDS[0], other))
    with pytest.raises(UserError, match=rf"records.jsonl: line 8: identity: given '{other}'; allowed: '{one}'"):
        read_records(whole)
    with pytest.raises(UserError, match="line 8: identity"), RunStore.open(whole, schema=sample_schema(), digest=one):
        pass
    with RunStore.open(whole, schema=sample_schema(), digest=one, repair=True) as store:
        assert len(store.records) == 7
    assert path.read_bytes() == mine


@pytest.mark.slow
def test_every_kind_of_damage(tmp_path, regrading):
    assert len(WAYS) > 500
    for number, damage in enumerate(WAYS):
        check(damage, write(tmp_path / str(number), "ps", RECORDS, num_chains=2), regrading)
        shutil.rmtree(tmp_path / str(number))


def test_a_flipped_bit_anywhere_in_a_line_is_noticed():
    line = to_line({"problem": "ü", "chain": 3, "log_p": -1.5})[:-1]
    assert from_line(line) == {"problem": "ü", "chain": 3, "log_p": -1.5}
    assert json.loads(line).keys() == {"problem", "chain", "log_p", CHECKSUM}  # any other program reads it, too
    for place in range(len(line)):
        for bit in range(8):
            changed = line[:place] + bytes([line[place] ^ 1 << bit]) + line[place + 1:]
            with pytest.raises(Damaged):
                from_line(changed)


@pytest.mark.parametrize("change", [
    lambda line: line[:-3] + line[-2:], lambda line: line[:-10] + b"0" + line[-10:],
    lambda line: line.replace(b"checksum", b"checksm"),
    lambda line: json.dumps(json.loads(line), separators=(",", ":")).encode(), lambda line: b'{"checksum": 1, ' + line[1:],
    lambda line: line[:-28], lambda line: line[:40] + line, lambda line: line + line, lambda line: b" " + line,
    lambda line: line.replace(b"checksum", b"um")],
    ids=["a digit less", "a digit more", "another key", "other spaces", "two", "without its end", "two starts", "two lines",
         "a space", "two fields joined"])
def test_a_line_with_other_changes_is_noticed(change):
    with pytest.raises(Damaged):
        from_line(change(to_line(RECORDS[0])[:-1]))


def test_reserved_keys_are_not_written():
    for value in ({}, {"a": 1, CHECKSUM: "x"}):
        with pytest.raises(ValueError, match="a line needs keys, and checksum is not one of them"):
            to_line(value)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("chain", True, "chain: given True; allowed: a valid integer"),
    ("chain", 0.0, "chain: given 0.0; allowed: a valid integer"),
    ("chain", "0", "chain: given '0'; allowed: a valid integer"),
    ("chain", -1, "chain: given -1; allowed: greater than or equal to 0"),
    ("num_tokens", 2**63, "num_tokens: given 9223372036854775808; allowed: less than or equal to 9223372036854775807"),
    ("verdict", "CORRECT", "verdict: given 'CORRECT'; allowed: 'correct', 'wrong'"),
    ("problem", ["p0"], r"problem: given \['p0'\]; allowed: a valid string"),
    ("level", {"level": 1}, "level: given {'level': 1}; allowed: a valid integer or a valid string"),
    ("seconds", None, "seconds: given None; allowed: a valid number"),
    ("tokens", [1, "2"], r"tokens\[1\]: given '2'; allowed: a valid integer"),
    ("trace", [{"log_ratio": None}], r"trace\[0\].log_ratio: given None; allowed: a valid number or a valid string or"),
    ("trace", [[1]], r"trace\[0\]: given \[1\]; allowed: a valid dictionary"),
    ("measures", {"log_z": "x"}, "measures.log_z: given 'x'"),
    ("measures", {"log_z": 10**400}, "measures.log_z: given 1000"),
    ("walls", "abc", "walls: given 'abc'"), ("before", {"answer": json.loads("[" * 40 + "]" * 40)}, "at most 32 levels"),
    ("added later", json.loads("[" * 40 + "]" * 40), "at most 32 levels"),
])
def test_the_schema_of_a_record(whole, field, value, message):
    lines = [to_line(RECORDS[0]), to_line({**RECORDS[1], field: value})]
    records_path(whole).write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=rf"records\.jsonl: line 2: {message}" if field in RECORDS[0] else message) as error:
        read_records(whole)
    assert "repair=true in the command of the run moves damaged lines" in str(error.value)
    with RunStore.open(whole.with_name("new"), schema=sample_schema()) as store, pytest.raises(UserError, match=message):
        store.append({**RECORDS[1], field: value})  # nor is it written


@pytest.mark.parametrize("more", [{"log_p": 1e999}, {"measures": {"log_z": 1e999}}, {"added later": [{"log_z": 1e999}]}])
def test_numbers_are_finite(more):
    assert " given " in str(sample_schema().fault({**RECORDS[0], **more}))


def test_keys_of_a_newer_version_are_kept(whole):
    newer = {**RECORDS[0], "added": {"later": [1.5, None, True]}}
    records_path(whole).write_bytes(to_line(newer))
    assert read_records(whole) == [newer]


def test_a_run_that_may_repair_moves_damaged_lines_and_draws_them_again(whole, capsys):
    path, damaged = records_path(whole), whole / DAMAGED
    lines = path.read_bytes().split(b"\n")[:-1]
    path.write_bytes(b"\n".join([lines[0], lines[1].replace(b"42", b"43"), *lines[2:4], b"[]", lines[5], b""]))
    (whole / "attempts.jsonl").write_bytes(to_line({"problem": "p0", "chain": 0, "begun": True}) + b'["p0", 0]\n')
    (whole / "tracked.json").write_text('{"jsonl": {"lines": {"0": 4}, "summary": 6}}')
    before = path.read_bytes()
    with pytest.raises(UserError, match="line 2: checksum"):
        opened(whole)
    assert path.read_bytes() == before
    with RunStore.open(whole, schema=sample_schema(), repair=True) as store:
        assert store.records == [RECORDS[0], *RECORDS[2:4], RECORDS[5]]
        for missing in (RECORDS[1], RECORDS[4]):
            store.append(missing)
    told = capsys.readouterr().err
    assert f"{path}: 2 damaged lines moved to {DAMAGED} (line 2, 5)" in told
    assert "attempts.jsonl: 1 damaged line moved" in told
    assert damaged.read_bytes().split(b"\n") == [lines[1].replace(b"42", b"43"), b"[]", b'["p0", 0]', b""]
    assert json.loads((whole / "tracked.json").read_text()) == {"jsonl": {"lines": {"0": 3}, "summary": None}}
    assert sorted(path.read_bytes().split(b"\n")[:-1]) == sorted(lines)
    with RunStore.open(whole, schema=sample_schema(), repair=True):  # nothing is left to do
        pass
    assert capsys.readouterr().err == ""


def test_zeros_at_the_end_are_removed_with_a_note(whole, capsys):
    path = records_path(whole)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 4096 + b"\n" + b"\0" * 10)
    assert read_records(whole) == RECORDS
    assert opened(whole) == RECORDS
    assert "4,107 bytes at its end were removed: blocks of zeros" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_wait_for_a_lock_has_a_bound_and_says_what_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder, "_TOLD_SECONDS", 0.0)
    monkeypatch.setattr(folder, "_MOST_SECONDS", 0.01)
    held = folder.Locks(tmp_path / "lock")
    try:
        monkeypatch.setattr(held, "_lock", lambda operation, first, length: False)
        with pytest.raises(UserError, match=r"another process has been changing files of this folder .*; continue or end"):
            held.take(0, wait=True)
        assert not held.take(0)
    finally:
        held.close()
    assert "waiting, for at most 0 seconds, until another process has changed files" in capsys.readouterr().err


def test_the_number_in_a_lock_is_at_most_that_of_the_last_file(whole):
    (whole / "lock").write_bytes(b"%08d" % NUM_FILES)
    assert len(opened(whole)) == len(RECORDS)
    (whole / "lock").write_bytes(b"%08d" % (NUM_FILES + 1))
    with pytest.raises(UserError, match=f"lock: given b'0000{NUM_FILES + 1}'; allowed: a number up to {NUM_FILES}"):
        opened(whole)


@pytest.mark.parametrize(("content", "lines"), [
    (b"", []), (b"a\nb\n", [b"a", b"b"]), (b"a\nto", [b"a"]), (b"a\n\n", [b"a", b""]), (b"a\n\0\0\0\n\0\0\n", [b"a"]),
    (b"a\n\0\0\nb\n", [b"a", b"\0\0", b"b"])], ids=repr)
def test_complete_lines_are_those_before_a_torn_one_and_before_zeros(tmp_path, content, lines):
    """Zeros before a complete line are damage, and not the end of a file."""
    (tmp_path / "lines").write_bytes(content)
    assert list(each_line(tmp_path / "lines")) == lines
