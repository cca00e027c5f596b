"""The README and the pages of docs/: their blocks of code, and the commands in them with what each needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import processes
from tests.conftest import ROOT

README = ROOT / "README.md"
PAGES = (README, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "notebook"))
ADDED = "  # with the three files above"
NEEDS_GPU = "  # needs a GPU"
NEEDS_VLLM = "  # needs vLLM"  # what it does is under test in tests/vllm
NEEDS_LM_EVAL = "  # needs lm-eval"  # run by tests/harness
NEEDS_INSPECT = "  # needs inspect_ai"  # run by tests/harness
NEEDS_NETWORK = "  # needs a network"  # what it does is under test in tests/fetch
AFTER_FETCHING = "  # after make smollm2"  # with outputs/models/smollm2
IN_A_CHECKOUT = "  # in a checkout"  # run by tests/test_findings.py
NEEDS_SLURM = "  # needs SLURM"  # run by tests/launchers/test_readme.py


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def joined(block: str) -> str:
    """A block for a shell without its breaks of lines inside commands."""
    return re.sub(r" \\\n *", " ", block)


def commands(*pages: Path) -> list[str]:
    """Every command of the pages' blocks for a shell, each once, in one line."""
    lines = (line for page in pages for block in blocks(page, "bash") for line in joined(block).splitlines())
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


def marked(found: list[str], marker: str) -> list[str]:
    """The commands that end in the marker, without it."""
    return [line.removesuffix(marker) for line in found if line.endswith(marker)]


def plain(found: list[str]) -> list[str]:
    """The commands that run as they are, in any folder."""
    return [line for line in found if not line.endswith((ADDED, NEEDS_GPU, NEEDS_VLLM, NEEDS_LM_EVAL, NEEDS_INSPECT,
                                                              NEEDS_NETWORK, AFTER_FETCHING, IN_A_CHECKOUT, NEEDS_SLURM))
            and not line.startswith("make ")]


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """A line, as a shell with this Python runs it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PATH": path, **environment})


def arguments(command: str, folder: Path, **environment: str) -> list[str]:
    """The arguments of one `python ...`, as the shell expands them."""
    noting = "set -e; python() { printf '%s\\0' \"$@\"; }; "
    noted = subprocess.run(["bash", "-c", noting + command], cwd=folder, capture_output=True, text=True, check=True,
                           env={**os.environ, **environment})
    return noted.stdout.split("\0")[:-1]


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """A line whose `python ...` runs in a process that has done its imports already."""
    if not command.startswith("python "):
        return shell(command, folder, **environment)
    return processes.run(arguments(command, folder, **environment), folder, timeout=600, **environment)
