"""`--cfg job` names the option of each group above the values."""

from __future__ import annotations

import sys

import pytest
import yaml

from dflash_mcmc.__main__ import main


@pytest.fixture
def shown(monkeypatch, capsys, tmp_path):
    """A function from a command line to what it prints."""
    def of(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["dflash_mcmc"])
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert not ended.value.code
        return capsys.readouterr().out

    return of


def test_options_stand_above_the_values(shown):
    text = shown("--cfg", "job", "condition=blend_ps", "draft=tiny")
    options = dict(line[1:].split() for line in text.splitlines()[1:] if line.startswith("#   "))
    assert text.startswith("# option of each group\n")
    assert {name: options[name] for name in ("condition", "blend", "sampler", "draft", "model")} == {
        "condition": "blend_ps", "blend": "layer", "sampler": "power_mh", "draft": "tiny", "model": "tiny"}
    assert yaml.safe_load(text)["blend"]["beta"] == 0.05


def test_a_part_of_the_configuration_has_no_options(shown):
    assert "option of each group" not in shown("--cfg", "job", "--package", "sampler", "condition=ps")


@pytest.mark.parametrize("missing", [
    ("model=hf", "model.path=/not/here"), ("experiment=real",), ("experiment=phase0",),
    ("dataset=jsonl", "dataset.path=/no.jsonl"), ("experiment=guided_power_sampling", "condition=draft_blend_ps")])
def test_nothing_that_a_run_would_read_has_to_be_there(shown, missing):
    text = shown("--cfg", "job", *missing)
    named = [word.partition("=")[2] for word in missing if ".path=" in word]
    assert all(name in text for name in named)
    assert set(yaml.safe_load(text)) >= {"model", "dataset", "sampler"}


def test_a_mistake_is_still_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dflash_mcmc"])
    with pytest.raises(SystemExit) as ended:
        main(["--cfg", "job", "sampler.alhpa=2"])
    assert ended.value.code == 2
    assert "sampler.alhpa" in capsys.readouterr().err
