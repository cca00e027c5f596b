"""A chat model that is asked over HTTP, by the interface `POST URL/chat/completions` of OpenAI, vLLM and others."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

from dflash_mcmc.errors import UserError

_REFUSED = (400, 401, 403, 404, 405, 422)
"""Statuses that repeat with every request: the URL, the model, the key or a parameter is wrong."""
_MAX_WAIT_SECONDS = 60.0
_MAX_REPLY_BYTES = 1 << 22


class Failed(Exception):
    """A request got no reply in spite of all retries."""

    def __init__(self, reason: str, timed_out: bool = False):
        super().__init__(reason)
        self.timed_out = timed_out


class Endpoint(NamedTuple):
    """The address of a judge, and the limits of its requests.

    `timeout_seconds` is the limit of one request. `retries` is the number of further requests after a failed one. The wait
    before the first retry is `backoff_seconds`, and it doubles with each further retry. The key is read from the environment
    variable `api_key_env` for each request and stored nowhere.
    """

    url: str
    model: str
    api_key_env: str | None
    temperature: float | None
    timeout_seconds: float
    retries: int
    backoff_seconds: float

    def ask(self, question: str, closed: threading.Event) -> str:
        """The reply to a question. Raises Failed, and UserError where no request can succeed. `closed` ends the waiting."""
        import requests

        failed = Failed("not asked")
        for attempt in range(self.retries + 1):
            wait = min(self.backoff_seconds * 2 ** (attempt - 1), _MAX_WAIT_SECONDS) if attempt else 0.0
            if closed.wait(wait):
                break
            try:
                response = requests.post(f"{self.url.rstrip('/')}/chat/completions", json=self._request(question),
                                         headers=self._headers(), timeout=self.timeout_seconds, allow_redirects=False)
                if response.status_code in _REFUSED:
                    raise UserError(f"grader.url: {self.url} refuses the request with status {response.status_code}; allowed: "
                                    "an OpenAI-compatible endpoint with this grader.model and the key of grader.api_key_env")
                if response.status_code == 200:
                    return _content(response.content)
                failed = Failed(f"status {response.status_code}")
            except requests.Timeout:
                failed = Failed("timeout", timed_out=True)
            except requests.RequestException as error:
                failed = Failed(type(error).__name__)
            except (ValueError, LookupError, TypeError, RecursionError):
                failed = Failed("no chat completion in the reply")
        raise failed

    def _request(self, question: str) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": question}]}
        return request if self.temperature is None else {**request, "temperature": self.temperature}

    def _headers(self) -> dict[str, str]:
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UserError(f"grader.api_key_env: given {self.api_key_env!r}; allowed: a variable of the environment that "
                            "holds the key, or null for an endpoint without keys")
        return {"Authorization": f"Bearer {key}"}


def _content(body: bytes) -> str:
    import json

    if len(body) > _MAX_REPLY_BYTES:
        raise ValueError("too long")
    content = json.loads(body)["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise TypeError("no text")
    return content
