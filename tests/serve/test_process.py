"""The server as a process: signals."""

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.processes import HANG

pytestmark = pytest.mark.slow
QUESTION = "What is 7*6?"


@contextlib.contextmanager
def serving(*overrides: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server in a process of its own, and its port. A shell in the background starts programs that ignore SIGINT."""
    command = [sys.executable, "-m", "dflash_mcmc.serve", "serve.port=0", "dataset.max_new_tokens=32", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                               preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL))
    try:
        line = process.stdout.readline()
        yield process, int(re.fullmatch(r"serving tiny at http://127.0.0.1:(\d+)/v1\n", line)[1])
    finally:
        process.kill()
        process.communicate()


def asked(port: int, **body: object) -> http.client.HTTPConnection:
    """A connection on which a request has been sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": QUESTION, **body}),
                       {"Content-Type": "application/json"})
    return connection


def health(port: int) -> dict:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)) as connection:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())


def wait_until_closed(port: int) -> None:
    """Waits until the server takes no new connections."""
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
        while True:
            health(port)


def test_a_second_interrupt_ends_at_once():
    with serving("condition=ps") as (process, port):
        connection = asked(port, sampler={"num_steps": 1_000_000})
        while not health(port)["live"]:
            pass
        process.send_signal(signal.SIGINT)
        wait_until_closed(port)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == 130
        connection.close()


def test_sigterm_finishes_the_requests_of_64_clients():
    with serving("condition=ps", "sampler.num_steps=4", "hardware.num_slots=16") as (process, port):
        connections = [asked(port, seed=number) for number in range(64)]
        while health(port)["waiting"] + health(port)["live"] < 64:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        wait_until_closed(port)
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        replies = [connection.getresponse() for connection in connections]
        assert [reply.status for reply in replies] == [200] * 64
        assert all(json.loads(reply.read())["choices"][0]["finish_reason"] in ("stop", "length") for reply in replies)
        assert process.wait(HANG) == -signal.SIGTERM
        drain.join()
