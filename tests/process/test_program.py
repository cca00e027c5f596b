"""Errors that the user can mend are one line, and all others keep their traceback."""

from __future__ import annotations

import pytest
import torch

import dflash_mcmc
from dflash_mcmc.__main__ import main
from dflash_mcmc.process import program


def raising(error):
    def body():
        raise error
    return body


def failed_on_a_cpu():
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("body", [raising(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")),
                                  failed_on_a_cpu], ids=["gpu", "cpu"])
def test_memory_that_runs_out_is_one_line(body, capsys):
    assert program.guarded(body) == program.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("error: hardware.memory_gb: the memory ran out while the run was computing (")
    assert error.count("\n") == 1
    assert "the same command continues" in error


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), FileNotFoundError(2, "missing"), ValueError("x")])
def test_other_errors_are_raised(error):
    with pytest.raises(type(error)):
        program.guarded(raising(error))


def test_the_version_is_ours(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dflash_mcmc {dflash_mcmc.__version__}\n"
