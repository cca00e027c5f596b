"""An OpenAI-style completions endpoint: its requests with their retries, and what its replies say of the tokens they have."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from dflash_mcmc.errors import ConfigError, UserError, tell
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process.http import NoReplyError, api_key, fetch_json

Read = TypeVar("Read")
OURS, VLLM, LLAMA_CPP = "dflash_mcmc", "vllm", "llamacpp"
"""What servers call themselves in `/models` (`owned_by`), where their requests differ."""
OWN_FIELDS = ("model", "prompt", "n", "max_tokens", "seed", "logprobs", "echo", "stop", "stop_token_ids", "temperature",
              "top_p", "top_k", "min_p", "samplers", "repeat_penalty", "repetition_penalty", "frequency_penalty",
              "presence_penalty", "sampler", "return_token_ids", "return_tokens_as_token_ids")
"""The fields that a request sets itself."""
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0
"""Seconds between two tries: the first wait, and the longest; each is twice as long as the one before."""
_BRIEF = 10.0
"""Seconds for the reply to `/models`, and for further tries where the server is busy."""
_OUTAGE = 60.0
"""Seconds without a failure after which the next one is another outage, and is said."""
_TRIES = 3
"""Replies with other than tokens and numbers, after which a chain is given up."""
_BUSY = (408, 429)
"""The statuses below 500 that say nothing against the request."""
_MOST_LISTED = 1024
"""Tokens of a list of the most likely ones, at most: a token's list takes 40 bytes for each."""
_ROUNDED = 1e-3
"""The largest log p of a token, in nats: what a server's rounding makes of 0."""


class Refusal(UserError):
    """A server refuses a request, or ends its answer early, and would do so again."""


class WrongReply(Exception):
    """A reply whose tokens or numbers cannot be. The message is one line."""


class DrawnReply(NamedTuple):
    """What a server says of the tokens that it drew.

    Attributes:
        ids: int64 (n,).
        values: float64 (n,), the stated log probability of each.
        log_q: float64 (n,), log probability under the law of the request, where the server states both; else None.
        top: for each token the ids (-1 where they are not told) and raw log p of the most likely ones, float64 (k, 2).
        text: the text of the tokens.
        reason: why the server ended the answer, as it says.
    """

    ids: np.ndarray
    values: np.ndarray
    log_q: np.ndarray | None
    top: list[np.ndarray]
    text: str
    reason: str


class EndpointFields(Protocol):
    """The fields of the component that requests depend on."""

    url: str | None
    model: str | None
    body: Any
    api_key_env: str | None
    timeout_seconds: float
    patience_seconds: float

    @property
    def logprobs(self) -> str: ...


class Endpoint:
    """Requests to one model of a server, from any thread.

    Args:
        engine: the component.
        field: what errors call the server's address.

    Attributes:
        url, body: the server's address, and the further fields of requests for tokens.
        model, kind: the model and the server, as the server names them.
        longest: tokens of a sequence that the server takes, where it says so; else None.
        stopped: ends all requests once it is set.
    """

    def __init__(self, engine: EndpointFields, field: str = "engine.url"):
        self._engine, self._field, self.stopped = engine, field, threading.Event()
        self.url, self.body = (engine.url or "").rstrip("/"), engine.body or {}
        self._failed, self._lock = -math.inf, threading.Lock()
        told = self.ask("/models")
        try:
            named = {each["id"]: each for each in told["data"]}
            self.model = next(iter(named)) if engine.model is None else engine.model
            if self.model not in named:
                raise ConfigError("engine.model", self.model, f"a model of this server: {', '.join(named)}")
            mine = named[self.model]
            self.kind, self.longest = str(mine.get("owned_by", "")), mine.get("max_model_len") or (
                mine.get("meta") or {}).get("n_ctx")
        except (LookupError, TypeError, AttributeError, StopIteration) as error:
            raise ConfigError(field, engine.url, "an OpenAI-style server: its /models names no model") from error

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a reply. Asks again after 408, 429, 5xx, a reset, half a reply and a timeout, for `patience_seconds`.

        They count from the first failure. Without a body all times are brief, and only 429 and 503 are asked for again. Raises
        Refusal for another status, and UserError when the time is over.
        """
        engine, failed, pause = self._engine, 0.0, _FIRST_WAIT
        key = api_key("engine.api_key_env", engine.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        while True:
            try:
                return fetch_json(self.url + path, body, headers=headers, stopped=self.stopped,
                                  seconds=min(engine.timeout_seconds, _BRIEF if body is None else math.inf))
            except NoReplyError as error:
                reason = str(error).replace(key, "[key]") if key else str(error)
                status = error.status
            if status is not None and status < 500 and status not in _BUSY:
                raise Refusal(f"{self._field}: {self.url} refuses a request with {reason}; allowed: an OpenAI-style server "
                              "with this model and key, room for the prompt and dataset.max_new_tokens, and the fields of "
                              "engine.body and the logprobs of engine.logprobs")
            patience = engine.patience_seconds
            if body is None:
                patience = min(patience, _BRIEF) if status in (429, 503) else 0.0
            failed = failed or time.monotonic()
            if self.stopped.is_set() or time.monotonic() - failed + pause > patience:
                raise UserError(f"{self._field}: given {self.url}, which gives no answer ({reason}); allowed: a server that "
                                "runs; the same command draws what is missing")
            with self._lock:
                last, self._failed = self._failed, time.monotonic()
            if self._failed - last > _OUTAGE:
                tell(f"{self._field}: no answer from {self.url} ({reason}); requests are sent again for up to {patience:g} s")
            self.stopped.wait(pause)
            pause = min(2.0 * pause, _LONGEST_WAIT)

    def leave(self, body: Mapping[str, Any], seconds: float) -> None:
        """Asks for tokens, and leaves after a time, without the reply."""
        with contextlib.suppress(NoReplyError):
            fetch_json(f"{self.url}/completions", body, seconds=seconds, stopped=self.stopped)

    def drawn(self, tokens: np.ndarray, length: int, law: SamplingParams, seed: int, top: int = 0,
              stop_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> DrawnReply:
        """A continuation of `tokens` by at most `length` tokens. Raises UserError, and WrongReply.

        Args:
            top: number of most likely tokens to tell for each token.
            stop_ids, stop: what ends an answer. Servers that do not take them draw on, and their tokens are cut here.
        """
        body = {**self._body(tokens, law), "max_tokens": length, "seed": seed,
                "logprobs": top or int(self.kind not in (OURS, VLLM))}
        if self.kind == VLLM and stop_ids:
            body["stop_token_ids"] = list(stop_ids)
        if self.kind in (OURS, VLLM) and stop:  # their ids and log p have the tokens of the string
            body["stop"] = list(stop)
        return self._read({**body, **self.body}, lambda choice: _reply(choice, length, top))

    def scored(self, sequence: np.ndarray, count: int, top: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """log p of the last `count` tokens of a sequence, float64 (count,), and whether each is the most likely one.

        The latter is known with `top` alone. Raises UserError, Refusal where the server does not score, and WrongReply.
        """
        def of(choice: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
            told = choice["logprobs"]
            if not len(sequence) <= len(told.get("token_logprobs") or ()) <= len(sequence) + 1:  # llama.cpp ignores `echo`
                raise Refusal(f"engine.url: {self.url} scores no given tokens; allowed: a server with echo and logprobs")
            values = _numbers(told["token_logprobs"][len(sequence) - count : len(sequence)])
            rows = (told["top_logprobs"] or [])[len(sequence) - count : len(sequence)] if top else []
            return values, np.array([value >= max(row.values()) for value, row in zip(values, rows, strict=False)], bool)

        body = {**self._body(sequence, SamplingParams()), "echo": True, "logprobs": int(top or self.kind not in (OURS, VLLM))}
        try:
            return self._read({**body, "max_tokens": 0}, of)
        except Refusal:
            return self._read({**body, "max_tokens": 1}, of)

    def _body(self, tokens: np.ndarray, law: SamplingParams) -> dict[str, Any]:
        """The law of a request, with what a server would set by itself: from generation_config, or llama.cpp's own cuts."""
        body: dict[str, Any] = {"model": self.model, "prompt": tokens.tolist(), "temperature": law.temperature,
                                "top_p": law.top_p, "top_k": law.top_k or -1, "min_p": law.min_p, "n": 1}
        if self.kind == LLAMA_CPP:
            return {**body, "samplers": ["temperature", "top_k", "top_p", "min_p"], "repeat_penalty": 1.0}
        body |= {"return_token_ids": True, **{name: getattr(law, name) for name in _PENALTIES}}
        if self.kind != OURS:
            return {**body, "return_tokens_as_token_ids": True}
        own: dict[str, Any] = {"name": "temperature"}  # whatever sampler the server was started with
        if law.temperature:
            own |= {"penalty_counts": "prompt+answer" if law.counts_prompt else "answer", "top_n_sigma": law.top_n_sigma,
                    "typical_p": law.typical_p, "order": f"temperature_{'last' if law.temperature_last else 'first'}"}
        return {**body, "sampler": own}

    def _read(self, body: dict[str, Any], read: Callable[[Mapping[str, Any]], Read]) -> Read:
        """What is read of the only choice of a reply, which is asked for again where it is wrong."""
        for number in range(1, _TRIES + 1):
            found = self.ask("/completions", body)
            try:
                (choice,) = found["choices"]
                return read(choice)
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                wrong = WrongReply(f"a reply without tokens and log probabilities ({type(error).__name__})")
            except WrongReply as error:
                wrong = error
            if number == _TRIES:
                raise wrong
        raise AssertionError("unreachable")

    def check_law(self, law: SamplingParams, vocab_size: int) -> None:
        """Raises ConfigError if the server cannot draw from a law, or tells too little of it."""
        mode, plain = self._engine.logprobs, law in (SamplingParams(), SamplingParams(temperature=0.0))
        if plain or self.kind == OURS:
            return
        instead = "with this server; or engine=slots"
        for name in ("top_n_sigma", "typical_p", "temperature_last", "counts_prompt"):
            if getattr(law, name) != getattr(SamplingParams(), name):
                raise ConfigError(f"sampler.{name}", getattr(law, name), f"{getattr(SamplingParams(), name)!r} {instead}")
        if law.has_penalty and (self.kind == LLAMA_CPP or mode == "top"):
            raise ConfigError("sampler", "a law with a penalty", f"one without {instead}")
        if mode == "raw":
            raise ConfigError("engine.logprobs", "raw", f"with draws at temperature {law.temperature:g}"
                              f"{', truncated' * law.truncates}: processed, where the server states log p of the law that it "
                              "draws from (vLLM: --logprobs-mode processed_logprobs), or top, where it lists sampler.top_k "
                              "tokens (llama.cpp); or draws from the model itself, at temperature 1")
        if mode == "top" and (law.top_k or vocab_size) > _MOST_LISTED:
            raise ConfigError("engine.logprobs", "top", f"with a sampler.top_k from 1 to {_MOST_LISTED}, whose tokens the "
                              "server lists; or processed")


def _reply(choice: Mapping[str, Any], length: int, top: int) -> DrawnReply:
    """The reply in a choice. Raises WrongReply for ids and numbers that cannot be, and an exception for other fields."""
    told, (ids, listed) = choice["logprobs"], tokens_of(choice)
    values = _numbers(listed)
    if not 0 < len(ids) <= length or len(values) != len(ids) or any(type(token) is not int for token in ids):
        raise WrongReply(f"{len(ids)} token ids and {len(values)} log probabilities for at most {length} tokens (ids come "
                         "with return_token_ids of vLLM and python -m dflash_mcmc.serve, and with logprobs of llama.cpp)")
    rows = []
    for row in (told.get("top_logprobs") or [each["top_logprobs"] for each in told["content"]])[: len(ids)] if top else []:
        pairs = [(_id(name), value) for name, value in row.items()] if isinstance(row, dict) else [
            (each["id"], each["logprob"]) for each in row]
        rows.append(np.array(pairs, float).reshape(-1, 2))
    if top and len(rows) < len(ids):
        raise WrongReply("no list of the most likely tokens for each token")
    own = (choice.get("dflash_mcmc") or {}).get("token_log_q")
    return DrawnReply(np.array(ids, np.int64), values, None if own is None else _numbers(own), rows,
                      str(choice.get("text") or ""), str(choice.get("finish_reason")))


def tokens_of(choice: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Token ids and log probabilities of a choice, wherever a server has them; empty where it has none."""
    told = choice.get("logprobs") or {}
    listed = told.get("content") or []
    ids = choice.get("token_ids") or [each["id"] for each in listed if "id" in each] or [
        int(name.removeprefix("token_id:")) for name in told.get("tokens") or () if name.startswith("token_id:")]
    return ids, told.get("token_logprobs") or [each["logprob"] for each in listed]


def _id(name: str) -> int:
    number = name.removeprefix("token_id:")
    return int(number) if number != name else -1


def _numbers(values: Sequence[Any]) -> np.ndarray:
    numbers = np.array([math.nan if value is None else value for value in values], float)
    if not np.isfinite(numbers).all() or (len(numbers) and numbers.max() > _ROUNDED):
        raise WrongReply("log probabilities that are no numbers up to 0")
    return np.minimum(numbers, 0.0)
