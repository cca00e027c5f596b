"""Orders with other stop strings: in one batch where the engine can, in rounds where it cannot, with the same answers."""

from concurrent.futures import Future

import numpy as np
import pytest

from dflash_mcmc.api.choices import turn_of
from dflash_mcmc.engine.slots import Slots
from dflash_mcmc.rng import Key
from dflash_mcmc.serve import workers
from dflash_mcmc.serve.options import ServeOptions
from tests.composing import composed

STOPS = ((), ("nswer",), ("12", "boxed"), (), ("nswer",), ("=", "60"))
QUESTION = "Lena has 12 red pens and 9 blue pens. How many pens does she have?"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Answers that are asked for at once, and how often an engine was started: answers(mixes=True)."""
    starts, start = [], Slots.start
    monkeypatch.setattr(Slots, "start", lambda *arguments: starts.append(1) or start(*arguments))

    def answers(mixes: bool, most_sets: int = 64) -> tuple[list[workers.DrawnAnswer], int]:
        monkeypatch.setattr(Slots, "mixes_stops", mixes)
        monkeypatch.setattr(workers, "MOST_SETS", most_sets)
        starts.clear()
        config = composed(tmp_path, "condition=temp", "dataset.max_new_tokens=24", "hardware.num_slots=4")
        target, drawing, _ = workers.started(config, ServeOptions(max_waiting=16))
        prompt = np.array(target.encode(config.model.prompt(target.tokenizer, QUESTION)))
        orders = [workers.Order(lambda number=number: config.sampler.chain(prompt, 24, Key(number)), stop, Future())
                  for number, stop in enumerate(STOPS)]
        with turn_of(target.decoder).taken(nests=False):  # no order begins before all are there
            drawing.order(orders)
        drawn = [order.future.result(60) for order in orders]
        drawing.close(60)
        assert not drawing.failing
        return drawn, len(starts)

    return answers


@pytest.mark.slow
def test_other_stop_strings_share_the_batch_with_the_answers_of_rounds(answers):
    together, starts = answers(mixes=True)
    assert starts == 1
    rounds, starts = answers(mixes=False)
    assert starts == 6  # one for each set, in the order of arrival
    few, starts = answers(mixes=True, most_sets=2)
    assert starts == 3  # the third set and the fifth order begin with an engine of their own
    for several in (rounds, few):
        assert [each.text for each in several] == [each.text for each in together]
        assert [each.result.trajectory.tokens.tolist() for each in several] == [
            each.result.trajectory.tokens.tolist() for each in together]
        assert [each.finish_reason for each in several] == [each.finish_reason for each in together]
    assert sum(each.finish_reason == "stop_string" for each in together) >= 3
    assert all(string not in each.text for each, stop in zip(together, STOPS, strict=True) for string in stop)
