"""A grid of engine=vllm on a real SLURM, on CPUs: `make vllm-slurm`, in the environment of `make vllm`."""

import importlib.util
import signal
from pathlib import Path

import psutil
import pytest

from tests.launchers.test_grid import Submitter, keys, worker_of
from tests.processes import HANG

pytestmark = [pytest.mark.vllm, pytest.mark.slow,
              pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm")]
JOBS = ("engine=vllm", "hardware=slurm_gpus", "gpus=0", "cpus=1", "memory_gb=4", "shards=2", "hardware.device=cpu",
        "hardware.memory_gb=0.1", "hardware.num_slots=2", "sampler=power_mh", "sampler.num_steps=4", "dataset.limit=8",
        "num_chains=2", "dataset.max_new_tokens=32", "tracker=none")
MINUTES = 8
"""For a start of vLLM on a machine with other work."""


@pytest.fixture
def submitter(slurm, tmp_path) -> Submitter:
    return Submitter(slurm, tmp_path)


def test_a_killed_worker_of_two_loses_nothing(submitter):
    """The job starts the worker again. The records are complete, and what was recorded before stays as it was."""
    submitter.submit(*JOBS)
    submitter.wait_for_records(2, 60 * MINUTES)
    worker = worker_of(submitter, 0)
    children = worker.children(recursive=True)
    worker.send_signal(signal.SIGKILL)
    before = {(record["problem"], record["chain"]): record["tokens"] for record in submitter.records()[0]}
    submitter.wait(120 * MINUTES)
    records, = submitter.records()
    assert keys(records) == sorted({*keys(records)})
    assert len(records) == 16
    after = {(record["problem"], record["chain"]): record["tokens"] for record in records}
    assert before.items() <= after.items()
    assert len(before) < 16
    assert submitter.events() == {"0000-0": ["started", "died", "complete"], "0000-1": ["started", "complete"]}
    assert "-vllm-" in Path(submitter.grid().points[0].folder).name
    _, left = psutil.wait_procs(children, timeout=HANG)
    assert not left
