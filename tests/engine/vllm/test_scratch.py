"""Files and shared memory of vLLM's processes are removed at their end, or by the next start after a kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from dflash_mcmc.engine.vllm import core
from dflash_mcmc.errors import UserError


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folders of temporary files and of shared memory."""
    temporary, segments = tmp_path / "temporary", tmp_path / "segments"
    for folder in (temporary, segments):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(core, "SEGMENTS", segments)
    (segments / "vllm_dist_other-pp:0-[0-1]-cpushm_0").touch()
    return temporary, segments


def work(segments: Path, ended: bool = False) -> core.Scratch:
    """What vLLM does when it starts two workers, which remove their file when both have ended."""
    made = core.Scratch()
    with made.used():
        store = Path(tempfile.gettempdir()) / f"vllm_dist_{os.getpid()}"
        store.touch()
    if ended:
        store.unlink()
    for rank in range(2):
        (segments / f"{store.name}-tp:0-[0-1]-cpushm_{rank}").touch()
    return made


@pytest.mark.parametrize("ended", [False, True])
def test_the_end_removes_the_folder_and_its_segments_alone(places, ended):
    temporary, segments = places
    made = work(segments, ended)
    assert tempfile.gettempdir() == str(temporary)
    assert (len(list(temporary.iterdir())), len(list(segments.iterdir()))) == (1, 3)
    made.remove()
    assert not list(temporary.iterdir())
    assert [segment.name for segment in segments.iterdir()] == ["vllm_dist_other-pp:0-[0-1]-cpushm_0"]


def test_a_path_that_is_too_long_for_sockets_is_one_line(places):
    longest = 107 - 1 - 36 - 1 - len("dflash_mcmc-vllm-12345678")
    for length in (longest, longest + 1):
        made = core.Scratch()
        folder, made.folder = made.folder, Path("/" + "x" * (length - 1)) / made.folder.name
        if length == longest:
            made.check_sockets()
        else:
            with pytest.raises(UserError, match=rf"TMPDIR: given '/x+'; allowed: a folder whose path has at most {longest} b"):
                made.check_sockets()
        made.folder = folder
        made.remove()


def _work_and_wait(segments: Path, ready) -> None:
    work(segments, ended=True)
    ready.send(True)
    signal.pause()


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_of_a_living_one(places):
    temporary, segments = places
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_work_and_wait, args=(segments, there))
    process.start()
    assert here.recv()
    mine = core.Scratch()
    assert (len(list(temporary.iterdir())), len(list(segments.iterdir()))) == (2, 3)  # both live
    process.kill()
    process.join()
    core.remove_stale()
    assert list(temporary.iterdir()) == [mine.folder]
    assert len(list(segments.iterdir())) == 1
    mine.remove()
    here.close()
    there.close()
