"""The configuration of a request of inspect_ai, in this package's terms. inspect_ai is not needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_mcmc.api.choices import Samplers
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.errors import UserError
from dflash_mcmc.harness import chosen
from dflash_mcmc.harness.inspect_ai.requests import read


def test_fields_that_a_request_has():
    asked = read({"temperature": 0.5, "top_k": -1, "max_tokens": 9, "num_choices": 2, "stop_seqs": ["Q:"], "seed": 4,
                  "logprobs": True, "max_connections": 3, "extra_body": {"sampler": {"alpha": 2.0}}}, 64)
    assert asked == ({"alpha": 2.0}, {"temperature": 0.5, "top_k": 0}, 2, 9, ("Q:",), 4, True)
    assert read({}, 64) == ({}, {}, 1, 64, (), None, False)


@pytest.mark.parametrize(("given", "message"), [
    ({"max_tokens": 65}, "max_tokens: given 65; allowed: 1 to 64"), ({"top_logprobs": 2}, "top_logprobs: given 2; allowed: 0"),
    ({"reasoning_effort": "low"}, "reasoning_effort: given 'low'"), ({"num_choices": 0}, "num_choices: given 0"),
    ({"extra_body": {"sampelr": {}}}, "extra_body: given"), ({"stop_seqs": [""]}, "stop_seqs")])
def test_other_fields_are_one_line(given, message):
    with pytest.raises(UserError, match=message):
        read(given, 64)


def test_fields_of_a_request_choose_the_law_or_are_refused():
    names = ("max_new_tokens",)
    plain = Samplers(chosen({"pretrained": str(PACKAGE / "assets/tiny")}, names, "-M",
                            ("sampler=temperature", "sampler.temperature=1")).config)
    assert plain.config_for({}, {}, 8).sampler.temperature == 1.0
    assert plain.config_for({}, {"temperature": 0.5, "top_k": 3}, 8).sampler.top_k == 3
    assert type(plain.config_for({}, {"temperature": 0.0, "top_k": 0}, 8).sampler).__name__ == "Greedy"
    power = Samplers(chosen({"model": "tiny", "condition": "ps", "sampler.alpha": 3}, names, "-M").config)
    assert power.config_for({"num_steps": 2}, {"temperature": 1.0}, 32).sampler.alpha == 3.0
    with pytest.raises(UserError, match=r"temperature: given 0.5; allowed: 1 with sampler=power_mh"):
        power.config_for({}, {"temperature": 0.5}, 32)
    with pytest.raises(UserError, match=r"-M: given 'max_new_token'.*did you mean 'max_new_tokens'"):
        chosen({"max_new_token": 8}, names, "-M")


def test_export_without_inspect_ai_is_one_line():
    hide = "import sys; sys.modules['inspect_ai'] = None; sys.argv[1:] = ['x', '--to', 'inspect']; " \
           "from dflash_mcmc.export import main; main()"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: inspect_ai: is not installed; allowed: pip install 'dflash_mcmc[inspect]'\n"
