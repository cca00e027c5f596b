"""A run whose records were damaged stops with a line, and with repair=true draws the damaged samples again."""

from __future__ import annotations

import os

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.reading import read_records
from dflash_mcmc.store.records import DAMAGED, RECORDS
from dflash_mcmc.store.schema import CHECKSUM
from tests.runner.test_samples import TIMES
from tests.runs import execute

SHORT = ("sampler=greedy", "dataset.limit=3", "dataset.max_new_tokens=16")


def without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in TIMES}


def test_a_damaged_run_is_drawn_again_only_on_request(make_config, capsys):
    folder = execute(make_config(*SHORT)).folder
    path, whole = folder / RECORDS, read_records(folder)
    content = path.read_bytes()
    place = content.index(b'"text": "', content.index(b"\n")) + 10  # a letter of the second answer
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"records\.jsonl: line 2: checksum: given .*; repair=true in the command of the run"):
        execute(make_config(*SHORT))
    assert path.read_bytes() == damaged
    result = execute(make_config(*SHORT, "repair=true"))
    assert (result.folder, result.num_new, result.num_left) == (folder, 1, 0)
    assert sorted(map(str, map(without_times, read_records(folder)))) == sorted(map(str, map(without_times, whole)))
    assert (folder / DAMAGED).read_bytes() == damaged.split(b"\n")[1] + b"\n"
    assert f"1 damaged line moved to {DAMAGED} (line 2)" in capsys.readouterr().err
    assert all(CHECKSUM not in record for record in read_records(folder))


def test_a_pipe_as_records_is_one_line(make_config):
    folder = execute(make_config(*SHORT)).folder
    (folder / RECORDS).unlink()
    os.mkfifo(folder / RECORDS)
    with pytest.raises(UserError, match=r"records\.jsonl: is a pipe; allowed: a regular file; move it away"):
        execute(make_config(*SHORT))


def test_an_emptied_configuration_is_written_again(make_config, capsys):
    """A complete run draws nothing, and its report reads this file."""
    path = execute(make_config(*SHORT)).folder / "config.yaml"
    whole = path.read_text()
    for damage in (lambda: path.write_text("\n"), path.unlink):
        damage()
        execute(make_config(*SHORT))
        assert path.read_text() == whole
    assert "config.yaml: has no configuration, and is written again" in capsys.readouterr().err


def test_a_refused_engine_leaves_no_folder(make_config, tmp_path, monkeypatch):
    config = make_config(*SHORT, f"paths.outputs={tmp_path / 'not' / 'there'}")
    before = sorted(tmp_path.iterdir())

    def refuse(*given: object) -> None:
        raise UserError("engine: is not installed")

    monkeypatch.setattr(type(config.engine), "load", refuse)
    with pytest.raises(UserError, match="is not installed"):
        execute(config)
    assert sorted(tmp_path.iterdir()) == before
