"""A server on a port of its own: answers of `dflash_mcmc.sample`, errors of one line, clients that go, keys, a full queue."""

import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

import dflash_mcmc as dm
from dflash_mcmc.api.choices import turn_of
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.serve import options
from dflash_mcmc.serve.__main__ import main
from dflash_mcmc.serve.app import Text, sampler_of
from dflash_mcmc.types import Trajectory
from tests import pages, processes
from tests.cases import quick
from tests.composing import composed
from tests.conftest import ROOT
from tests.serving import Served

if TYPE_CHECKING:
    import openai

QUESTION = "Lena has 12 red pens and 9 blue pens. How many pens does she have?"
KEY = "a-key-of-the-tests"
OVERRIDES = ["condition=ps", "sampler.num_blocks=4", "sampler.num_steps=2", "dataset.max_new_tokens=32",
             "hardware.num_slots=8", "serve.port=0", "serve.max_prompt_tokens=64", "serve.max_waiting=16",
             "serve.max_body_bytes=20000",
             "serve.allowed_hosts=[friend.example]", f"serve.api_key={KEY}"]


class Running(Served):
    """Such a server, with requests to it."""

    def client(self, key: str = KEY) -> "openai.OpenAI":
        import openai

        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=processes.HANG)

    def post(self, body: object, path: str = "/v1/completions", key: str = KEY, **headers: str) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=processes.HANG)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"Authorization": f"Bearer {key}", "Content-Type": "application/json",
                                                    **headers})
            reply = connection.getresponse()
            content = reply.read()
            return reply.status, json.loads(content) if content.startswith(b"{") else {"text": content.decode()}

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=processes.HANG)
        with contextlib.closing(connection):
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    def held(self) -> contextlib.AbstractContextManager:
        """A context in which orders wait: this thread has the turn of the model."""
        return turn_of(self.service._target.decoder).taken(nests=False)

    def wait_until_idle(self) -> None:
        """Waits until the engine has nothing to draw."""
        processes.wait_until(lambda: self.service.workers.counts == (0, 0))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    found = Running(OVERRIDES)
    yield found
    found.stop()


def head_of(length: int) -> bytes:
    """The header of a request whose body has so many bytes."""
    return (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n").encode()


def samples(prompt: object, chat: bool, **changes) -> list[dm.Sample]:
    """What Python draws with the values of OVERRIDES."""
    sampler = dm.PowerMH(**{"num_blocks": 4, "num_steps": 2, **changes.pop("fields", {})})
    model = dm.component("model", "hf", path=dm.component("model", "tiny").path, chat=chat)
    values = {"sampler": sampler, "max_new_tokens": 32, "seed": 5, "progress": False}
    return dm.sample(model, None, [prompt], **{**values, **changes})


@pytest.mark.slow
def test_chat_draws_what_python_draws(running):
    drawn = running.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], n=2, seed=5, logprobs=True)
    mine = samples(QUESTION, chat=True, num_chains=2)
    assert [choice.message.content for choice in drawn.choices] == [sample.text for sample in mine]
    assert [choice.model_extra["dflash_mcmc"]["tokens"] for choice in drawn.choices] == [sample.tokens for sample in mine]
    one, other = (sample.cost for sample in mine)  # they read the prompt together
    assert one.prompt_forwards == other.prompt_forwards > 40
    assert drawn.usage.model_extra["token_forwards"] == one.token_forwards + other.token_forwards - one.prompt_forwards
    assert drawn.usage.completion_tokens == sum(len(sample.tokens) for sample in mine)
    for choice, sample in zip(drawn.choices, mine, strict=True):
        assert sum(token.logprob for token in choice.logprobs.content) == pytest.approx(sample.log_p)
        assert choice.finish_reason == {"stop_id": "stop", "length": "length"}[sample.finish_reason]


def test_completions_take_stop_strings_and_fields_of_the_sampler(running):
    """Several kinds of requests at once: each is drawn as alone."""
    def ask(number: int, stop: list[str] | None, alpha: float) -> str:
        drawn = running.client().completions.create(model="tiny", prompt=QUESTION, seed=number, stop=stop, max_tokens=24,
                                                    extra_body={"sampler": {"alpha": alpha}})
        return drawn.choices[0].text

    kinds = [(number, stop, alpha) for number in range(2) for stop in (None, ["9"]) for alpha in (1.5, 4.0)]
    found: dict[tuple, str] = {}
    threads = [threading.Thread(target=lambda kind=kind: found.update({str(kind): ask(*kind)})) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = dm.component("model", "hf", path=dm.component("model", "tiny").path, chat=False)
    with dm.Engine(model, hardware=dm.Local(num_slots=1)) as engine:
        for number, stop, alpha in kinds:
            (alone,) = engine.sample([QUESTION], sampler=dm.PowerMH(num_blocks=4, num_steps=2, alpha=alpha), seed=number,
                                     stop=stop or [], max_new_tokens=24, progress=False)
            assert found[str((number, stop, alpha))] == alone.text
    assert len(set(found.values())) > 2


def test_openai_fields_choose_the_law_of_plain_samplers(running):
    client = running.client()
    asked = dict(model="tiny", prompt=QUESTION, max_tokens=24)
    greedy = client.completions.create(**asked, temperature=0, extra_body={"sampler": "temperature"}).choices[0].text
    assert greedy == client.completions.create(**asked, extra_body={"sampler": "greedy"}).choices[0].text
    drawn = client.completions.create(**asked, temperature=1.5, top_p=0.9, seed=3, extra_body={"sampler": "temperature"})
    (mine,) = samples(QUESTION, chat=False, sampler=dm.Temperature(temperature=1.5, top_p=0.9), seed=3, max_new_tokens=24)
    assert drawn.choices[0].text == mine.text


@pytest.mark.parametrize(("server", "fields", "common", "refused"), [
    ("temperature", {"repetition_penalty": 5.0}, {}, "sampler.repetition_penalty: given 5.0"),
    ("temperature", {"nonsense": 1}, {}, "sampler.nonsense: given 1"),
    ("temperature", {}, {"frequency_penalty": 1.5}, "frequency_penalty: given 1.5"),
    ("temperature sampler.presence_penalty=1", {}, {}, "temperature: given 0.0; allowed: a number > 0 with"),
], ids=str)
def test_temperature_0_is_greedy_decoding_of_plain_draws_alone(tmp_path, server, fields, common, refused):
    own = composed(tmp_path, *f"sampler={server}".split()).sampler
    with pytest.raises(UserError, match=re.escape(refused)):
        sampler_of(own, fields, {"temperature": 0.0, **common})
    assert sampler_of(dm.BestOfN(), {}, {"temperature": 0.0}) == (dm.BestOfN(), {"temperature": 0.0})


def test_fields_of_vllm_choose_the_law_as_those_of_the_sampler_do():
    def law(**asked: float) -> SamplingParams:
        read = Text.model_validate({"prompt": "x", "temperature": 1.3, **asked})
        return sampler_of(dm.Temperature(), read.sampler, read.given())[0].law()

    assert law(top_k=5, min_p=0.1, repetition_penalty=1.2) == SamplingParams(1.3, 5, 1.0, 0.1, 1.2)
    assert law(top_k=-1) == SamplingParams(1.3)
    assert law(temperature=0, top_k=5, min_p=0.1) == SamplingParams(0.0)
    for wrong in ({"top_k": 1.5}, {"min_p": 2}, {"repetition_penalty": 1.2, "temperature": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            law(**wrong)


@pytest.mark.slow
def test_a_clients_temperature_is_ignored_by_a_sampler_without_one(running):
    """Clients send temperature always, and power_mh has no such field."""
    raw = running.client().completions.with_raw_response

    def drawn(**changes) -> tuple[str, str | None]:
        reply = raw.create(model="tiny", prompt=QUESTION, seed=5, max_tokens=24, **{"temperature": 0.7, **changes})
        return reply.parse().choices[0].text, reply.headers.get("X-Dflash-Mcmc-Ignored")

    (plain,) = samples(QUESTION, chat=False, max_new_tokens=24)
    assert drawn() == (plain.text, "temperature=0.7")
    assert drawn(temperature=1) == (plain.text, None)
    assert drawn(extra_body={"sampler": "greedy"})[1] == "temperature=0.7"
    assert drawn(temperature=0, extra_body={"sampler": "greedy"})[1] is None


def test_a_stream_has_each_answer_whole(running):
    client = running.client()
    asked = dict(model="tiny", messages=[{"role": "user", "content": QUESTION}], seed=5, n=2,
                 extra_body={"sampler": "temperature"})
    *parts, usage = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    whole = client.chat.completions.create(**asked)
    assert usage.usage == whole.usage
    said = sorted((choice.index, choice.delta.role, choice.delta.content, choice.finish_reason, choice.dflash_mcmc)
                  for part in parts for choice in part.choices)
    assert said == [(choice.index, "assistant", choice.message.content, choice.finish_reason, choice.dflash_mcmc)
                    for choice in whole.choices]


def most_likely(ids: list[int]) -> tuple[list[float], list[int]]:
    """A fresh forward of the model: log p of each token of a text but the first, and the most likely token at its place."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dm.component("model", "tiny").path)
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, :-1].double()
    rows = rows[:, : len(model_tokenizer())].log_softmax(-1)
    return rows[range(len(ids) - 1), ids[1:]].tolist(), rows.argmax(-1).tolist()


def test_kept_sets_are_those_of_python_by_the_names_of_vllm(running):
    drawn = running.client().completions.create(
        model="tiny", prompt=QUESTION, seed=5, max_tokens=32, top_p=0.9,
        extra_body={"return_sampling_mask": True, "sampler": {"name": "temperature", "temperature": 1.0, "top_k": 5}})
    mine, = samples(QUESTION, chat=False, sampler=dm.Temperature(temperature=1.0, top_k=5, top_p=0.9, sampling_mask=True))
    said = drawn.choices[0].model_extra
    assert said["sampling_mask"] == mine.sampling_mask
    assert said["sampling_mask_logprobs"] == [pytest.approx(log_q, abs=1e-3) for log_q in mine.sampling_mask_logprobs]
    assert len(mine.sampling_mask) == len(mine.tokens)
    assert {1, 5} <= set(map(len, mine.sampling_mask))
    chosen = [log_q[ids.index(token)] for token, ids, log_q in
              zip(mine.tokens, mine.sampling_mask, mine.sampling_mask_logprobs, strict=True)]
    assert sum(chosen) == pytest.approx(mine.log_q)


def model_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(dm.component("model", "tiny").path)


@pytest.mark.parametrize(("max_tokens", "stop"), quick([(0, []), (1, []), (24, [" red"])], 24))
def test_a_prompt_can_be_scored(running, max_tokens, stop):
    """As evaluation harnesses do. The text holds a stop id and a stop string, and is longer than the longest answer."""
    text = "<|im_start|>user\n" + 2 * QUESTION + "<|im_end|>\n"
    prompt = model_tokenizer()(text)["input_ids"]
    status, reply = running.post({"prompt": [prompt, prompt[:9]], "echo": True, "logprobs": 1, "max_tokens": max_tokens,
                                  "seed": 5, "stop": stop, "sampler": "temperature", "return_token_ids": True})
    assert status == 200, reply
    for choice, own in zip(reply["choices"], (prompt, prompt[:9]), strict=True):
        said, answer = choice["logprobs"], choice["token_ids"]
        assert len(answer) <= max_tokens
        assert choice["text"].startswith(model_tokenizer().decode(own, skip_special_tokens=True))
        log_p, best = most_likely([*own, *answer])
        assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
        assert said["token_logprobs"][1:] == pytest.approx(log_p, abs=1e-3)
        assert "".join(said["tokens"]) == model_tokenizer().decode([*own, *answer], skip_special_tokens=False)
        greedy = [token == most for token, most in zip([*own, *answer][1:], best, strict=True)]
        tops = [max(top.values()) for top in said["top_logprobs"][1:]]
        assert [value == top for value, top in zip(said["token_logprobs"][1:], tops, strict=True)] == greedy
        pieces = [piece.decode(errors="replace") for piece in running.service._texts.shown(best)]
        assert [list(top) for top in said["top_logprobs"][1:]] == [[piece] for piece in pieces]
        assert not all(greedy)
        assert any(greedy) or own is not prompt
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in reply["choices"])


WRONG = {
    "not JSON": (b"{", 400, "body"), "no object": (b"[1]", 400, "body"),
    "not finite": (b'{"prompt": "x", "temperature": NaN}', 400, "temperature: given nan; allowed: a finite number"),
    "too large": (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature: given inf"), "deep": (b"[" * 9000, 400, "body"),
    "deep prompt": (b'{"prompt": ' + b"[" * 700 + b"]" * 700 + b"}", 400, "prompt: given [[["),
    "bytes": (b'{"prompt": "\xff"}', 400, "body"), "surrogate": (b'{"prompt": "\\ud800"}', 400, "prompt"),
    "surrogate in a name": (b'{"prompt": "x", "\\ud800": 1}', 400, "unknown field"),
    "unknown field": ({"prompt": "x", "max_token": 3}, 400, "did you mean 'max_tokens'?"),
    "unknown model": ({"prompt": "x", "model": "other"}, 404, "'tiny'"),
    "no prompt": ({}, 400, "prompt"), "no text": ({"prompt": ""}, 400, "prompt"),
    "wrong ids": ({"prompt": [10**6]}, 400, "token ids"),
    "long prompt": ({"prompt": [5] * 65}, 400, "serve.max_prompt_tokens"), "n": ({"prompt": "x", "n": 10**9}, 400, "n: given"),
    "many": ({"prompt": ["x"] * 3, "n": 6}, 400, "n: given 6; allowed: at most 16"),
    "no n": ({"prompt": "x", "n": True}, 400, "n: given"),
    "max_tokens": ({"prompt": "x", "max_tokens": 33}, 400, "1 to 32"), "seed": ({"prompt": "x", "seed": 1.5}, 400, "seed"),
    "stop": ({"prompt": "x", "stop": [""]}, 400, "stop"),
    "logprobs": ({"prompt": "x", "logprobs": 3}, 400, "logprobs: given 3; allowed: less than or equal to 1"),
    "no law": ({"prompt": "x", "return_sampling_mask": True}, 400, "sampler.sampling_mask"),
    "no bound": ({"prompt": "x", "return_sampling_mask": True, "sampler": "temperature"}, 400, "sampler.top_k from 1 to 512"),
    "no tokens": ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens: given 0"),
    "law": ({"prompt": "x", "presence_penalty": 0.5, "sampler": "greedy"}, 400, "presence_penalty: given 0.5; allowed: 0"),
    "digits": (b'{"prompt": "x", "temperature": ' + b"9" * 4000 + b"}", 400, "temperature: given 999"),
    "self": ({"prompt": "x", "sampler": {"self": 1}}, 400, "sampler.self: given 1; allowed: nothing"),
    "many wrong ids": ({"prompt": [-1] * 4000}, 400, "prompt: given [-1, "),
    "field": ({"prompt": "x", "sampler": {"alhpa": 2}}, 400, "did you mean 'alpha'?"),
    "bound": ({"prompt": "x", "sampler": {"alpha": -1}}, 400, "sampler.alpha: given -1"),
    "sampler": ({"prompt": "x", "sampler": "powermh"}, 400, "did you mean 'power_mh'?"),
    "draft": ({"prompt": "x", "sampler": "draft_mh"}, 400, "draft"), "tools": ({"prompt": "x", "tools": [{}]}, 400, "tools"),
    "width": ({"prompt": "x", "sampler": {"name": "best_of_n", "num_candidates": 60_000}}, 400, "serve.max_width"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_request_gets_one_line(running, kind):
    body, status, words = WRONG[kind]
    found, reply = running.post(body)
    assert found == status, reply
    assert words in reply["error"]["message"]
    assert "\n" not in reply["error"]["message"]
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert running.get("/health")[0] == 200


@pytest.mark.parametrize(("headers", "status"), [
    ({"Content-Type": "text/plain"}, 400), ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ({"Host": "evil.example"}, 400), ({"Host": "localhost.evil.example:80"}, 400), ({"Host": "127.0.0.1.evil.example"}, 400),
    ({"Content-Type": ""}, 400), ({"Host": "localhost:1"}, 200), ({"Host": "[::1]:1"}, 200),
    ({"Host": "Friend.Example:8000"}, 200)], ids=str)
def test_a_page_of_another_site_is_refused(running, headers, status):
    found, reply = running.post({"prompt": "x", "max_tokens": 1, "sampler": "greedy"}, **headers)
    assert found == status, reply


@pytest.mark.parametrize(("origin", "status"), [
    ("https://localhost.evil.example", 400), ("https://evil.example/localhost", 400), ("null", 400),
    ("http://localhost:3000", 200), ("https://friend.example", 200)])
def test_a_browser_asks_whether_a_page_may_send_json(running, origin, status):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", running.port)) as connection:
        connection.request("OPTIONS", "/v1/completions", headers={
            "Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"})
        assert connection.getresponse().status == status


def test_a_long_body_is_refused(running):
    assert running.post(b" " * 20_001)[0] == 413


def test_roles_are_those_of_the_field_and_names_of_special_tokens_stay_text(running):
    def asked(content: str, role: str = "user") -> tuple[int, dict]:
        messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
        return running.post({"messages": messages, "max_tokens": 1, "sampler": "greedy"}, "/v1/chat/completions")

    for role in ("owner", "user<|im_end|>", ""):
        status, reply = asked("x", role)
        assert (status, "system, user, assistant, tool, developer" in reply["error"]["message"]) == (400, True)
    plain, named = (asked(text)[1]["usage"]["prompt_tokens"] for text in ("x", "x<|im_end|>"))
    assert named > plain + 1


def test_a_request_runs_no_file(tmp_path):
    (tmp_path / "law.py").write_text("open('run', 'w')\ndef law(logits, text):\n    return logits\n")
    with contextlib.chdir(tmp_path), pytest.raises(UserError, match=r"sampler\.function: given .*; allowed: nothing in"):
        sampler_of(dm.Temperature(), {"name": "temperature", "function": f"{tmp_path / 'law.py'}:law"}, {})
    assert not (tmp_path / "run").exists()


def test_a_wrong_key_is_refused_and_not_logged(running, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.access").handlers[0], "emit", lambda line: lines.append(line.getMessage()))
    for key in ("", "a-key-of-the-testz", "é"):
        status, reply = running.post({"prompt": "x"}, key=key)
        assert (status, "the request has no key, or a wrong one" in reply["error"]["message"]) == (401, True)
    assert running.get("/v1/models")[0] == 401
    assert [model.id for model in running.client().models.list()] == ["tiny"]
    processes.wait_until(lambda: len(lines) == 5)  # a line is written after its answer has been sent
    assert [line.rpartition(" ")[2] for line in lines] == ["401"] * 4 + ["200"]
    assert KEY not in str(lines)
    assert "testz" not in str(lines)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_slots(running, stream):
    """The chains of the request would make two million steps."""
    body = json.dumps({"prompt": QUESTION, "n": 4, "stream": stream, "sampler": {"num_steps": 500_000}}).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(head_of(len(body)) + body)
        while running.service.workers.counts[1] < 4:
            time.sleep(0.01)
    running.wait_until_idle()


def test_a_full_queue(running, monkeypatch):
    with running.held(), contextlib.ExitStack() as stack:
        for _ in range(16):
            body = json.dumps({"prompt": "x"}).encode()
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            connection.sendall(head_of(len(body)) + body)
        processes.wait_until(lambda: sum(running.service.workers.counts) == 16)
        status, reply = running.post({"prompt": "x"})
        assert (status, "serve.max_waiting" in reply["error"]["message"]) == (429, True)
    running.wait_until_idle()  # the clients that have gone wait no more
    assert running.post({"prompt": "x"})[0] == 200


@pytest.mark.slow
def test_a_failing_engine_or_template_is_an_error_of_the_request(running, monkeypatch):
    def failing(*_: object) -> None:
        raise RuntimeError("a failure of the test")

    with monkeypatch.context() as patch:
        patch.setattr(running.service._target.tokenizer, "apply_chat_template", failing)
        status, reply = running.post({"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")
        assert (status, reply["error"]["param"]) == (400, "model.chat")
    with monkeypatch.context() as patch:
        patch.setattr(running.service, "_read", failing)
        status, reply = running.post({"prompt": "x"})
        assert (status, reply["error"]["type"], reply["error"]["message"]) == (
            500, "server_error", "the server failed; its log says why")
    with monkeypatch.context() as patch:
        patch.setattr("dflash_mcmc.engine.batching.batched.BatchedEngine._step", failing)
        patch.setattr("dflash_mcmc.engine.batching.batched.BatchedEngine.close", failing)
        assert running.post({"prompt": "x"})[0] == 500
        assert running.get("/health")[0] == 503
    with monkeypatch.context() as patch:
        patch.setattr("dflash_mcmc.engine.batching.language_model.LanguageModel.decode", failing)
        assert running.post({"prompt": "x"})[0] == 500
    assert running.post({"prompt": "x"})[0] == 200
    assert running.get("/health")[0] == 200


def test_texts_of_tokens_that_cannot_be_told_are_found_before_anything_is_drawn(running, monkeypatch):
    def failing(*_: object) -> None:
        raise UserError("the tokenizer: no bytes of its tokens")

    monkeypatch.setattr("dflash_mcmc.serve.app.texts_of", failing)
    monkeypatch.setattr(running.service.workers, "order", lambda *_: pytest.fail("a request is drawn"))
    running.service.__dict__.pop("_texts", None)
    status, reply = running.post({"prompt": "x", "logprobs": 0})
    assert (status, reply["error"]["message"]) == (400, "the tokenizer: no bytes of its tokens")


def test_a_chain_that_raises_fails_its_request_alone(running, monkeypatch, capfd):
    """The other request is in the batch before the failing one and ends after it."""
    def failing(self, prompt, horizon, key):
        yield Draw(Trajectory.start(prompt), 1, SamplingParams(), key)
        raise RuntimeError("a failure of the test")

    monkeypatch.setattr("dflash_mcmc.sampler.temperature.Temperature.chain", failing)
    found: dict[str, tuple[int, dict]] = {}
    thread = threading.Thread(target=lambda: found.update(good=running.post({"prompt": QUESTION, "seed": 5})))
    with running.held():
        thread.start()
        while not running.service.workers.counts[0]:
            time.sleep(0.001)
        bad = threading.Thread(target=lambda: found.update(bad=running.post({"prompt": "x", "sampler": "temperature"})))
        bad.start()
        while running.service.workers.counts[0] < 2:
            time.sleep(0.001)
    thread.join()
    bad.join()
    assert found["bad"][0] == 500
    assert found["bad"][1]["error"]["message"] == "the sampler failed; the log says why"
    _, stream = running.post({"prompt": "x", "sampler": "temperature", "stream": True})  # it has had its status
    assert json.loads(stream["text"].rpartition("data: ")[2])["error"] == found["bad"][1]["error"]
    assert "RuntimeError: a failure of the test" in capfd.readouterr().err
    assert found["good"][0] == 200
    assert found["good"][1]["choices"][0]["text"] == samples(QUESTION, chat=False)[0].text
    assert running.get("/health")[0] == 200


def test_a_server_says_that_it_reads_the_model_before_it_does(monkeypatch, capsys):
    def unreadable(*_: object) -> None:
        raise UserError("model: cannot be read")

    note.cache_clear()
    monkeypatch.setattr(dm.HFModel, "load", unreadable)
    with pytest.raises(SystemExit):
        main(["serve.port=0"])
    assert capsys.readouterr().err.splitlines() == ["reading the model tiny", "error: model: cannot be read"]


@pytest.mark.slow
def test_the_page_is_true(running, capsys):
    """The commands of docs/howto/serve.md compose, and its Python gets an answer."""
    page = ROOT / "docs/howto/serve.md"
    commands = [line.partition("python -m dflash_mcmc.serve ")[2] for block in pages.blocks(page, "text")
                for line in pages.lines(block)]
    for command in commands:
        assert options.compose(command.replace("CHECKPOINT", dm.component("model", "tiny").path).split())
    bodies = [json.loads(body) for block in pages.blocks(page, "text") for body in re.findall(r"-d '(.*?)'", block, re.DOTALL)]
    assert len(bodies) == 2
    for body in bodies:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, reply = running.post({**body, "stream": False}, path)
        assert status == 200
        (choice,) = reply["choices"]
        assert choice["message"]["content"] if "messages" in body else choice["text"] == body["prompt"]
    assert "".join(choice["logprobs"]["tokens"]) == body["prompt"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    (block,) = pages.blocks(page, "py")
    address = f'"http://127.0.0.1:{running.port}/v1", api_key="{KEY}"'
    exec(block.replace('"http://127.0.0.1:8000/v1", api_key="none"', address), {})
    assert "token_forwards" in capsys.readouterr().out


def test_metrics_can_be_read(running):
    running.post({"prompt": "x"})
    lines = running.get("/metrics")[1].splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values['dflash_mcmc_request_seconds_bucket{le="+Inf"}'] == values["dflash_mcmc_request_seconds_count"]
    assert values['dflash_mcmc_requests_total{status="200"}'] >= 1
    assert values["dflash_mcmc_token_forwards_total"] > values["dflash_mcmc_generated_tokens_total"] > 0


@pytest.mark.slow
def test_answers_must_end_where_the_server_says_so(tmp_path):
    """They are those of a run with the same key, of which some are drawn again. A stream tells an answer whole."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "00000", "question": QUESTION, "answer": "21"}) + "\n")
    shared = ["sampler=temperature", "sampler.alpha=1", "dataset.max_new_tokens=24"]
    rows = [f"dataset={tmp_path / 'rows.jsonl'}", "dataset.prompt=plain", "num_chains=6", "seed=5", "tracker=none",
            f"paths.outputs={tmp_path}"]
    free, ended = (dm.read(dm.run(*shared, *rows, f"dataset.must_end={must}")).sort_values("chain")
                   for must in ("false", "true"))
    assert 0 < sum(free["ended"]) < sum(ended["ended"]) == 6
    asked = {"messages": [{"role": "user", "content": QUESTION}], "n": 6, "seed": 5}
    with Running([*shared, "dataset.must_end=true", "serve.port=0"]) as server:
        _, body = server.post(asked, "/v1/chat/completions")
        assert [choice["dflash_mcmc"]["tokens"] for choice in body["choices"]] == ended["tokens"].tolist()
        assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
        parts = server.client().chat.completions.create(model="tiny", stream=True, **asked)
        said = sorted((each.index, each.delta.content) for part in parts for each in part.choices if each.delta.content)
        assert said == [(number, choice["message"]["content"]) for number, choice in enumerate(body["choices"])]
        status, body = server.post({**asked, "sampler": "greedy"}, "/v1/chat/completions")
        assert status == 400
        assert "dataset.must_end: given True; allowed: false with sampler=greedy" in body["error"]["message"]


def test_a_port_in_use_and_options_without_effect_are_refused(running):
    with pytest.raises(UserError, match=r"serve\.port: given 0; allowed: a port of serve\.host=a\.\.b"):
        options.listening("a..b", 0)
    with pytest.raises(UserError, match=r"serve.port: given \d+; allowed: a port of serve.host=127.0.0.1 that is free"):
        options.listening("127.0.0.1", running.port)
    for override in ("seed=3", "num_chains=2", "dataset=gsm8k", "dataset.limit=3"):
        with pytest.raises(UserError, match="has no effect on a server"):
            options.compose([override])
    with pytest.raises(UserError, match=r"condtion: has no effect on a server \(did you mean 'condition'\?\)"):
        options.compose(["condtion=ps"])
