"""The README and the pages of docs/: their blocks of code, and the commands in them with what each needs."""

import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests import processes
from tests.conftest import ROOT

README = ROOT / "README.md"
PAGES = (README, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "notebook"))
ADDED = "  # with the two files above"
NEEDS_GPU = "  # needs a GPU"
NEEDS_VLLM = "  # needs vLLM"  # what it does is under test in tests/vllm
NEEDS_LM_EVAL = "  # needs lm-eval"  # run by tests/harness
NEEDS_INSPECT = "  # needs inspect_ai"  # run by tests/harness
NEEDS_NETWORK = "  # needs a network"  # what it does is under test in tests/fetch
AFTER_FETCHING = "  # after make smollm2"  # with outputs/models/smollm2
IN_A_CHECKOUT = "  # in a checkout"  # run by tests/test_findings.py
NEEDS_SLURM = "  # needs SLURM"  # run by tests/launchers/test_readme.py

_NUMBER = r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def lines(block: str) -> list[str]:
    """The commands of a block for a shell, each in one line."""
    return [line for line in re.sub(r" \\\n *", " ", block).splitlines() if line and not line.startswith("#")]


def commands(*pages: Path) -> list[str]:
    """Every command of the pages' blocks for a shell, each once, in one line."""
    return list(dict.fromkeys(line for page in pages for block in blocks(page, "bash") for line in lines(block)))


def shown(language: str, *pages: Path) -> list[tuple[str, str]]:
    """Each block in a language with what it prints: the block of language `output` that follows it, or ""."""
    found = []
    for page in pages:
        fences = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [(block, after if kind == "output" else "") for (own, block), (kind, after) in pairwise([*fences, ("", "")])
                  if own == language]
    return found


def results(*pages: Path) -> dict[str, list[str]]:
    """What each command that runs as it is prints, by the pages. An output has a paragraph for each command of its block."""
    found: dict[str, list[str]] = {}
    for block, output in shown("bash", *pages):
        own = plain(lines(block))
        said = output.strip("\n").split("\n\n") if output else [""] * len(own)
        assert len(said) == len(own), f"{len(own)} commands and {len(said)} paragraphs of output: {block}"
        for command, text in zip(own, said, strict=True):
            found.setdefault(command, []).extend([text] if text else [])
    return found


def absent(said: str, printed: str) -> list[str]:
    """The lines that a page shows and that are not printed in this order.

    Three dots are any text, lengths of spaces and lines do not count, and a number may differ by two fifths: logits round
    differently on other processors, and one answer of a small run may then be another one.
    """
    left = iter(printed.splitlines())
    return [line for line in said.splitlines() if not any(_alike(line, other) for other in left)]


def _alike(said: str, printed: str) -> bool:
    said, printed = (re.sub(r"-{3,}", "---", " ".join(line.split())) for line in (said, printed))
    parts = re.split(rf"({_NUMBER}|\.\.\.)", said)
    pattern = "".join(".*?" if part == "..." else f"({_NUMBER})" if number % 2 else re.escape(part)
                      for number, part in enumerate(parts))
    found = re.fullmatch(pattern, printed)
    numbers = [part for part in parts[1::2] if part != "..."]
    return found is not None and all(abs(_value(own) - _value(other)) <= abs(_value(own)) * 0.4
                                     for own, other in zip(numbers, found.groups(), strict=True))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


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
    with subprocess.Popen(["bash", "-c", command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True, env={**os.environ, "PATH": path, **environment}) as program:
        try:
            return processes.result_of(program)
        except BaseException:
            os.killpg(program.pid, signal.SIGKILL)
            raise


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
    environment = {"WANDB_MODE": "disabled", **environment}  # a page names no tracker
    return processes.run(arguments(command, folder, **environment), folder, **environment)
