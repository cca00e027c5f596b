"""What engines promise besides the law: pairs of texts, and a server with and without mistakes."""

import copy
import json
from typing import Any

import numpy as np
import pytest

import dflash_mcmc as dm
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process.http import NoReplyError
from dflash_mcmc.verify import __main__ as program, behaviour, drawn
from tests.serving import Served
from tests.verify.test_verify import connected, told

LAW = SamplingParams(temperature=1.3)
PROMPT = np.array([5, 17, 200, 31])


@pytest.fixture(scope="module")
def tiny():
    return dm.component("model", "tiny").load("cpu")


def arguments(url: str, tmp_path) -> list[str]:
    return [url, "model=tiny", "dataset=arith", "dataset.limit=3", "num_chains=2", "dataset.max_new_tokens=24",
            "sampler.temperature=1.3", f"paths.outputs={tmp_path}"]


@pytest.fixture(scope="module")
def answers(tiny, tmp_path_factory) -> dict[str, Any]:
    """What this package's server answers, with speculation."""
    folder = tmp_path_factory.mktemp("answers")
    with Served(["model=tiny", "draft=tiny", "decoder=speculative_match", "sampler=temperature", "serve.port=0",
                 "dataset.max_new_tokens=24", "hardware.num_slots=8"]) as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        config = program._stated(arguments(url, folder)[1:])
        server = drawn.connected(url)
        asked = behaviour.ask(server, config, tiny, LAW, folder / "behaviour.jsonl")
        kept = (folder / "behaviour.jsonl").read_text().splitlines(keepends=True)
        (folder / "behaviour.jsonl").write_text("".join(kept[:9]) + kept[9][:20])  # as a killed audit leaves it
        assert behaviour.ask(server, config, tiny, LAW, folder / "behaviour.jsonl") == asked
        assert (folder / "behaviour.jsonl").read_text().splitlines() == [line.strip() for line in kept]
    return asked


def test_kept_answers_of_other_requests_are_asked_for_again(tiny, tmp_path, monkeypatch):
    asked: list[dict[str, Any]] = []
    server = connected(monkeypatch, lambda body: asked.append(body) or [
        {"token_ids": [int(body["temperature"] * 10)] * 4, "text": "abcdefgh"}])
    config, file = program._stated(["model=tiny", "dataset=arith", "dataset.limit=3"]), tmp_path / "behaviour.jsonl"
    file.write_text(json.dumps({"request": "alone 0", "answer": "of a version that did not store requests"}) + "\n")
    for temperature, count in ((1.0, 25), (1.5, 19), (1.0, 0)):  # 6 requests are those of temperature 0
        asked.clear()
        answers = behaviour.ask(server, config, tiny, SamplingParams(temperature=temperature), file)
        assert answers["alone 0"][0]["ids"] == [int(10 * temperature)] * 4
        assert len(asked) == count


def outcomes(tiny, answers: dict[str, Any], law: SamplingParams = LAW) -> dict[str, tuple[str, str]]:
    return {check: (outcome, says) for check, outcome, says in behaviour.judge(tiny, answers, law, 0.05)}


@pytest.mark.slow
def test_our_server_keeps_its_promises(tiny, answers):
    found = outcomes(tiny, answers)
    assert {outcome for outcome, _ in found.values()} == {"right"}, found
    assert len(found) == 8
    assert found["log p"][1].startswith("raw, within")
    assert found["stop strings"][1] == "3 texts end before theirs"
    assert found["max_tokens"][1] == "3 answers keep to it"
    assert found["n"][1] == "3 answers"


def spoiled(answers: dict[str, Any], request: str, **fields: Any) -> dict[str, Any]:
    """The answers with fields of a request's first choice changed."""
    changed = copy.deepcopy(answers)
    changed[request][0].update(fields)
    return changed


@pytest.mark.slow
def test_each_mistake_of_a_server_is_wrong_and_is_named(tiny, answers):
    alone = answers["alone 0"][0]
    values = answers["logprobs 0"][0]["logprobs"]
    greedy = answers["greedy 1"][0]["ids"]
    worst = [*greedy[:3], 77 if greedy[3] != 77 else 78, *greedy[4:]]
    stop = next(iter(tiny.stop_ids))
    for check, changed, says in (
            ("max_tokens", spoiled(answers, "max_tokens 0", ids=alone["ids"]), f"{len(alone['ids'])} tokens for max_tokens="),
            ("stop strings", spoiled(answers, "stop 1", text=answers["alone 1"][0]["text"]), "its stop string"),
            ("stop ids", spoiled(answers, "again 2", ids=[stop, 17]), f"tokens follow the stop id {stop}"),
            ("log p", spoiled(answers, "logprobs 0", logprobs=[value - 0.3 for value in values]), "off by "),
            ("log p", spoiled(answers, "logprobs 0", logprobs=values[:-1]), f"{len(values) - 1} values for {len(values)} "),
            ("log p", spoiled(answers, "logprobs 0", logprobs=[]), f"0 values for {len(values)} tokens"),
            ("n", answers | {"n 0": answers["n 0"][:1]}, "1 answers for n=3"),
            ("n", answers | {"n 0": 3 * answers["n 0"][:1]}, "all 3 answers are equal"),
            ("temperature 0, alone and in a batch", spoiled(answers, "greedy together 1", ids=worst), "1 of 3 pairs part")):
        found = outcomes(tiny, changed)
        assert found[check][0] == "wrong", check
        assert says in found[check][1]
        others = {outcome for name, (outcome, _) in found.items() if name != check}
        assert others <= ({"right", "differs"} if check == "stop ids" else {"right"})


@pytest.mark.slow
def test_what_a_server_refuses_is_not_offered_and_other_tokens_differ(tiny, answers):
    refused = {f"logprobs {place}": "refused with 400: no logprobs" for place in range(3)}
    found = outcomes(tiny, {key: value for key, value in answers.items() if not key.startswith("logprobs")} | refused)
    assert found["log p"] == ("not offered", "refused with 400: no logprobs")
    assert outcomes(tiny, answers | {"n 0": "refused with 400: no n"})["n"] == ("not offered", "refused with 400: no n")
    ignored = outcomes(tiny, answers | {f"again {place}": answers["n 0"][1:2] for place in range(3)})
    assert ignored["the same seed again"][0] == "differs"
    assert " of 3 pairs part, " in ignored["the same seed again"][1]


def test_equal_answers_with_n_are_wrong_where_the_law_makes_them_unlikely(tiny, answers):
    equal = answers | {"n 0": 3 * answers["greedy 0"]}
    assert len(equal["n 0"][0]["ids"]) > 8
    for temperature, outcome in ((1.3, "wrong"), (0.01, "right"), (0.0, "right")):
        assert outcomes(tiny, equal, SamplingParams(temperature=temperature))["n"][0] == outcome


def test_processed_log_p_are_told_from_raw_ones(tiny, answers):
    changed = copy.deepcopy(answers)
    for place in range(3):
        (each,) = changed[f"logprobs {place}"]
        text = drawn.DrawnText("", np.array(answers["prompts"][place]), np.array(each["ids"]))
        each["logprobs"] = behaviour.read_text(tiny, text, LAW, None).log_p.tolist()
    assert outcomes(tiny, changed)["log p"][1].startswith("processed, within ")


def test_a_pair_parts_where_it_first_differs_by_the_distance_of_both_tokens(tiny):
    one, other = np.array([40, 41, 42, 43]), np.array([40, 41, 9, 9])
    paid = [behaviour.read_text(tiny, drawn.DrawnText("", PROMPT, ids), SamplingParams(), None).target_log_p[2]
            for ids in (one, other)]
    found = behaviour.compare(tiny, "x", [(PROMPT, one, one), (PROMPT, one, other)], greedy=False)
    assert found.outcome == "differs"
    assert found.says == ("1 of 2 pairs part, 0.14 a token, the first one at token 2; log p of the two tokens differs by at "
                          f"most {abs(paid[0] - paid[1]):.2g} nats (near-ties: 0.1)")
    assert behaviour.compare(tiny, "x", [(PROMPT, one, other)], greedy=True).outcome == "wrong"
    shorter = behaviour.compare(tiny, "x", [(PROMPT, one, one[:2])], greedy=True)
    assert (shorter.outcome, shorter.says.split(",")[2]) == ("wrong", " the first one at token 2; log p of the two tokens "
                                                             "differs by at most 0 nats (near-ties: 0.1); 1 answers are the "
                                                             "beginning of the other one")
    assert behaviour.compare(tiny, "x", [(PROMPT, one, one[:2])], greedy=False).outcome == "differs"
    assert behaviour.compare(tiny, "x", [(PROMPT, one, one)], greedy=True) == ("x", "right", "all 1 pairs are equal, 4 tokens")


@pytest.mark.slow
def test_two_files_are_compared_line_by_line(tmp_path, capsys):
    rows = [{"prompt_ids": PROMPT.tolist(), "ids": ids} for ids in ([40, 41, 42], [12, 9, 77])]
    for name, own in (("one", rows), ("other", [rows[0], rows[1] | {"ids": [12, 9, 5]}, *rows]),
                      ("apart", [rows[0] | {"prompt_ids": [7]}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    common = [str(tmp_path / "one.jsonl"), "model=tiny", f"paths.outputs={tmp_path}", "--against"]
    _, out, _ = told([*common, str(tmp_path / "other.jsonl")], capsys)
    assert "1 of 2 pairs part, 0.17 a token, the first one at token 2" in out
    assert "; 2 texts have no partner" in out
    (found,) = json.loads((tmp_path / "verify" / "one.jsonl" / "verify.json").read_text())["behaviour"]
    assert found["outcome"] == "differs"
    code, _, err = told([*common, str(tmp_path / "apart.jsonl")], capsys)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert err.startswith(f"error: --against: given '{tmp_path / 'apart.jsonl'}"[:60])
    assert "no text has a partner in it" in err
    assert told([*common, "nowhere"], capsys)[2].startswith("error: nowhere: cannot be read: ")


def test_a_server_that_limits_requests_is_one_line_and_its_answers_are_kept(tiny, tmp_path, monkeypatch):
    """The fourth request is refused with 429; another one with 400 is an answer."""
    config, asked = program._stated(arguments("", tmp_path)[1:]), []

    def choices(body: dict[str, Any]) -> list[dict[str, Any]]:
        asked.append(body)
        if len(asked) in (2, 4):
            raise NoReplyError("refused", 400 if len(asked) == 2 else 429)
        return [{"token_ids": [40, 41], "text": "ab"}]

    monkeypatch.setattr(drawn, "_PATIENCE", 0.1)
    server = connected(monkeypatch, choices)
    with pytest.raises(UserError, match="gives no answer"):
        behaviour.ask(server, config, tiny, LAW, tmp_path / "kept.jsonl")
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [row["request"] for row in kept] == ["alone 0", "alone 1", "alone 2"]
    assert kept[1]["answer"].startswith("TARGET: http://server/v1 refuses a request with refused; allowed: ")
    found = behaviour.ask(server, config, tiny, LAW, tmp_path / "kept.jsonl")
    assert found["alone 1"] == kept[1]["answer"]
    assert found["greedy together 2"][0]["ids"] == [40, 41]
