"""One program of several draws, by what they do on examples: rules on records that are written by hand."""

import pytest

from dflash_mcmc.statistics.chains import aggregated
from dflash_mcmc.statistics.summaries import aggregate
from tests.refusals import refused
from tests.statistics.test_summaries import record


def draws(*rows: tuple[float | None, str | None, float, str]) -> list[dict]:
    """Records of one problem from (passed, behaviour, log p, verdict) of each draw, the last draw first."""
    made = []
    for number, (passed, behaviour, log_p, verdict) in enumerate(rows):
        known = {name: value for name, value in (("passed", passed), ("behaviour", behaviour)) if value is not None}
        made.append(record("a", verdict, number, answer=str(number), token_forwards=13, prompt_forwards=3)
                    | {"log_p": log_p} | known)
    return made[::-1]


CASES = {  # rule, (passed, behaviour, log p, verdict) of each draw, draws that are needed; the right program is kept
    "first": ("examples", [(0.5, "x", -1, "wrong"), (1.0, "y", -9, "correct"), (1.0, "x", -1, "wrong")], 2),
    "most": ("examples", [(0.5, "x", -9, "correct"), (0.0, "x", -1, "wrong"), (0.0, "x", -2, "wrong")], 3),
    "likelier": ("examples", [(0.5, "x", -9, "wrong"), (0.5, "y", -1, "correct"), (None, "y", 0, "wrong")], 3),
    "no examples": ("examples", [(None, None, -9, "wrong"), (None, None, -1, "correct")], 2),
    "not drawn": ("examples", [(None, None, 0, "not_drawn"), (0.0, "x", -1, "correct")], 2),
    "largest class": ("behaviour", [(1.0, "x", -1, "wrong"), (0.0, "y", -9, "wrong"), (0.0, "y", -8, "correct")], 3),
    "equal classes": ("behaviour", [(None, "x", -3, "wrong"), (None, "y", -2, "correct")], 2),
    "no class": ("behaviour", [(None, None, -1, "wrong"), (None, None, -9, "wrong"), (None, "z", -20, "correct")], 3),
    "class of those that pass": ("examples_vote", [
        (1.0, "x", -9, "wrong"), (1.0, "x", -8, "correct"), (1.0, "y", -1, "wrong"), (0.0, "y", -1, "wrong"),
        (0.0, "y", -1, "wrong")], 5),
}


@pytest.mark.parametrize(("rule", "rows", "used"), CASES.values(), ids=CASES)
def test_the_program_that_is_kept(rule, rows, used):
    other = {**draws((1.0, "x", 0, "wrong"))[0], "problem": "b"}  # some problem has examples
    combined, _ = aggregated([*draws(*rows), other], rule)
    assert (combined["correct"], combined["num_chains"]) == (1.0, used)
    assert combined["token_forwards"] == 3 + 10 * used


def test_fewer_draws_are_the_first_ones():
    rows = draws((0.0, "x", -5, "wrong"), (0.5, "y", -9, "correct"), (1.0, "z", -1, "wrong"))
    assert aggregated(rows, "examples", chains=2)[0]["correct"] == 1.0
    summary = aggregate("temp", rows, "examples", 2)
    assert summary["examples/condition"] == "temp, first that passes its examples of 2"


def test_records_without_examples_are_refused():
    with refused("aggregate=behaviour: given records without what programs do on examples"):
        aggregated(draws((None, None, -1, "wrong")), "behaviour")
