"""Bodies of answers in the format of OpenAI, errors included, with further fields under `dflash_mcmc`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.errors import one_line
from dflash_mcmc.store import finishes

if TYPE_CHECKING:
    from dflash_mcmc.api.workers import DrawnAnswer

_REASONS = {finishes.STOP_ID: "stop", finishes.STOP_STRING: "stop", finishes.LENGTH: "length"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that gets no answer, with the status and the body of the reply."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(one_line(message))
        self.status, self.param, self.code = status, None if param is None else one_line(param), code

    def body(self) -> dict[str, Any]:
        """The error in the format of OpenAI."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Reply(NamedTuple):
    """A drawn answer with what was asked for besides it."""

    answer: DrawnAnswer
    pieces: Sequence[bytes] | None
    """The bytes of each token; None if they were not asked for."""
    token_ids: bool = False
    """Whether the token ids were asked for."""


class Envelope(NamedTuple):
    """What all parts of an answer say."""

    id: str
    created: int
    model: str
    seed: int
    chat: bool

    def body(self, kind: str) -> dict[str, Any]:
        """The fields at the top of a body."""
        name = ("chat.completion" + kind) if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def whole(heading: Envelope, replies: Sequence[Reply], prompt_tokens: int) -> dict[str, Any]:
    """The body with all answers."""
    choices = [_choice(heading.chat, number, reply, "message") for number, reply in enumerate(replies)]
    return {**heading.body(""), "choices": choices, "usage": usage(replies, prompt_tokens),
            "dflash_mcmc": {"seed": heading.seed}}


async def events(heading: Envelope, replies: Sequence[Reply], prompt_tokens: int,
                 include_usage: bool) -> AsyncIterator[bytes]:
    """The answers as server-sent events. Each answer comes whole: a sampler may change every token until the chain ends."""
    top = {**heading.body(".chunk"), "dflash_mcmc": {"seed": heading.seed}}
    for number, reply in enumerate(replies):
        choice = _choice(heading.chat, number, reply, "delta")
        if heading.chat:
            last = {"index": number, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            yield _event({**top, "choices": [{**choice, "finish_reason": None}]})
            yield _event({**top, "choices": [last]})
        else:
            yield _event({**top, "choices": [choice]})
    if include_usage:
        yield _event({**top, "choices": [], "usage": usage(replies, prompt_tokens)})
    yield b"data: [DONE]\n\n"


def usage(replies: Sequence[Reply], prompt_tokens: int) -> dict[str, int]:
    """Tokens of prompts and answers, and the cost of the chains in token-forwards."""
    drawn = sum(reply.answer.result.trajectory.length for reply in replies)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn,
            "token_forwards": sum(reply.answer.cost.token_forwards for reply in replies)}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def _choice(chat: bool, number: int, reply: Reply, place: str) -> dict[str, Any]:
    answer, log_p = reply.answer, reply.answer.result.trajectory.log_p.tolist()
    logprobs = None if reply.pieces is None else (_chat_logprobs if chat else _logprobs)(log_p, reply.pieces)
    content = {place: {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    ids = {"token_ids": answer.result.trajectory.tokens.tolist()} if reply.token_ids else {}
    return {"index": number, **content, **ids, "logprobs": logprobs, "finish_reason": _REASONS[answer.finish_reason],
            "dflash_mcmc": answer.details()}


def _chat_logprobs(log_p: Sequence[float], pieces: Sequence[bytes]) -> dict[str, Any]:
    return {"content": [{"token": piece.decode(errors="replace"), "logprob": value, "bytes": list(piece), "top_logprobs": []}
                        for piece, value in zip(pieces, log_p, strict=True)],
            "refusal": None}


def _logprobs(log_p: Sequence[float], pieces: Sequence[bytes]) -> dict[str, Any]:
    texts = [piece.decode(errors="replace") for piece in pieces]
    offsets = accumulate(map(len, texts[:-1]), initial=0) if texts else []
    return {"tokens": texts, "token_logprobs": log_p, "top_logprobs": None,
            "text_offset": list(offsets)}
