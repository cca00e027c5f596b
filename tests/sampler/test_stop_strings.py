"""Stop strings on the tabular engine: every sampler's law is over the stopped texts, by enumeration."""

import itertools

import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.ops import Draw, SamplingParams, Steps, Together, stopping
from dflash_mcmc.testing import PROMPT, law_of, power_target, total_variation
from dflash_mcmc.types import Trajectory
from tests.cases import quick
from tests.laws import power_law, product_law
from tests.sampler import (
    test_power_mh as of_power_mh,
    test_power_smc as of_power_smc,
    test_replica_exchange as of_replica_exchange,
)
from tests.sampler.stages import step_error

EXACT, WRONG = 1e-12, 1e-3
TEXTS = {
    "spans two tokens": ((0,), ("ab",), (b"", b"a", b"b")),
    "spans three tokens": ((), ("aba",), (b"a", b"b", b"c")),
    "overlaps itself": ((), ("aab",), (b"a", b"b", b"aa")),
    "inside a token": ((0,), ("ab",), (b"", b"xaby", b"a")),
    "bytes of a character": ((), ("é",), (b"\xc3", b"\xa9", b"e")),
    "with a stop id": ((1,), ("ab",), (b"a", b"b", b"c")),
    "two strings": ((), ("ab", "ca"), (b"a", b"b", b"c")),
    "from an empty token": ((), ("ab",), (b"a", b"", b"b")),
}
"""Stop ids, stop strings, and the text of each of the three tokens."""


def model_of(name: str, cls=TabularModel, **changes) -> TabularModel:
    stop_ids, stop, texts = TEXTS[name]
    return cls(3, stop_ids, seed=4, scale=0.7, stop=stop, texts=texts, **changes)


def engine_of(name: str, cls=TabularModel, **parts) -> TabularEngine:
    return TabularEngine(model_of(name, cls), **parts)


def drawn(engine: TabularEngine, horizon: int) -> dict:
    return law_of(lambda key: engine.answer(Draw(Trajectory.start(PROMPT), horizon, SamplingParams(0.8), key)))


@pytest.mark.parametrize("name", TEXTS)
def test_a_draw_ends_at_the_first_token_whose_text_contains_a_string(name):
    law = drawn(engine_of(name), 4)
    assert total_variation(law, product_law(model_of(name), 4, temperature=0.8)) <= EXACT
    assert len({len(tokens) for tokens in law}) > 1


def kept(stop: tuple[str, ...] | None, key) -> Steps[Trajectory]:
    """A draw and a draw again from its second token, as a part of a chain, with strings of its own if they are given."""
    steps = of_two(key)
    return steps if stop is None else stopping(steps, stop)


def of_two(key) -> Steps[Trajectory]:
    first = yield Together((Draw(Trajectory.start(PROMPT), 3, SamplingParams(0.8), key.fold_in("one")),))
    return (yield Draw(first[0].prefix(1), 3, SamplingParams(0.8), key.fold_in("two")))


@pytest.mark.parametrize("name", ["spans two tokens", "two strings", "overlaps itself"])
def test_strings_of_an_operation_take_the_place_of_those_of_the_engine(name):
    other = TabularEngine(model_of(name).stopping_at(("c", "never")))
    of_the_engine = law_of(lambda key: engine_of(name).run(kept(None, key)))
    assert total_variation(law_of(lambda key: other.run(kept(TEXTS[name][1], key))), of_the_engine) <= EXACT
    assert total_variation(law_of(lambda key: other.run(kept((), key))), of_the_engine) > WRONG


@pytest.mark.parametrize("name", TEXTS)
def test_the_power_target_is_over_the_stopped_texts(name):
    target = power_target(engine_of(name), 4, 3.0, SamplingParams(), "blended")
    by_hand = power_law(model_of(name), 4, 3.0, product_law(model_of(name), 4))
    assert total_variation(dict(zip(target.states, target.probability, strict=True)), by_hand) <= EXACT


POWER_MH = {"current": {}, "entropy": {"cut": "entropy", "entropy_power": 2.0},
            "early": {"early_reject": "exact", "proposal": "matched"},
            "early_hot": {"early_reject": "exact", "proposal": "matched", "proposal_temperature": 1.0}}


@pytest.mark.parametrize(("name", "blend", "options"), [
    *itertools.product(("spans two tokens", "overlaps itself"), (None,), POWER_MH.values()),
    ("spans two tokens", LayerBlend(beta=0.4, layer=0, norm="final"), {"proposal": "matched"})], ids=str)
def test_power_mh(name, blend, options):
    """The kernels of the other samplers: `test_must_end.py`, with a stop string too."""
    assert step_error(engine_of(name, blend=blend), of_power_mh.make(**options), 3) <= EXACT


def pair() -> TabularEngine:
    """Two tokens and the string "ab". Among the sequences of at most three tokens are some that end before the third."""
    return TabularEngine(TabularModel(2, (), seed=4, stop=("ab",), texts=(b"a", b"b")))


@pytest.mark.parametrize("changes", [{}, {"block_size": 2}], ids=str)
def test_power_smc_weights_are_unbiased(changes):
    assert of_power_smc.error(of_power_smc.make(**changes), pair(), 3) <= 1e-11


def test_swaps_of_replica_exchange():
    assert of_replica_exchange.joint_error(pair(), of_replica_exchange.make(), 3, of_replica_exchange.swaps) <= EXACT


DRAFT = TabularDraft(3, 2, seed=7, scale=0.7)


def speculation_of(verification: str):
    if verification == "match":
        return SpeculativeMatch(draft_temperature=1.0, trace=False, fault=None, fault_window=None).speculation(DRAFT)
    return SpeculativeRejection(draft_temperature=None, verification=verification, trace=False, fault=None).speculation(DRAFT)


@pytest.mark.parametrize("verification", quick(["match", "token", "block"], "block"))
@pytest.mark.parametrize("name", ["spans two tokens", "inside a token", "with a stop id"])
def test_drafted_tokens_after_a_stop_are_dropped(name, verification):
    law = drawn(engine_of(name, speculation=speculation_of(verification)), 3)
    assert total_variation(law, product_law(model_of(name), 3, temperature=0.8)) <= EXACT


@pytest.mark.parametrize("name", ["spans two tokens", "overlaps itself"])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_a_string_may_end_with_a_stage(name, num_blocks):
    """Without steps the stages of power_mh only extend the answer, also where a string goes on in the next stage."""
    sampler = of_power_mh.make(num_blocks=num_blocks, num_steps=0, proposal_temperature=0.8)
    law = law_of(lambda key: engine_of(name).run(sampler.chain(PROMPT, 4, key)).trajectory)
    assert total_variation(law, product_law(model_of(name), 4, temperature=0.8)) <= EXACT
