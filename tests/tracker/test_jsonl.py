"""`tracker=jsonl` writes its lines; a tracker that fails is reported once and not used again."""

from __future__ import annotations

import json
import os

import pytest

from dflash_mcmc.tracker import Guarded
from tests.runs import execute


def test_lines_of_a_run(make_config):
    result = execute(make_config("tracker=jsonl", "sampler=greedy", "dataset.limit=3"))
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:-1]] == [1, 2, 3]
    assert lines[-1]["summary"] == result.summary
    execute(make_config("tracker=jsonl", "sampler=greedy", "dataset.limit=4"))
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize(("make", "told"), [(os.mkfifo, "is a pipe"), (lambda path: path.symlink_to("none"), "is a link")],
                         ids=["pipe", "link"])
def test_what_is_no_file_in_place_of_the_file_is_reported_and_stops_no_run(make_config, capsys, make, told):
    result = execute(make_config("tracker=jsonl", "sampler=greedy", "dataset.limit=1"))
    (result.folder / "metrics.jsonl").unlink()
    make(result.folder / "metrics.jsonl")
    again = execute(make_config("tracker=jsonl", "sampler=greedy", "dataset.limit=2"))
    assert again.summary["num_samples"] == 2
    assert f"metrics.jsonl: {told}" in capsys.readouterr().err


class Failing:
    """A tracker that fails at the call named `at`."""

    def __init__(self, at: str):
        self.at, self.calls = at, []

    def __getattr__(self, name: str):
        def call(*_):
            self.calls.append(name)
            if name == self.at:
                raise OSError("no space\nleft")
            return self

        return call


def test_a_failing_tracker_is_reported_once_and_not_used_again(capsys):
    for at in ("start", "log", "summary", "publish", "finish"):
        tracker = Failing(at)
        guarded = Guarded(tracker, None)
        guarded.log({}, 1)
        guarded.log({}, 2)
        guarded.summary({}, [])
        guarded.publish(None, {}, [])
        assert guarded.works == (at == "finish")
        guarded.finish(0)
        assert not guarded.works
        assert tracker.calls.index(at) == len(tracker.calls) - 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "no space left" in error
