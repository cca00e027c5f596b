"""`hardware=local`: the chosen device, the number of threads, and errors."""

from __future__ import annotations

import pytest
import torch

from dflash_mcmc.errors import ConfigError


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
