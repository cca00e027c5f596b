"""Sample and match is not distinguished from plain sampling, faults are, and the measures see what they should see."""

import json

import numpy as np
import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.probe import sampled_verify
from dflash_mcmc.rng import Key
from tests.composing import composed
from tests.probes import measured
from tests.runs import execute

PAIR = ("experiment=sampled_verify", "model=tiny", "draft=tiny", "dataset=arith")
SMALL = ("dataset.limit=10", "dataset.max_new_tokens=12", "num_chains=6", "probe.temperatures=[1.0]", "probe.agent_answer=12",
         "probe.long_tokens=16", "probe.agent_tokens=300", "probe.agent_runs=3", "probe.window_share=0.02",
         "probe.batch_size=100", "hardware.prefill_chunk=64",
         "probe.faults=[greedy_first,finite_window]")
NOISE = 1e-3


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return execute(composed(tmp_path_factory.mktemp("outputs"), *PAIR, *SMALL))


def row(result, table: str, decoder: str) -> dict:
    (found,) = [row for row in result.summary["tables"][table] if row["decoder"] == decoder]
    return found


@pytest.mark.slow
def test_tokens_with_the_same_key_are_those_of_plain_sampling(result):
    assert {mine["workload"]: (mine["equal"], mine["n"]) for mine in result.summary["tables"]["same_key"]} == {
        "short": (60, 60), "long": (10, 10), "agent": (3, 3)}


@pytest.mark.slow
def test_sample_and_match_is_not_flagged(result):
    found = [row(result, table, "speculative_match") for table in ("short", "long", "agent")]
    assert min(mine["histogram_p"] for mine in found) > NOISE
    assert found[0]["first_token_p"] > NOISE
    assert found[1]["distinct_4_p"] > NOISE
    assert found[0]["tokens_per_forward"] > 1.5 > 1.0 > row(result, "short", "plain")["tokens_per_forward"]


@pytest.mark.slow
def test_the_first_token_shows_a_greedy_first_token(result):
    found, plain = row(result, "short", "greedy_first"), row(result, "short", "plain")
    assert found["same_first_token"] == 1.0 > plain["same_first_token"]
    assert found["first_token_p"] < NOISE


@pytest.mark.slow
def test_histograms_show_a_finite_window(result):
    assert row(result, "short", "finite_window")["histogram_p"] < NOISE
    assert row(result, "long", "finite_window")["mean_tokens"] == 16


@pytest.mark.slow
def test_tool_calls_are_not_counted_where_the_template_shows_no_tools(result):
    found = row(result, "agent", "plain")
    assert (found["tool_calls"], found["tool_call_share"], found["n"]) == (None, None, 3)
    assert found["prompt_tokens"] <= 300


@pytest.mark.slow
def test_a_record_depends_on_its_unit_alone(tmp_path):
    few = (*SMALL, "dataset.limit=1", "probe.faults=[greedy_walk]", "probe.agent_answer=4", "probe.long_tokens=4")
    together, alone = (measured(composed(tmp_path, *PAIR, *few, "num_chains=1", "probe.agent_runs=1",
                                         f"probe.batch_size={size}")) for size in (3, 1))
    for record in (*together, *alone):
        del record["seconds"]
    assert together == alone


def test_repetition():
    assert (sampled_verify.distinct([1, 2, 1, 2, 1], 2), sampled_verify.distinct([1], 2)) == (0.5, 1.0)
    assert [sampled_verify.longest_repeat(mine) for mine in ([1, 2, 3], [1, 2, 3, 1, 2], [5, 5, 5, 5], [])] == [0, 2, 3, 0]
    loop, other = [7, 8, 9] * 40, list(range(100))
    assert sampled_verify.ends_in_loop(other + loop)
    assert not sampled_verify.ends_in_loop(loop + other)
    assert not sampled_verify.ends_in_loop([7] * 99)


@pytest.mark.parametrize(("answer", "right"), [
    ('<tool_call>\n{"name": "read_file", "arguments": {"path": "src/main.py"}}\n</tool_call>', True),
    ('<tool_call>{"name": "delete", "arguments": {"path": "src"}}</tool_call>', False),
    ('<tool_call>{"name": "read_file", "arguments": {}}</tool_call>', False),
    ('<tool_call>{"name": "read_file", "arguments": {"path": "src</tool_call>', False),
    ('<tool_call>{"name": "read_file", "arguments": {"path": "src"}}', False), ("The file has a function.", False)])
def test_tool_calls(answer, right):
    assert sampled_verify.has_call(answer) is right


@pytest.mark.slow
def test_the_agent_prompt_is_as_long_as_in_the_document(shared_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen3_tokenizer")

    def render(messages, tools) -> np.ndarray:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return np.array(tokenizer(text)["input_ids"])

    found, has_tools = sampled_verify.agent_prompt(render, Key(0), 24_000)
    text = tokenizer.decode(found)
    assert 23_900 < len(found) <= 24_000
    assert has_tools
    assert all(json.dumps(tool["function"]["name"]) in text for tool in sampled_verify.TOOLS)


@pytest.mark.parametrize(("given", "message"), [
    (("probe.faults=[greedy]",), r"probe.faults: given \['greedy'\]; allowed: a list of greedy_first"),
    (("probe.faults=[late_penalty]",), r"probe.faults: .* without late_penalty, or a sampler.repetition_penalty"),
    (("probe.temperatures=[0.0]",), r"probe.temperatures: given \[0.0\]; allowed: a list of numbers > 0, none twice"),
    (("sampler=greedy",), r"sampler: given 'greedy'; allowed: .*temperature with probe=sampled_verify"),
    (("draft=none",), r"draft: given 'none'; allowed: a draft, such as tiny .* with probe=sampled_verify")])
def test_what_cannot_be_measured_is_refused(tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        composed(tmp_path, *PAIR, *given)


def test_an_answer_without_room_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"probe.agent_answer: given 1000; allowed: at most \d+ \(the agent's shortest"):
        measured(composed(tmp_path, *PAIR, *SMALL, "probe.agent_answer=1000"))


def test_a_model_without_room_for_the_agent_is_refused(tmp_path, monkeypatch):
    config = composed(tmp_path, *PAIR, *SMALL)
    monkeypatch.setattr(config.model.load("cpu"), "max_positions", 80)
    with pytest.raises(UserError, match=r"probe.agent_runs: given 3; allowed: 0, or a model with more positions \("):
        measured(config)


def test_the_cost_stops_at_the_positions_of_the_model(tmp_path):
    """The embedded model has 1,024 positions: 12 of them for the agent's answer, 40 for the prompt of a long generation."""
    config, fits = (composed(tmp_path, *PAIR, *SMALL, "assumed.prompt_length=40", f"probe.agent_tokens={agent}",
                             f"probe.long_tokens={long}") for agent, long in ((24_000, 1200), (1012, 984)))
    assert config.probe.expected_cost(config) == fits.probe.expected_cost(fits)


def test_the_experiment_has_the_setting_of_the_document(make_config, shared_data):
    config = make_config("experiment=sampled_verify", f"dataset.path={shared_data}/math500/test.jsonl")
    assert (config.model.path, config.draft.path) == ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16")
    assert config.dataset.num_chosen() * config.num_chains == 150
    assert (config.probe.long_tokens, config.probe.agent_tokens, config.probe.agent_runs) == (1200, 24_000, 12)
    assert (min(config.probe.temperatures), max(config.probe.temperatures)) == (0.7, 1.0)
