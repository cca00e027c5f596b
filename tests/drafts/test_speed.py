"""`drafts speed`: tau of each number of drafted tokens, and what the times of steps say."""

import json

import numpy as np
import pytest

from dflash_mcmc.chains import build
from dflash_mcmc.drafts import check
from dflash_mcmc.drafts.__main__ import configured, main
from dflash_mcmc.drafts.check import Pace, shown_paces
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.speculative.steps import Tracer

FEW = ("model=tiny", "dataset=arith", "dataset.limit=3", "dataset.max_new_tokens=24", "hardware.device=cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "counts"), [("tiny", [1, 3, 7]), ("tiny_dspark", [7]), ("self", [1, 3, 4])])
def test_tau_is_that_of_the_same_answers_for_each_number_of_drafted_tokens(draft, counts, tmp_path):
    config, _ = configured([*FEW, f"draft={draft}", f"paths.outputs={tmp_path}"], "speed")
    paces = check.measure(config)
    assert [pace.num_drafted for pace in paces] == counts * 2
    assert [pace.temperature for pace in paces] == [0.0] * len(counts) + [1.0] * len(counts)
    model = config.model.load("cpu")
    drafter = config.draft.load(model)
    walks = check.draw(config, model, drafter, build.prompts(config, model, config.dataset.problems()), 0.0)
    greedy = next(pace for pace in paces if pace.num_drafted == drafter.num_drafted)
    assert greedy.tau == pytest.approx(np.mean([gained for walk in walks for gained in walk.gained]))
    assert all(1.0 <= pace.tau <= pace.num_drafted + 1 and pace.break_even > 0.0 for pace in paces)


def test_break_even_is_the_time_of_a_block_over_that_of_a_plain_step(monkeypatch, capsys, tmp_path):
    times = iter([([1, 1], 2.0), ([2, 4], 3.0), ([1, 1], 4.0), ([1, 2], 8.0)])
    monkeypatch.setattr(check, "_timed", lambda *given: next(times))
    with pytest.raises(SystemExit, match="0"):
        main(["speed", *FEW, "draft=tiny_dspark", f"--out={tmp_path}"])
    assert json.loads((tmp_path / "speed.json").read_text()) == [
        {"temperature": 0.0, "num_drafted": 7, "tau": 3.0, "break_even": 1.5, "accepted": [1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]},
        {"temperature": 1.0, "num_drafted": 7, "tau": 1.5, "break_even": 2.0, "accepted": [0.5, *[0.0] * 6]}]
    said = capsys.readouterr().out
    assert "temperature 0: speculate, 2.00 times as fast as plain decoding (7 drafted tokens, tau 3.00, break-even" in said
    assert "temperature 1: do not speculate (decoder=plain): the best block has 0.75 times" in said


def test_equal_rates_are_no_reason_to_speculate():
    assert "do not speculate" in shown_paces([Pace(1.0, 4, 2.0, 2.0, ())])


@pytest.mark.slow
def test_blocks_are_timed_without_the_trace_that_counts_their_tokens(monkeypatch):
    config, _ = configured([*FEW, "draft=tiny", "decoder.trace=false"], "speed")
    model, events, keep, reset = config.model.load("cpu"), [], Tracer.keep, BatchedEngine.reset_counters
    monkeypatch.setattr(Tracer, "keep", lambda self, slots: events.append("kept") or keep(self, slots))
    monkeypatch.setattr(BatchedEngine, "reset_counters", lambda self: events.append("turn") or reset(self))
    drafter, prompts = config.draft.load(model), build.prompts(config, model, config.dataset.problems())
    gained, seconds = check._timed(config, model, prompts, 0.0, lambda: events.append("answer"), drafter)
    assert events.count("kept") >= len(gained) / len(prompts)
    assert events[events.index("turn", 1):] == 2 * ["turn", *["answer"] * len(prompts)]  # the first turn has the trace
    assert np.mean(gained) > 2
    assert seconds > 0
