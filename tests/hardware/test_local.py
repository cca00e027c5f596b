"""`hardware=local`: the chosen device, the number of threads, and errors."""

from types import SimpleNamespace

import pytest
import torch

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.hardware.local import Local


def test_auto_is_the_first_gpu_or_the_cpu(make_config):
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert make_config("hardware.device=auto").hardware.resolve() == expected


def test_threads_are_set(make_config):
    before = torch.get_num_threads()
    try:
        assert make_config("hardware.num_threads=1", "hardware.device=cpu").hardware.resolve() == "cpu"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_missing_gpu_is_refused(make_config):
    with pytest.raises(ConfigError, match="cpu, since PyTorch finds no GPU here"):
        make_config("hardware.device=cuda:99").hardware.resolve()


def test_the_processes_of_a_launch_share_the_cores(make_config, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    try:
        make_config("hardware.device=cpu").hardware.resolve()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_each_process_of_a_launch_uses_its_own_gpu(make_config, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert make_config().hardware.resolve() == "cuda:3"
    assert make_config("hardware.device=cuda:1").hardware.resolve() == "cuda:1"


class _Threads:
    """PyTorch's number of threads, and every number that it was set to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers = [6]
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.numbers[-1])
        monkeypatch.setattr(torch, "set_num_threads", self.numbers.append)


@pytest.mark.parametrize(("given", "of_omp", "expected"), [
    ([], None, [6, 1, 6]), (["hardware.num_threads=3"], None, [6, 3, 3]), ([], "6", [6, 6, 6])],
    ids=["default", "hardware.num_threads", "OMP_NUM_THREADS"])
def test_a_small_model_takes_one_thread_and_the_next_model_its_own(make_config, monkeypatch, given, of_omp, expected):
    """The next model has an embedding of 2**17 weights."""
    config = make_config("hardware.device=cpu", *given)
    small = config.model.load("cpu")
    large = SimpleNamespace(decoder=torch.nn.Embedding(2**10, 2**7, _weight=torch.zeros(2**10, 2**7)))
    taken = _Threads(monkeypatch)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_omp:
        monkeypatch.setenv("OMP_NUM_THREADS", of_omp)
    for target in (small, large):
        monkeypatch.setattr(type(config.model), "load", lambda self, device, target=target: target)
        assert config.engine.load(config, "cpu") is target
    assert taken.numbers == expected


def test_a_number_that_a_user_sets_between_two_models_stays(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    taken, hardware = _Threads(monkeypatch), Local(device="cpu")
    hardware.set_threads(small=True)
    torch.set_num_threads(4)
    for small in (False, True, False):
        hardware.set_threads(small)
    assert taken.numbers == [6, 1, 4, 4, 1, 4]


def test_a_number_of_one_run_is_not_that_of_the_next(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    taken = _Threads(monkeypatch)
    for number in (2, 3, None):
        Local(device="cpu", num_threads=number).set_threads()
    assert taken.numbers == [6, 2, 3, 6]
