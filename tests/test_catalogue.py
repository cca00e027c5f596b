"""The catalogue lists every option with its meaning and file, and every field of a group."""

from __future__ import annotations

import pytest

from dflash_mcmc import catalogue
from dflash_mcmc.catalogue import options
from dflash_mcmc.registry import GROUPS
from tests.conftest import ROOT


def test_every_option_has_a_meaning():
    for group, entries in options().items():
        for name, (meaning, _) in entries.items():
            assert meaning.endswith("."), f"conf/{group}/{name}.yaml does not begin with a comment with its meaning"


def test_prints_every_option_of_every_group(command):
    done = command("dflash_mcmc.catalogue")
    assert done.returncode == 0
    for file in (ROOT / "conf").glob("*/*.yaml"):
        assert f"conf/{file.parent.name}/{file.name}" in done.stdout
        assert file.stem in done.stdout


def test_prints_the_fields_of_each_group(capsys):
    for group in GROUPS:
        catalogue._main([group])
        assert f"{group}/" in capsys.readouterr().out


def test_a_group_of_values_lists_its_options(capsys):
    catalogue._main(["condition"])
    shown = capsys.readouterr().out
    assert "conf/condition/blend_ps.yaml" in shown
    assert "conf/sampler" not in shown


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_says_how_to_ask(flag, capsys):
    catalogue._main([flag])
    shown = capsys.readouterr().out
    assert "usage: python -m dflash_mcmc.catalogue [GROUP ...]" in shown
    assert "sampler/" not in shown


def test_an_unknown_group_is_an_error_of_one_line(command):
    done = command("dflash_mcmc.catalogue", "samplers")
    assert done.returncode == 2
    assert "did you mean 'sampler'" in done.stderr
