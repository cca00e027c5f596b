"""A grid on a real SLURM whose memory fails."""

import shutil

from tests.conftest import ROOT
from tests.launchers.test_grid import SHORT, Submitter, check_complete, drawn_alone

POINT = ("condition=greedy", "dataset.limit=3", "dataset.max_new_tokens=24")
CHAIN = """

_chain = chain


def chain(*given):
    import time
    from pathlib import Path
    note = Path({note!r})
    if not note.exists():
        note.touch()
        held = bytearray(b"x") * 2_000_000_000
        time.sleep(60)
    return _chain(*given)
"""
"""The first sample takes 2 GB, until the cluster kills it."""


def test_a_job_that_the_cluster_kills_for_its_memory_is_requeued(slurm, tmp_path):
    code, alone = tmp_path / "code", tmp_path / "alone"
    for part in ("dflash_mcmc", "conf"):
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (code / "dflash_mcmc/chains/build.py").open("a") as file:
        file.write(CHAIN.format(note=str(tmp_path / "note")))
    submitter = Submitter(slurm, tmp_path, code)
    submitter.submit(*POINT, *SHORT, "shards=2")
    submitter.wait()
    assert ["started", "started", "complete"] in submitter.events().values()  # both, where both jobs begin at once
    alone.mkdir()
    check_complete(submitter, drawn_alone(alone, *POINT)[0])
