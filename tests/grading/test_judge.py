"""`grader=judge`: rubrics at an OpenAI-compatible endpoint, here a server of this process."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import judge
from tests import processes
from tests.grading.golds import graded
from tests.processes import HANG
from tests.refusals import refused
from tests.runs import execute

KEY = "secret-of-the-test"


class StandIn(BaseHTTPRequestHandler):
    """Replies as `server.replies` says: a status, or a text, by what the question contains."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        with self.server.lock:
            replies = next(found for word, found in self.server.replies.items() if word in question)
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if reply == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "99999")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.server.released.wait(0.1):
                    self.wfile.write(b" ")
            return
        if reply == "wait":
            self.server.released.wait(HANG)
            reply = 500
        status, content = (reply, "") if isinstance(reply, int) else (200, reply)
        sent = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *arguments):
        """Prints nothing."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(judge, "_BACKOFF_SECONDS", 0.0)
    served = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    served.daemon_threads = False  # closing waits for them
    served.asked, served.lock, served.released = [], threading.Lock(), threading.Event()
    served.replies = {"ready": ["ready"], "": ['{"satisfied": [true]}']}
    thread = threading.Thread(target=served.serve_forever, args=(0.02,))
    thread.start()
    yield served
    served.released.set()
    served.shutdown()
    thread.join()
    served.server_close()


def settings(server, *more: str) -> list[str]:
    return ["grader=judge", f"grader.url=http://127.0.0.1:{server.server_port}/v1", "grader.model=j", *more]


def grades(grader, pairs) -> list:
    pool = grader.start()
    found = graded(pool, pairs)
    pool.close()
    return found


def test_a_text_is_correct_only_if_every_rubric_is_satisfied(server, make_config):
    server.replies = {"all": ['{"reason": "", "satisfied": [true, true]}'], "some": ['<think>{</think>```json\n{"satisfied": '
                      "[true, false]}\n```"], "fewer": ['{"satisfied": [true]}'], "words": ["yes, both"],
                      "better later": [503, "nonsense", '{"satisfied": [true, true]}'], "down": [500],
                      "numbers": ['{"satisfied": [1, 1]}']}
    texts = ["all", "some", "fewer", "words", "better later", "down", "numbers", "", "<think>hm"]
    found = grades(make_config(*settings(server, "grader.retries=2")).grader,
                   [(text, json.dumps(["Is short.", "Is kind."])) for text in texts])
    assert [(grade.verdict, grade.rule) for grade in found] == [
        ("correct", "rubrics"), ("wrong", "rubrics"), ("error", "reply"), ("error", "reply"), ("correct", "rubrics"),
        ("error", "endpoint"), ("error", "reply"), ("no_answer", "empty"), ("no_answer", "unfinished_thinking")]
    assert found[1].reason == "not satisfied: 2 of 2"
    assert found[5].reason.startswith("status 500: ")
    question = next(body for *_, body in server.asked)["messages"][0]["content"]
    assert "1. Is short." in question
    assert "2. Is kind." in question
    assert sum("down" in body["messages"][0]["content"] for *_, body in server.asked) == 3


def test_a_slow_judge_is_a_timeout(server, make_config):
    server.replies = {"": ["wait"]}
    found = grades(make_config(*settings(server, "grader.timeout_seconds=0.1", "grader.retries=0")).grader, [("text", "gold")])
    assert (found[0].verdict, found[0].reason) == ("timeout", "no complete reply in 0.1 s")


def test_closing_the_pool_gives_up_requests_under_way(server, make_config):
    for reply in ("drip", "wait"):
        server.replies = {"": [reply]}
        pool = make_config(*settings(server, "grader.timeout_seconds=600")).grader.start()
        asked = len(server.asked)
        pool.submit(0, "text", "gold")
        processes.wait_until(lambda asked=asked: len(server.asked) > asked)
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < 10


def test_the_decision_is_recorded_once_and_the_key_is_nowhere(server, make_config, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    arguments = [*settings(server, "grader.api_key_env=JUDGE_KEY"), "sampler=greedy", "dataset.limit=2", "tracker=none",
                 "dataset.max_new_tokens=8", f"paths.outputs={tmp_path}"]
    result = execute(make_config(*arguments))
    assert result.summary["correct"] == 2
    assert {key for _, key, _ in server.asked} == {f"Bearer {KEY}"}
    asked = len(server.asked)
    assert asked == 3  # once before the start, and once for each sample
    again = execute(make_config(*arguments))
    assert (again.num_new, len(server.asked)) == (0, asked)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize(("reply", "message"), [(401, "refuses the request with status 401"), (503, "does not reply")])
def test_a_run_without_a_judge_ends_before_loading(server, make_config, tmp_path, monkeypatch, reply, message):
    server.replies = {"": [reply]}
    config = make_config(*settings(server), "tracker=none", f"paths.outputs={tmp_path}")
    monkeypatch.setattr(type(config.model), "load", lambda self, device: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message):
        execute(config)
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(("wrong", "message"), [
    ("grader.url=ftp://x", r"grader\.url"), ("grader.url=http://me:word@x/v1", "a URL with a user"),
    ("grader.model=null", r"grader\.model"),
    ("grader.prompt='{{ response }}'", r"grader\.prompt"), ("grader.prompt='{% if'", r"grader\.prompt"),
    ("grader.prompt=none.jinja", r"grader\.prompt"),
    ("aggregate=majority", "judged texts have no answers that can be compared"),
    ("aggregate=[log_p,adaptive]", "judged texts have no answers that can be compared")])
def test_wrong_settings_are_one_line(server, make_config, wrong, message):
    with pytest.raises(UserError, match=message) as error:
        make_config(*settings(server, "num_chains=2", wrong))
    assert "word@" not in str(error.value)


def test_a_missing_key_and_a_missing_gold_answer_are_refused(server, make_config):
    with refused("grader.api_key_env: given 'NO_SUCH_KEY'"):
        make_config(*settings(server, "grader.api_key_env=NO_SUCH_KEY")).grader.preflight()
    for gold in ("", "[]", '["a", 1]'):
        with refused("grader=judge: given the gold answer"):
            make_config(*settings(server)).grader.check_gold(gold)


def test_clbench_passes_its_rubrics_on(server, make_config, shared_data):
    file = shared_data / "clbench_sample/sample.jsonl"
    config = make_config(*settings(server), "dataset=clbench", f"dataset.path={file}")
    problems = config.dataset.problems()
    assert [len(json.loads(problem.answer)) for problem in problems] == [14, 10, 7, 3, 12, 6, 9, 11, 11, 15, 6, 11]
    server.replies = {"": [json.dumps({"satisfied": [True] * 13 + [False]})]}
    assert grades(config.grader, [("text", problems[0].answer)])[0].reason == "not satisfied: 14 of 14"
