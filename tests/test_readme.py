"""The README is short, its first commands are those that CI runs, and its links lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.pages import README, blocks, commands

BY_CI = ["make demo", "make test"]


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 200


def test_the_two_commands_come_first_and_ci_runs_them():
    assert commands(README)[:2] == BY_CI
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert all(command in ci for command in BY_CI)


def test_the_python_has_ten_lines_or_fewer():
    (block,) = blocks(README, "python")
    assert len([line for line in block.splitlines() if line]) <= 10


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "launchers/README.md"])
def test_links_lead_to_files(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert links or name != "README.md"
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link
