"""Grids on a real SLURM whose memory fails, and grids with a plugin."""

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
TOO_MUCH = """
    if not note.exists():
        note.touch()
        held = bytearray(b"x") * 2_000_000_000
        time.sleep(60)
"""
"""The first sample takes 2 GB, until the cluster kills it."""

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


def test_a_job_that_the_cluster_kills_for_its_memory_is_requeued(slurm, tmp_path, reference):
    submitter = Submitter(slurm, tmp_path, altered(tmp_path, "chains/build.py", CHAIN, TOO_MUCH))
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
