"""The reader of other servers' replies, against a real server that drips, never ends, stops halfway, fails or says no JSON."""

import contextlib
import socket
import threading
import time

import pytest

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process.http import NoReplyError, api_key, check_url, fetch_json

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def serve():
    """A function that starts a server, which sends the given pieces to whoever asks, and returns its address."""
    listening, ended = [], threading.Event()

    def start(pieces, pause=0.0):
        listener = socket.create_server(("127.0.0.1", 0))
        listening.append(listener)

        def answer():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    for piece in pieces:
                        if ended.wait(pause):
                            break
                        connection.sendall(piece)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    yield start
    ended.set()
    for listener in listening:
        listener.close()


def whole(body: bytes, status: bytes = OK) -> list[bytes]:
    return [status + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def endless(piece: bytes):
    while True:
        yield piece


def test_the_json_of_a_reply(serve):
    assert fetch_json(serve(whole(b'{"a": [1, "\\u00e9"]}')), {"q": 1}, seconds=5) == {"a": [1, "é"]}


def test_a_byte_at_a_time_ends_at_the_total_limit(serve):
    head = OK + b"Content-Length: 9999\r\n\r\n"
    for pieces in ([head, *[b"x"] * 999], [OK, *[b"X"] * 999]):  # in the body, in the header
        started = time.monotonic()
        with pytest.raises(NoReplyError, match=r"no complete reply in 0\.6 s") as error:
            fetch_json(serve(pieces, pause=0.1), seconds=0.6)
        assert error.value.timed_out
        assert time.monotonic() - started < 3


def test_a_request_that_is_stopped_ends_at_once(serve):
    for pieces in ([OK + b"Content-Length: 9999\r\n\r\n", *[b"x"] * 999], [OK, *[b"X"] * 999], [b""] * 999):
        stopped, started = threading.Event(), time.monotonic()
        threading.Timer(0.3, stopped.set).start()
        with pytest.raises(NoReplyError, match="stopped"):
            fetch_json(serve(pieces, pause=0.1), seconds=600, stopped=stopped)
        assert time.monotonic() - started < 10


def test_an_endless_body_ends_at_the_size(serve):
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with pytest.raises(NoReplyError, match="a reply of more than 1,000,000 bytes"):
        fetch_json(serve(piece for part in ([OK + b"Transfer-Encoding: chunked\r\n\r\n"], endless(chunk)) for piece in part),
                   seconds=20, max_bytes=1_000_000)


@pytest.mark.parametrize(("pieces", "message"), [
    ([OK + b"Content-Length: 99\r\n\r\nhalf"], "RemoteProtocolError"), ([b""], "RemoteProtocolError"),
    (whole(b"out of\nmemory", b"HTTP/1.1 500 No\r\n"), "status 500: out of memory"),
    (whole(b"", b"HTTP/1.1 302 Away\r\nLocation: http://127.0.0.1:1/\r\n"), "status 302"),
    (whole(b"<html>"), "no JSON"), (whole(b"[" * 100_000), "no JSON"), (whole(b'"\\ud800"'), "no JSON of valid Unicode"),
    (whole(b"\xff\xfe\xfd"), "no JSON"),
])
def test_a_broken_reply_is_one_line(serve, pieces, message):
    with pytest.raises(NoReplyError, match=message) as error:
        fetch_json(serve(pieces), seconds=5)
    assert "\n" not in str(error.value)
    assert not error.value.timed_out


def test_no_server_is_one_line():
    for url in ("http://127.0.0.1:1/v1", "http://", "nowhere", "ftp://127.0.0.1/x"):
        with pytest.raises(NoReplyError):
            fetch_json(url, seconds=2)


@pytest.mark.parametrize(("url", "repeats"), [
    ("http://[::1/v1", True), ("ftp://host/v1", True), ("host", True), (None, True), ("https://u:secret@host/v1", False),
    ("https://host/v1?api-key=secret", False), ("https://host/v1#secret", False)])
def test_a_wrong_address_is_one_line_without_a_secret(url, repeats):
    with pytest.raises(ConfigError) as refused:
        check_url("engine.url", url)
    assert "secret" not in str(refused.value)
    assert (repr(url) in str(refused.value)) == repeats


@pytest.mark.parametrize(("variable", "value"), [("sk-secret", ""), ("gsk_secret", ""), ("A_KEY", "sk-one\nsk-secret"),
                                                 ("A_KEY", "Bearer secret"), ("A_KEY", "")])
def test_a_wrong_key_is_not_repeated(variable, value, monkeypatch):
    monkeypatch.setenv("A_KEY", value)
    with pytest.raises(ConfigError, match=r"^engine\.api_key_env: given .*; allowed: a variable of the environ") as refused:
        api_key("engine.api_key_env", variable)
    assert "secret" not in str(refused.value)
