"""`drafts speed`: tau of each number of drafted tokens, and what the times of steps say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash_mcmc.chains import build
from dflash_mcmc.drafts import check, speed
from dflash_mcmc.drafts.__main__ import configured, main
from dflash_mcmc.drafts.speed import Pace, Times, advice, of_trace, pace_of
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.speculative.speculator import Tracer
from tests.refusals import refused

FEW = ("model=tiny", "dataset=arith", "dataset.limit=3", "dataset.max_new_tokens=24", "hardware.device=cpu")


@pytest.mark.parametrize(("draft", "counts"), [("tiny", [1, 3, 7]), ("tiny_dspark", [7]), ("self", [1, 3, 4])])
def test_tau_is_that_of_the_same_answers_for_each_number_of_drafted_tokens(draft, counts, tmp_path):
    config, _ = configured([*FEW, f"draft={draft}", f"paths.outputs={tmp_path}"], "speed")
    paces = speed.measure(config)
    assert [pace.num_drafted for pace in paces] == counts * 2
    assert [pace.temperature for pace in paces] == [0.0] * len(counts) + [1.0] * len(counts)
    model = config.model.load("cpu")
    drafter = config.draft.load(model)
    walks = check.draw(config, model, drafter, build.prompts(config, model, config.dataset.problems()), 0.0, "greedy")
    greedy = next(pace for pace in paces if pace.num_drafted == drafter.num_drafted)
    assert greedy.tau == pytest.approx(np.mean([gained for walk in walks for gained in walk.gained]))
    assert all(1.0 <= pace.tau <= pace.num_drafted + 1 and pace.break_even > 0.0 for pace in paces)


def test_break_even_is_the_time_of_a_block_over_that_of_a_plain_step(monkeypatch, capsys, tmp_path):
    times = iter([([1, 1], 2.0), ([2, 4], 3.0), ([1, 1], 4.0), ([1, 2], 8.0)])
    monkeypatch.setattr(speed, "_timed", lambda *given: next(times))
    with pytest.raises(SystemExit, match="0"):
        main(["speed", *FEW, "draft=tiny_dspark", f"--out={tmp_path}"])
    assert json.loads((tmp_path / "speed.json").read_text()) == [
        {"temperature": 0.0, "num_drafted": 7, "tau": 3.0, "break_even": 1.5, "accepted": [1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]},
        {"temperature": 1.0, "num_drafted": 7, "tau": 1.5, "break_even": 2.0, "accepted": [0.5, *[0.0] * 6]}]
    said = capsys.readouterr().out
    assert "temperature 0: speculate, 2.00 times as fast as plain decoding (7 drafted tokens, tau 3.00, break-even" in said
    assert "temperature 1: do not speculate (decoder=plain): the best block has 0.75 times" in said


def test_equal_rates_are_no_reason_to_speculate():
    assert "do not speculate" in advice(Pace(1.0, 4, 2.0, 2.0, ()))


def test_blocks_are_timed_without_the_trace_that_counts_their_tokens(monkeypatch):
    config, _ = configured([*FEW, "draft=tiny", "decoder.trace=false"], "speed")
    model, events, keep, reset = config.model.load("cpu"), [], Tracer.keep, BatchedEngine.reset_counters
    monkeypatch.setattr(Tracer, "keep", lambda self, slots: events.append("kept") or keep(self, slots))
    monkeypatch.setattr(BatchedEngine, "reset_counters", lambda self: events.append("turn") or reset(self))
    drafter, prompts = config.draft.load(model), build.prompts(config, model, config.dataset.problems())
    gained, seconds = speed._timed(config, model, prompts, 0.0, lambda: events.append("answer"), drafter)
    assert events.count("kept") >= len(gained) / len(prompts)
    assert events[events.index("turn"):] == 2 * ["turn", *["answer"] * len(prompts)]
    assert np.mean(gained) > 2
    assert seconds > 0


def traced(folder, *lines, **times):
    path = folder / "steps.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return of_trace(path, Times(**times))


STEPS = [(3, 3), (3, 1), (0, 0), (1, 0), (3, 1)]
WANTED = [pace_of(None, 1, [1], None), pace_of(None, 3, [4, 2, 2], None)]
VLLM = [{"metrics": {"speculative_decoding": {"per_step_drafted": [3, 3, 0, 1], "per_step_accepted": [3, 1, 0, 0]}}},
        {"metrics": {"speculative_decoding": {"acceptance_histogram_by_draft_length": {"3": [0, 1, 0, 0]}}}}]
SGLANG = [{"meta_info": {"spec_verify_ct": 3, "spec_draft_token_num": 9, "spec_accept_histogram": [0, 2, 0, 1]}},
          {"meta_info": {"spec_verify_ct": 1, "spec_num_proposed_drafts": 1, "spec_correct_drafts_histogram": [1]}}]


def test_a_step_is_the_same_in_every_format(tmp_path):
    own = [{"drafted": drafted, "accepted": accepted} for drafted, accepted in STEPS]
    assert WANTED[1] == Pace(None, 3, 8 / 3, None, (1.0, 1 / 3, 1 / 3))
    for lines in (own, VLLM, SGLANG, [*VLLM[:1], own[4], "", *own[2:3]]):
        assert sorted(traced(tmp_path, *lines)) == WANTED


def test_break_even_of_a_trace_is_the_time_of_its_blocks_over_that_of_its_plain_steps(tmp_path):
    timed = [{"drafted": 3, "accepted": 1, "draft_ms": 2.0, "verify_ms": 20.0},
             {"drafted": 3, "accepted": 3, "verify_ms": 26.0}]
    plain = [{"drafted": 0, "accepted": 0, "verify_ms": ms} for ms in (8.0, 12.0)]
    assert traced(tmp_path, *timed, *plain, draft_ms=4.0)[0].break_even == pytest.approx((3.0 + 23.0) / 10.0)
    assert traced(tmp_path, *timed, draft_ms=4.0, plain_ms=13.0)[0].gain == pytest.approx(3.0 / 2.0)
    unknown = traced(tmp_path, *timed, *plain)
    assert unknown[0].break_even is None
    assert speed.text(unknown).splitlines()[-1].startswith(
        "speculate where a step with a block takes less than 3.00 times as long as a plain step (3 drafted tokens, tau 3.00)")


@pytest.mark.parametrize(("line", "says"), [
    ("{", "line 1: given '{'; allowed: a JSON object"),
    ({"accepted": 1}, "line 1: given ['accepted']; allowed: drafted and accepted; metrics.speculative_decoding; or meta_info"),
    ({"drafted": 2, "accepted": 3}, "line 1: accepted: given 3; allowed: a whole number from 0 to 2"),
    ({"drafted": True, "accepted": 0}, "line 1: drafted: given True; allowed: a whole number"),
    ({"drafted": 2}, "line 1: accepted: given None; allowed"),
    ({"drafted": 2, "accepted": 1, "verify_ms": 0}, "line 1: verify_ms: given 0; allowed: milliseconds, a number above 0"),
    ({"drafted": 2, "accepted": 1, "draft_ms": -1}, "line 1: draft_ms: given -1; allowed: milliseconds, a number from 0 on"),
    ({"drafted": 0, "accepted": 0}, "without a block"),
    ({"metrics": {"speculative_decoding": {"per_step_drafted": [3], "per_step_accepted": []}}},
     "metrics.speculative_decoding.per_step_accepted: given []; allowed: a list of 1 counts"),
    ({"metrics": {"speculative_decoding": {"mean_acceptance_length": 2.0}}}, "allowed: per_step_drafted and per_step_acc"),
    ({"metrics": {"speculative_decoding": {"acceptance_histogram_by_draft_length": {"1": [0, 1, 1]}}}},
     "allowed: a list of 2 counts of steps"),
    ({"meta_info": {"spec_verify_ct": 2, "spec_draft_token_num": 5, "spec_accept_histogram": [1, 1]}},
     "meta_info.spec_draft_token_num: given 5; allowed: a multiple of spec_verify_ct (2)"),
    ({"meta_info": {"spec_verify_ct": 2, "spec_draft_token_num": 4, "spec_accept_histogram": [1]}},
     "meta_info.spec_accept_histogram: given [1]; allowed: counts of 2 steps"),
])
def test_a_wrong_line_of_a_trace_is_named(line, says, tmp_path):
    with refused(says, start="--trace: "):
        traced(tmp_path, line)


def test_a_trace_needs_no_model(tmp_path, capsys):
    (tmp_path / "steps.jsonl").write_text('{"drafted": 1, "accepted": 1}\n')
    with pytest.raises(SystemExit, match="0"):
        main(["speed", f"--trace={tmp_path / 'steps.jsonl'}", "--draft-ms=0", "--verify-ms=3", "--plain-ms=2",
              f"--out={tmp_path / 'out'}"])
    assert capsys.readouterr().out.splitlines()[-3].startswith("speculate, 1.33 times as fast as plain decoding (1 drafted")
    assert json.loads((tmp_path / "out/speed.json").read_text()) == [
        {"temperature": None, "num_drafted": 1, "tau": 2.0, "break_even": 1.5, "accepted": [1.0]}]


@pytest.mark.parametrize(("given", "says"), [
    (["--trace=absent.jsonl"], "--trace: given 'absent.jsonl': No such file"), (["--trace=x", "model=tiny"], "model=tiny"),
    (["--trace=x", "--plain-ms=0"], "--plain-ms: given 0.0; allowed: milliseconds, a number above 0"),
    (["--plain-ms=3"], "--plain-ms=3: not an option")])
def test_wrong_options_of_a_trace_are_one_line(given, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["speed", *given])
    assert says in capsys.readouterr().err
