"""engine=api: identity, what it refuses, its audit and its retries. Its laws are in tests/engine/api/."""

import functools
import json
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import dflash_mcmc as dm
from dflash_mcmc.chains import cost
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.engine import api
from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.engine.api.session import ApiEngine, seed_of
from dflash_mcmc.engine.oracle.tabular import TabularModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process.http import NoReplyError
from dflash_mcmc.rng import Key
from dflash_mcmc.serve import workers
from tests import laws
from tests.cases import quick
from tests.engine.api.standing import Listening, Standing
from tests.engine.api.test_law import TARGET, TOY, drawn, p_value
from tests.refusals import refused

URL = "engine.url=http://127.0.0.1:1/v1"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(api, "_done", set())


def answering(monkeypatch, server: Standing) -> None:
    monkeypatch.setattr(endpoint, "fetch_json", server.fetch)


def test_server_model_and_tokenizer_are_the_identity_and_no_weight_is(make_config, monkeypatch, tmp_path):
    answering(monkeypatch, Standing(TOY))
    identity = identity_of(make_config("engine=api", URL))
    assert identity["engine.content"] == "vllm toy"
    assert {key for key in identity if key.startswith("engine")} == {
        "engine", "engine.content", "engine.logprobs", "engine.body", "engine.audit"}
    assert identity["model.dtype"] is None
    assert identity["model.content"] != identity_of(make_config())["model.content"]
    for override in ("engine.url=http://127.0.0.1:2/v1", "engine.timeout_seconds=3", "model.dtype=bfloat16",
                     "engine.model=toy"):
        assert identity_of(make_config("engine=api", URL, override)) == identity, override
    assert identity_of(make_config("engine=api", URL, "engine.audit=false")) != identity
    answering(monkeypatch, Standing(TOY, kind="llamacpp"))
    assert identity_of(make_config("engine=api", URL)) != identity


REFUSED = {
    ("engine.url=null",): "engine.url: given None; allowed: an http(s) URL without user, password",
    ("engine.url=http://me:secret@host/v1",): "engine.url: given 'a URL with a user or a query'; allowed: an http(s) URL",
    ("decoder=speculative_match", "draft=ngram"): "draft: given 'ngram'; allowed: none with engine=api, or engine=slots",
    ("blend=layer",): "blend: given 'layer'; allowed: none with engine=api, or engine=slots, which reads layers",
    ("sampler=draft_mh", "draft=tiny"): "draft: given 'dflash'; allowed: none with engine=api, or engine=slots",
    ("sampler=draft_mh",): "sampler: given 'draft_mh'; allowed: one without a draft with engine=api, or engine=slots",
    ("probe=layer_rank",): "probe: given 'layer_rank'; allowed: none with engine=api, or engine=slots",
    ("condition=entropy_ps",): "sampler: given 'power_mh'; allowed: one that needs log p of its own tokens alone",
    ("sampler=replica_exchange",): "sampler: given 'replica_exchange'; allowed: one that needs log p of its own tokens alone",
    ("sampler=temperature", "sampler.sampling_mask=true", "sampler.top_k=4"): "sampler: given 'temperature'; allowed: one",
    ("model.rope_scaling={rope_type:yarn,factor:2.0}",): "model.rope_scaling: given {'rope_type': 'yarn', 'factor': 2.0}; "
                                                         "allowed: null with engine=api, or engine=slots: the server's own",
    ("engine.body={seed:1,priority:3,top_p:0.9}",): "engine.body: given 'seed, top_p'; allowed: fields that a request does",
    ("engine.body=3",): "engine.body: given 3; allowed: null, or a mapping",
    ("engine.patience_seconds=0",): "engine.patience_seconds: given 0.0; allowed: a number > 0",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_refuses_in_one_line(make_config, overrides):
    with refused(start=REFUSED[overrides]):
        make_config("engine=api", URL, *overrides)


def started(make_config, monkeypatch, server: Standing, *overrides: str) -> ApiEngine:
    """An engine on a server over 512 tokens, after its audit."""
    answering(monkeypatch, server)
    law = [] if "condition=greedy" in overrides else ["sampler=temperature", "sampler.temperature=1.0"]
    config = make_config("engine=api", URL, "engine.patience_seconds=0.1", *law, *overrides)
    target = config.engine.load(config, "cpu")
    server.text = lambda tokens: target.decode(np.array(tokens))
    engine = config.engine.start(config, target, 16, 4)
    engine.close()
    return engine


WIDE = TabularModel(160, (1,), seed=3, scale=1.5)
HOT = "sampler.temperature=0.5"


@pytest.mark.parametrize(("server", "overrides"), quick([
    ({}, []), ({"kind": "llamacpp", "echoes": False}, []), ({"processed": True}, ["engine.logprobs=processed"]),
    ({"processed": True}, [HOT, "engine.logprobs=processed"]), ({}, ["condition=greedy"]),
    ({"kind": "llamacpp", "echoes": False}, [HOT, "sampler.top_k=20", "engine.logprobs=top"])],
    ({"processed": True}, [HOT, "engine.logprobs=processed"])), ids=str)
def test_an_honest_server_passes_its_audit(make_config, monkeypatch, server, overrides):
    started(make_config, monkeypatch, Standing(WIDE, **server), *overrides)


def zeros(number: int, body: dict, reply: dict) -> dict:
    """Log p 0 of every other token, as of drafted ones."""
    told = reply["choices"][0]["logprobs"]
    if not body.get("echo"):
        told["token_logprobs"] = [0.0 if place % 2 else value for place, value in enumerate(told["token_logprobs"])]
    return reply


def heavier(number: int, body: dict, reply: dict) -> dict:
    """Lists, and log p, of a law that does not sum to 1."""
    told = reply["choices"][0]["logprobs"]
    told["token_logprobs"] = [value and value / 3 for value in told["token_logprobs"]]
    told["top_logprobs"] = [row and {name: value / 3 for name, value in row.items()} for row in told["top_logprobs"]]
    return reply


CUT = "engine.body: given nothing for it; allowed: the field that turns off"
RED = {
    "raw for processed": ({}, [HOT, "engine.logprobs=processed"],
                          "engine.logprobs: given 'processed'; allowed: raw or top: log p of a draw at temperature 2 is that"),
    "processed for lists": ({"kind": "llamacpp", "echoes": False, "processed": True}, [
        HOT, "sampler.top_k=20", "engine.logprobs=top"], "engine.logprobs: given 'top'; allowed: a server that states raw"),
    "processed for raw": ({"processed": True}, [], "engine.logprobs: given 'raw'; allowed: processed: log p of a draw at"),
    "processed, unscored": ({"echoes": False, "processed": True}, [HOT, "engine.logprobs=processed"],
                            "engine.logprobs: given 'processed'; allowed: a server that states raw"),
    "raw of a proposal": ({}, [HOT], "engine.logprobs: given 'raw'; allowed: with draws at temperature 0.5: processed, where"),
    "a top-k of vLLM's": ({"law": {"top_k": 20}}, [], CUT),
    "a top-k of its own": ({"kind": "llamacpp", "echoes": False, "law": {"top_k": 40}}, [], CUT),
    "a min-p of its own": ({"kind": "llamacpp", "echoes": False, "law": {"min_p": 0.05}}, [], CUT),
    "a top-p of SGLang's": ({"processed": True, "law": {"top_p": 0.95}}, ["engine.logprobs=processed"], CUT),
    "a top-k of SGLang's": ({"processed": True, "law": {"top_k": 40}}, ["engine.logprobs=processed"], CUT),
    "no temperature": ({"law": {"temperature": 1.0}}, [], CUT),
    "seeds are ignored": ({"law": {"top_k": 1}}, [], "engine.url: given 'a server whose audit is red'; allowed: a server that "
                          "draws: 8 answers"),
    "log p 0": ({"spoil": zeros}, [], "engine.url: given 'a server whose audit is red'; allowed: a server that gives a token"),
    "no sum of 1": ({"spoil": heavier}, [], "engine.url: given 'a server whose audit is red'; allowed: a server whose "
                    "probabilities of a token's place sum to at most 1"),
    "another tokenizer": ({}, [], "model.path: given "),
    "a larger vocabulary": ({}, [], "model.path: given "),
    "a penalty": ({"kind": "llamacpp"}, ["sampler.frequency_penalty=0.5"], "sampler: given 'a law with a penalty'; allowed"),
    "typical": ({}, ["sampler.typical_p=0.5"], "sampler.typical_p: given 0.5; allowed: 1.0 with this server; or engine=slots"),
}


@pytest.mark.parametrize("fault", quick(RED, "raw for processed"))
def test_a_red_audit_ends_the_run_with_the_field_to_state(make_config, monkeypatch, fault):
    server, overrides, said = RED[fault]
    standing = Standing(TabularModel(520, (1,), seed=3) if fault == "a larger vocabulary" else WIDE, **server)
    if fault == "another tokenizer":
        monkeypatch.setattr(Standing, "text", property(lambda self: lambda tokens: "other words", lambda self, given: None),
                            raising=False)
    with pytest.raises(UserError) as error:
        started(make_config, monkeypatch, standing, *overrides)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_each_address_and_each_body_has_an_audit_of_its_own(make_config, monkeypatch):
    for number, override in enumerate((URL, URL, "engine.body={priority:3}", "engine.url=http://127.0.0.1:2/v1")):
        started(make_config, monkeypatch, server := Standing(WIDE), override)
        assert bool(server.bodies) == (number != 1), override


def test_without_the_audit_the_server_is_believed_and_that_is_said(make_config, monkeypatch, capsys):
    server = Standing(WIDE, law={"top_k": 40})
    started(make_config, monkeypatch, server, "engine.audit=false")
    assert not server.bodies
    assert "engine.audit=false: what the server says of its tokens is believed" in capsys.readouterr().err


def test_a_request_states_what_a_server_would_set_by_itself_and_token_ids_both_ways(monkeypatch):
    for kind, fields in (("vllm", {"repetition_penalty": 1.0, "return_token_ids": True, "stop_token_ids": [2]}),
                         ("llamacpp", {"samplers": ["temperature", "top_k", "top_p", "min_p"], "repeat_penalty": 1.0})):
        answering(monkeypatch, server := Standing(TOY, kind=kind))
        drawn(ApiEngine(TARGET, endpoint.Endpoint(dm.Api(url="http://x/v1", body={"priority": 3})), "raw", 1, 1),
              dm.Temperature(temperature=1.0), chains=1)
        asked = server.bodies[0]
        key = Key(11).fold_in(0).fold_in("token")
        assert asked["seed"] == seed_of(key, 0) != seed_of(key, 1)
        common = {"prompt": [0], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "priority": 3}
        assert {**asked, **common, **fields} == asked
        assert asked.keys() - endpoint.OWN_FIELDS == {"priority"}


def engine_at(url: str, **fields: Any) -> ApiEngine:
    engine = dm.Api(url=url, **{"patience_seconds": 20.0, **fields})
    return ApiEngine(TARGET, endpoint.Endpoint(engine), "raw", 4, 8)


def send(status: int):
    def answer(handler, number: int, sent: bytes) -> bool:
        if number % 3:
            return False
        handler.whole(status, b'{"error": "busy"}')
        return True
    return answer


def half(handler, number: int, sent: bytes) -> bool:
    if number % 3:
        return False
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(sent)))
    handler.end_headers()
    handler.wfile.write(sent[: len(sent) // 2])
    return True


def nothing(handler, number: int, sent: bytes) -> bool:
    return number % 3 == 0


def silence(handler, number: int, sent: bytes) -> bool:
    if number % 10 == 0:
        time.sleep(1.0)
    return False


@pytest.mark.parametrize("answer", [send(429), send(500), send(503), half, nothing, silence],
                         ids=["429", "500", "503", "half", "nothing", "silence"])
def test_faults_that_pass_change_no_sample_and_cost_time_alone(monkeypatch, answer):
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "fetch_json", Standing(TOY).fetch)
        alike = drawn(engine_at("http://x/v1"), dm.Temperature(temperature=1.0), chains=40)
    with Listening(Standing(TOY), answer) as server:
        fields = {"timeout_seconds": 0.5} if answer is silence else {}
        assert drawn(engine_at(server.url, **fields), dm.Temperature(temperature=1.0), chains=40) == alike


@pytest.mark.slow
def test_a_retry_does_not_choose_short_answers(monkeypatch):
    """Long answers are cut off on their first try, as by a proxy with a limit of time. The law stays."""
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 1e-4)
    begun = set()

    def cut_off(number: int, body: dict, reply: dict) -> dict:
        if len(reply["choices"][0]["token_ids"]) > 1 and body["seed"] not in begun:
            begun.add(body["seed"])
            raise NoReplyError("half a reply")
        return reply

    answering(monkeypatch, Standing(TOY, spoil=cut_off))
    found = drawn(engine_at("http://x/v1"), dm.Temperature(temperature=1.0), chains=2_000)
    assert begun
    assert p_value(found, laws.product_law(TOY, 3)) > 1e-4


def test_tokens_past_the_end_are_cut(monkeypatch):
    """Of a server that knows other stop ids."""
    def longer(number: int, body: dict, reply: dict) -> dict:
        (choice,) = reply["choices"]
        if (ids := choice["token_ids"])[-1] == 2 and len(ids) < 3:
            choice["token_ids"] = [*ids, 1]
            choice["logprobs"]["token_logprobs"].append(-1.0)
        return reply

    answering(monkeypatch, Standing(TOY, spoil=longer))
    found = drawn(engine_at("http://x/v1"), dm.Temperature(temperature=1.0), chains=200)
    assert found.keys() <= laws.product_law(TOY, 3).keys()


def test_a_request_that_is_refused_is_not_sent_again(monkeypatch):
    asked = []

    def answer(handler, number: int, sent: bytes) -> bool:
        asked.append(number)
        handler.whole(400, b'{"error": "max_tokens is too large"}')
        return True

    with Listening(Standing(TOY), answer) as server, pytest.raises(UserError) as error:
        drawn(engine_at(server.url), dm.Temperature(temperature=1.0), chains=1)
    assert asked == [1]
    assert str(error.value).startswith(f"engine.url: {server.url} refuses a request with status 400: ")
    assert "max_tokens is too large" in str(error.value)


def test_a_server_that_stays_away_ends_the_run_after_its_patience(monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.05)
    with Listening(Standing(TOY), send(500)) as server:
        engine = engine_at(server.url, patience_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"gives no answer \(.*\); allowed: a server that runs; the same command draws"):
        drawn(engine, dm.Temperature(temperature=1.0), chains=1)
    assert time.monotonic() - started < 10


def test_patience_counts_from_the_first_failure(monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    asked = []

    def answer(handler, number: int, sent: bytes) -> bool:
        asked.append(number)
        time.sleep(0.6 if number == 1 else 0.0)
        return False

    with Listening(Standing(TOY), answer) as server:
        drawn(engine_at(server.url, timeout_seconds=0.3, patience_seconds=0.2), dm.Temperature(temperature=1.0), chains=1)
    assert asked == [1, 2]


def test_an_outage_is_said_once_and_a_busy_server_names_its_models_later(monkeypatch, capsys):
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    standing, models = Standing(TOY), list[float]()

    def fetch(url: str, body: dict | None = None, **options: Any) -> Any:
        if body is None:
            models.append(options["seconds"])
            if len(models) < 3:
                raise NoReplyError("status 429", 429)
        elif len(standing.bodies) < 40 and standing.fetch(url, body):
            raise NoReplyError("status 500", 500)
        return standing.fetch(url, body)

    monkeypatch.setattr(endpoint, "fetch_json", fetch)
    drawn(engine_at("http://x/v1"), dm.Temperature(temperature=1.0), chains=8)
    assert models == [10.0] * 3
    assert capsys.readouterr().err.count("no answer from") == 1


def test_requests_of_chains_that_have_ended_are_not_sent(monkeypatch):
    go, ended = threading.Event(), list[int]()

    def late(number: int, body: dict, reply: dict) -> dict:
        go.wait(60)
        return reply

    answering(monkeypatch, server := Standing(TOY, spoil=late))
    engine = ApiEngine(TARGET, endpoint.Endpoint(dm.Api(url="http://x/v1")), "raw", 1, 8)
    sampler = dm.Temperature(temperature=1.0)
    for done in engine.steps((number, sampler.chain(np.array([0]), 3, Key(number))) for number in range(5)):
        ended += [] if done is None else [done.tag]
        engine.drop({1, 2, 3, 4} if done is None else set())
        if len(ended) == 4:
            go.set()
    engine.close()
    assert ended[-1] == 0
    assert len(server.bodies) == 1


def test_a_law_that_the_server_cannot_give_fails_its_order_alone(make_config, monkeypatch):
    answering(monkeypatch, Standing(WIDE))
    config = make_config("engine=api", URL)
    target = config.engine.load(config, "cpu")
    drawing = workers.Workers(lambda stop: ApiEngine(target, endpoint.Endpoint(config.engine), "raw", 2, 4), False, dm.Api, 8)
    orders = [workers.Order(functools.partial(dm.Temperature(temperature=temperature).chain, np.array([0]), 3, Key(1)), (),
                            Future()) for temperature in (1.0, 0.5, 1.0)]
    drawing.order(orders)
    drawing.begin(())
    with pytest.raises(UserError, match=r"engine.logprobs: given 'raw'; allowed: with draws at"):
        orders[1].future.result(60)
    assert all(orders[number].future.result(60).result.trajectory.length for number in (0, 2))
    assert not drawing.failing
    drawing.close(60)


def spoiled(**fields: Any):
    def spoil(number: int, body: dict, reply: dict) -> dict:
        choice = reply["choices"][0]
        for name, value in fields.items():
            place = choice["logprobs"] if name == "token_logprobs" else choice
            place[name] = value(place[name])
        return reply
    return spoil


@pytest.mark.parametrize(("spoil", "said"), [
    (spoiled(token_logprobs=lambda values: [float("nan")] * len(values)), "log probabilities that are no numbers up to 0"),
    (spoiled(token_logprobs=lambda values: [0.5] * len(values)), "log probabilities that are no numbers up to 0"),
    (spoiled(token_logprobs=lambda values: values[:-1]), "log probabilities for at most 3 tokens"),
    (spoiled(token_ids=lambda ids: [7] * len(ids)), "token id 7, which model.path does not know"),
    (spoiled(token_ids=lambda ids: [-1] * len(ids)), "token id"),
    (spoiled(token_ids=lambda ids: ["a"] * len(ids)), "log probabilities for at most 3 tokens"),
    (lambda number, body, reply: {"choices": []}, "a reply without tokens and log probabilities"),
    (lambda number, body, reply: {"object": "nothing"}, "a reply without tokens and log probabilities")])
def test_a_reply_that_cannot_be_fails_its_chain_alone(monkeypatch, spoil, said):
    """After a few tries: the others go on."""
    def once(number: int, body: dict, reply: dict) -> dict:
        return spoil(number, body, reply) if body["seed"] == bad else reply

    bad = seed_of(Key(11).fold_in(1).fold_in("token"), 0)
    answering(monkeypatch, Standing(TOY, spoil=once))
    engine = engine_at("http://x/v1")
    sampler = dm.Temperature(temperature=1.0)
    done = {each.tag: each for each in engine.run(
        (number, sampler.chain(np.array([0]), 3, Key(11).fold_in(number))) for number in range(3))}
    engine.close()
    assert [number for number, each in sorted(done.items()) if each.result is None] == [1]
    assert done[1].failure.startswith("the server gave ")
    assert said in done[1].failure


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda choice: {**choice, "token_ids": choice["token_ids"][:-1], "logprobs": {
        name: values[:-1] for name, values in choice["logprobs"].items()}}, "is no stop id of model.path's files"),
    (lambda choice: {**choice, "finish_reason": "length", "token_ids": [0], "logprobs": {
        **choice["logprobs"], "token_logprobs": [-0.1]}}, "its context is full")], ids=["no stop id", "length"])
def test_an_answer_whose_end_is_missing_is_refused(monkeypatch, spoil, said):
    def changed(number: int, body: dict, reply: dict) -> dict:
        (choice,) = reply["choices"]
        return {"choices": [spoil(choice) if len(choice["token_ids"]) == 2 else choice]}

    answering(monkeypatch, Standing(TOY, spoil=changed))
    with pytest.raises(endpoint.Refusal, match=f"the server ended an answer after 1 of 3 tokens, and .*{said}"):
        drawn(engine_at("http://x/v1"), dm.Temperature(temperature=1.0), chains=50)


def test_the_key_is_sent_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret-123")
    heard = []

    def answer(handler, number: int, sent: bytes) -> bool:
        heard.append(handler.headers["Authorization"])
        handler.whole(401, json.dumps({"error": f"wrong key {heard[0]}"}).encode())
        return True

    with Listening(Standing(TOY), answer) as server, pytest.raises(UserError) as error:
        drawn(engine_at(server.url, api_key_env="SOME_KEY"), dm.Temperature(temperature=1.0), chains=1)
    assert heard == ["Bearer sk-secret-123"]
    assert "wrong key Bearer [key]" in str(error.value)
    assert "secret" not in str(error.value)
    with pytest.raises(UserError, match=r"engine.api_key_env: given 'NO_SUCH_KEY'; allowed: a variable of the environment"):
        engine_at("http://127.0.0.1:1/v1", api_key_env="NO_SUCH_KEY")


def test_costs_are_those_of_a_server_with_a_cache_of_prefixes(make_config, monkeypatch):
    """The prompt once, each token of a proposal, and each token that is scored again. A plan assumes none that is skipped."""
    sampler = dm.PowerMH(alpha=2.0, proposal_temperature=0.5, num_blocks=1, num_steps=2)
    for server, fields, times in (({"processed": True}, {"logprobs": "processed"}, 2), ({"kind": "llamacpp"}, {
            "logprobs": "top"}, 1)):
        answering(monkeypatch, Standing(TOY, **server))
        engine = ApiEngine(TARGET, endpoint.Endpoint(dm.Api(url="http://x/v1", **fields)), fields["logprobs"], 1, 1)
        (done,) = engine.run([("", sampler.chain(np.array([0, 1, 0]), 3, Key(5)))])
        engine.close()
        trace = done.result.trace
        drawn_tokens = trace[0]["length"] + sum(entry["proposal_length"] - entry["cut"] for entry in trace)
        assert done.cost.tokens_drawn == drawn_tokens
        assert done.cost.token_forwards == 2 + times * drawn_tokens
        assert done.cost.prompt_forwards == 2
    with_skips, without = (cost.token_forwards(make_config("condition=ps", *more)) for more in ((), ("engine=api", URL)))
    assert without > with_skips


def test_a_law_that_scores_is_p_itself_or_the_most_likely_token(monkeypatch):
    answering(monkeypatch, Standing(TOY))
    values, best = endpoint.Endpoint(dm.Api(url="http://x/v1")).scored(np.array([0, 1, 0, 2]), 3, top=True)
    law = Standing(TOY).probabilities
    expected = [(law(prefix)[token], max(law(prefix), key=law(prefix).get) == token)
                for prefix, token in (((0,), 1), ((0, 1), 0), ((0, 1, 0), 2))]
    np.testing.assert_allclose(np.exp(values), [p for p, _ in expected])
    assert best.tolist() == [is_best for _, is_best in expected]
    assert SamplingParams() == SamplingParams(temperature=1.0)
