"""`LoadedEngine.stream_each`: requests with settings of their own share a batch, and get the answers that they get alone."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.api import LoadedEngine, component, workers
from dflash_mcmc.api.workers import AnswerRequest
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.slots import Slots
from dflash_mcmc.errors import UserError
from dflash_mcmc.registry import components

TINY = str(PACKAGE / "assets/tiny")
SETTINGS = [("power_mh", 24, (" =", "Then")), ("power_mh", 16, ("=",)), ("greedy", 40, ()), ("temperature", 16, ("=",)),
            ("greedy", 3, ("Then",))]


@pytest.fixture(scope="module")
def engine():
    with LoadedEngine(TINY) as loaded:
        yield loaded


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The stop strings of each engine that is started."""
    begin, found = Slots.start, []

    def start(self, config, *given):
        found.append(config.dataset.stop)
        return begin(self, config, *given)

    monkeypatch.setattr(Slots, "start", start)
    return found


def asked() -> list[AnswerRequest]:
    prompts = [np.arange(5, 5 + length) for length in (9, 30)]
    return [AnswerRequest(f"{number}/{place}", prompt, component("sampler", sampler), longest, stop)
            for place, prompt in enumerate(prompts) for number, (sampler, longest, stop) in enumerate(SETTINGS)]


def drawn(engine: LoadedEngine, requests: list[AnswerRequest]) -> dict[str, tuple]:
    return {each.id: (each.text, each.tokens, each.log_p, each.log_q, each.finish_reason, requests[each.prompt].id)
            for each in engine.stream_each(requests, seed=2)}


@pytest.mark.parametrize("mixes", [True, False])
def test_requests_with_other_settings_get_what_they_get_alone(engine, started, monkeypatch, mixes):
    monkeypatch.setattr(Slots, "mixes_stops", mixes)
    together = drawn(engine, asked())
    sets = list(dict.fromkeys(stop for _, _, stop in SETTINGS))
    assert started == ([[]] if mixes else [list(stop) for stop in sets])
    alone = {}
    for request in asked():
        (sample,) = engine.stream({request.id: request.prompt.tolist()}, sampler=request.sampler, seed=2,
                                  max_new_tokens=request.max_new_tokens, stop=request.stop)
        alone[request.id] = (sample.text, sample.tokens, sample.log_p, sample.log_q, sample.finish_reason, request.id)
    assert together == alone
    assert {found[4] for found in together.values()} >= {"stop_string", "length"}


def test_an_engine_has_a_limited_number_of_sets(engine, started, monkeypatch):
    monkeypatch.setattr(workers, "MOST_SETS", 3)
    assert len(drawn(engine, asked())) == 2 * len(SETTINGS)
    assert len(started) == 2


def test_settings_that_do_not_fit_together_are_refused(engine):
    request = AnswerRequest("a", np.arange(5, 9), components("sampler")["power_mh"].cls(num_blocks=16), 4, ())
    with pytest.raises(UserError, match=r"sampler\.num_blocks: given 16"):
        drawn(engine, [request])
