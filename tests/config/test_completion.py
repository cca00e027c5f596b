"""Completion in bash, of the command lines that the README uses: a bash asks the program and fills in what is meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

ASK = """
eval "$({program} -sc install=bash)"
COMP_LINE={line!r} COMP_POINT={point}
COMP_WORDBREAKS=$' \\t\\n=:'
complete -p {name} > /dev/null || exit 1
_dflash_mcmc
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with `python` and `dflash-mcmc`, which run this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    for name, more in (("python", ""), ("dflash-mcmc", "-m dflash_mcmc ")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {more}"$@"\n')
        (folder / name).chmod(0o755)
    return folder


def completed(programs: Path, program: str, rest: str) -> list[str]:
    line = f"{program}{rest}"
    script = ASK.format(program=program, line=line, point=len(line), name=program.split()[0])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=programs, check=True,
                          env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)})
    return done.stdout.split()


@pytest.mark.parametrize("program", ["python -m dflash_mcmc", "dflash-mcmc"])
def test_options_of_a_group(programs, program):
    # Bash replaces what follows the last equals sign.
    assert completed(programs, program, " seed=1 condition=blend") == ["blend_greedy", "blend_ps"]


def test_names_of_groups(programs):
    assert "condition=" in completed(programs, "python -m dflash_mcmc", " cond")


def test_fields_of_a_group(programs):
    assert "sampler.alpha=" in completed(programs, "dflash-mcmc", " condition=ps sampler.al")


def test_other_programs_of_python_are_left_to_bash(programs):
    line = "python -m pytest cond"
    script = (f'eval "$(dflash-mcmc -sc install=bash)"; COMP_LINE="{line}" COMP_POINT={len(line)}; _dflash_mcmc; '
              'echo "${#COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=programs, check=True,
                          env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)})
    assert done.stdout == "0\n"
