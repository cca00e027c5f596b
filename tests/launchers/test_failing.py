"""Grids on a real SLURM whose devices, memory or samples fail, and grids with a plugin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launchers.test_grid import SHORT, Submitter, check_complete, drawn_alone
from tests.test_names import PLUGIN, install

POINT = ("condition=greedy", "dataset.limit=3", "dataset.max_new_tokens=24")
CHAIN = """

_chain = chain


def chain(config, sampler, problem, number, prompt):
    import os, signal, time
    from pathlib import Path
    from dflash_mcmc.process.machine import node
    note = Path({note!r})
{body}
    return _chain(config, sampler, problem, number, prompt)
"""
BAD_NODE = """
    if not note.exists():
        note.write_text(node())
    if note.read_text() == node():
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""The node of the first worker kills all of them."""
TOO_MUCH = """
    if not note.exists():
        note.touch()
        held = bytearray(b"x") * 2_000_000_000
        time.sleep(60)
"""
"""The first sample takes 2 GB, until the cluster kills it."""
UNIT = """

_do = UnitWorker.do


def do(self, keys, claimed):
    import os, signal
    from pathlib import Path
    note = Path({note!r})
    if not note.exists():
        note.write_text(keys[1][0])

    def watched():
        for key in claimed:
            if key[0] == note.read_text():
                os.kill(os.getpid(), signal.SIGKILL)
            yield key

    return _do(self, keys, watched())


UnitWorker.do = do
"""
"""The second unit kills its process."""


def altered(folder: Path, module: str, text: str, body: str = "") -> Path:
    """A copy of the code with more text at the end of a module. The text has the path of a file for notes."""
    code = folder / "code"
    for part in ("dflash_mcmc", "conf"):
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (code / "dflash_mcmc" / module).open("a") as file:
        file.write(text.format(note=str(folder / "note"), body=body.strip("\n")))
    return code


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[dict]:
    return drawn_alone(tmp_path_factory.mktemp("alone"), *POINT)[0]


def test_a_bad_device_gives_up_no_sound_sample(slurm, tmp_path, reference):
    submitter = Submitter(slurm, tmp_path, altered(tmp_path, "run/build.py", CHAIN, BAD_NODE))
    submitter.submit(*POINT, *SHORT, "hardware.max_attempts=1", "max_restarts=9")
    submitter.wait()
    node = (tmp_path / "note").read_text()
    (grid,) = [submitter.grid()]
    assert f"hardware.device: given {node}/cpu" in grid.events(grid.jobs[0])[-1]["reason"]
    assert submitter.records() == [[]]
    slurm.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=bad")
    submitter.run("resume")
    submitter.wait()
    check_complete(submitter, reference)


def test_a_job_that_the_cluster_kills_for_its_memory_is_requeued(slurm, tmp_path, reference):
    submitter = Submitter(slurm, tmp_path, altered(tmp_path, "run/build.py", CHAIN, TOO_MUCH))
    submitter.submit(*POINT, *SHORT, "shards=2")
    submitter.wait()
    assert ["started", "started", "complete"] in submitter.events().values()  # both, where both jobs begin at once
    check_complete(submitter, reference)


def test_a_plugin_that_is_removed_after_the_submission_is_still_that_of_the_jobs(slurm, tmp_path):
    """The plugin is removed before any job has started Python."""
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    install(plugin, PLUGIN)
    submitter = Submitter(slurm, tmp_path, f"{ROOT}:{plugin}")
    submitter.submit(f"--config-dir={plugin / 'conf'}", "sampler=elsewhere", "dataset.limit=2", *SHORT, "setup=[sleep 3]")
    shutil.rmtree(plugin)
    submitter.wait()
    (records,) = submitter.records()
    assert [record["num_tokens"] > 0 for record in records] == [True, True]
    assert submitter.events()["0000-0"] == ["started", "complete"]


def test_a_unit_of_a_probe_that_kills_its_process_is_recorded_as_failed(slurm, tmp_path):
    submitter = Submitter(slurm, tmp_path, altered(tmp_path, "run/units.py", UNIT))
    submitter.submit("probe=layer_rank", "dataset.limit=3", *SHORT, "hardware.max_attempts=1", "max_restarts=9")
    submitter.wait()
    (records,) = submitter.records()
    assert [("failure" in record) for record in records] == [False, True, False]
    assert submitter.events()["0000-0"] == ["started", *["died"] * 3, "complete"]
