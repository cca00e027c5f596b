"""`potential=none`: the default, which is no part of an identity."""

import pytest

from dflash_mcmc.config.identity import identity_of, label_of
from tests.refusals import refused

REGEX = ("potential=regex", "potential.pattern=x")


def test_a_run_without_a_potential_is_as_before_there_were_any(make_config):
    without, tilted = make_config("condition=ps"), make_config("condition=ps", *REGEX, "potential.beta=2")
    assert not [name for name in identity_of(without) if name.startswith("potential")]
    assert {name: value for name, value in identity_of(tilted).items() if name.startswith("potential")} == {
        "potential": "regex", "potential.beta": 2.0, "potential.on_failure": 0.0, "potential.stop_at_max": False,
        "potential.pattern": "x"}
    assert (label_of(without), label_of(tilted).split(" ")[0]) == ("ps", "ps_regex")


@pytest.mark.parametrize(("overrides", "message"), [
    (("condition=temp",), "sampler: given 'temperature'; allowed: best_of_n"),
    (("condition=lookahead",), "sampler: given 'lookahead'; allowed: best_of_n"),
    (("condition=best_of_n", "sampler.select=vote"), "potential: given 'regex'; allowed: none with sampler.select=vote"),
    (("condition=ps", "sampler.rule=published"), "potential: given 'regex'; allowed: none with sampler.rule=published"),
    (("condition=ps", "potential.beta=inf"), "potential.beta: given inf; allowed: a number"),
    (("condition=ps", "potential.beta=nan"), "potential.beta: given nan; allowed: a number"),
    (("condition=ps", "potential.on_failure=2"), "potential.on_failure: given 2.0; allowed: a number from 0 to 1"),
])
def test_a_mistake_is_one_line(make_config, overrides, message):
    with refused(message):
        make_config(*REGEX, *overrides)
