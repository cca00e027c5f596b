"""A device that fails records no sound task as failed: a recorded task is done again on it first."""

from __future__ import annotations

import pytest

from dflash_mcmc.config.identity import identity_hash, run_folder
from dflash_mcmc.errors import UserError
from dflash_mcmc.process import machine
from dflash_mcmc.store.attempts import Attempts
from dflash_mcmc.store.folder import RunStore
from tests.runner.test_units import Lengths, lengths, lines  # noqa: F401  (a fixture)
from tests.runs import execute

HERE, THERE = "n1/cpu", "n2/cpu"


@pytest.fixture
def measured(lengths, monkeypatch):  # noqa: F811
    """A configuration with one unit left, and the units of each call of the probe on the device HERE."""
    config, calls, measure = lengths(limit=2), [], Lengths.measure
    execute(lengths(limit=1))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def noted(self, config, work):
        calls.append(list(work.units))
        return measure(self, config, work)

    monkeypatch.setattr(Lengths, "measure", noted)
    return config, calls


def attempt(config, unit, *devices, check=False):
    """Leaves what processes leave that die on these devices."""
    with RunStore.open(run_folder(config, identity_hash(config))) as store:
        attempts = Attempts(store, 3)
        for device in devices:
            attempts.device = device
            attempts.begin(unit, alone=True, check=check)


def failures(result) -> list[str]:
    return [line["problem"] for line in lines(result.folder) if "failure" in line]


def test_after_deaths_on_one_device_a_recorded_task_is_done_there_first(measured):
    config, calls = measured
    sound, deadly = config.probe.units(config)
    attempt(config, deadly, HERE, HERE, HERE)
    assert failures(execute(config)) == [deadly.problem]
    assert calls == [[sound], [deadly]]  # the second call takes no unit


def test_a_task_that_died_on_one_device_is_tried_on_another(measured):
    config, calls = measured
    _, deadly = config.probe.units(config)
    attempt(config, deadly, THERE, THERE, THERE)
    assert failures(execute(config)) == []
    assert calls == [[deadly]]


def test_deaths_on_two_devices_need_no_check(measured):
    config, calls = measured
    _, deadly = config.probe.units(config)
    attempt(config, deadly, THERE, THERE, HERE)
    assert failures(execute(config)) == [deadly.problem]
    assert calls == [[deadly]]


def test_a_device_that_dies_of_a_recorded_task_too_is_refused_in_one_line(measured):
    config, calls = measured
    sound, deadly = config.probe.units(config)
    attempt(config, deadly, HERE, HERE, HERE)
    attempt(config, sound, HERE, HERE, HERE, check=True)
    with pytest.raises(UserError, match=r"hardware.device: given n1/cpu, .* 3 times while .* is recorded; allowed"):
        execute(config)
    assert calls == []
    assert len(lines(run_folder(config, identity_hash(config)))) == 1


def test_a_device_on_which_a_recorded_task_fails_is_refused(measured, monkeypatch):
    config, _ = measured
    _, deadly = config.probe.units(config)
    attempt(config, deadly, HERE, HERE, HERE)
    monkeypatch.setattr(Lengths, "measure", lambda self, config, work: ((unit, {"failure": "NaN"}) for unit in work))
    with pytest.raises(UserError, match="which is recorded, failed there"):
        execute(config)


def test_where_nothing_was_ever_done_the_device_is_refused(lengths, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    config = lengths(limit=2)
    for unit in config.probe.units(config):
        attempt(config, unit, HERE, HERE, HERE)
    with pytest.raises(UserError, match="no task of the run was ever done"):
        execute(config)


def test_a_check_is_no_attempt_at_the_task_and_its_end_is_noted(measured, tmp_path):
    config, _ = measured
    sound, _ = config.probe.units(config)
    attempt(config, sound, HERE, HERE, HERE, check=True)
    with RunStore.open(run_folder(config, identity_hash(config))) as store:
        attempts = Attempts(store, 3)
        attempts.device = HERE
        assert (attempts.failed_checks(), attempts.is_suspect(sound)) == (3, False)
        attempts.begin(sound, alone=True, check=True)
        attempts.give_up(sound)
        attempts.reread()
        assert attempts.failed_checks() == 3
        attempts.device = THERE
        assert attempts.failed_checks() == 0


def test_the_name_of_a_gpu_is_that_of_the_cluster(monkeypatch):
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert [machine.place_of(device) for device in ("cpu", "cuda", "cuda:1")] == ["n1/cpu", "n1/gpu 0", "n1/gpu 1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("SLURM_JOB_GPUS", "4,6")
    assert machine.place_of("cuda:1") == "n1/gpu 6"


@pytest.mark.parametrize(("given", "visible", "places"), [
    ("2,3", None, ["2", "3"]), ("2,3", "0,1", ["2", "3"]), ("2,3", "2,3", ["2", "3"]), ("2,3", "3,2", ["3", "2"]),
    ("2,3", "3", ["3"]), ("2,3", "1", ["3"]), ("2,3", "GPU-5f, GPU-6a", ["GPU-5f", "GPU-6a"]), ("0,1", "1", ["1"]),
    ("5", "0", ["5"]), (None, "2,3", ["2", "3"]), ("2,3", "", ["2", "3"]), ("2", "7", ["7"])])
def test_the_gpus_of_a_job_are_those_that_it_sees(monkeypatch, given, visible, places):
    for name, value in (("SLURM_STEP_GPUS", None), ("SLURM_JOB_GPUS", given), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert [machine.place_of(f"cuda:{number}") for number in range(len(places))] == [f"n1/gpu {place}" for place in places]
