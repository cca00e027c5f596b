"""Bodies of answers in the format of OpenAI, errors included, with further fields under `dflash_mcmc`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from dflash_mcmc.errors import one_line
from dflash_mcmc.store import finishes
from dflash_mcmc.types import ChainResult, Cost

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
    """A drawn answer, with the fields of `DrawnAnswer`."""

    result: ChainResult
    cost: Cost
    text: str
    """The text without special tokens, up to a stop string."""
    finish_reason: str
    """One of `finishes.REASONS`."""
    pieces: tuple[bytes, ...] | None = None
    """The bytes of each token; None if they were not asked for."""


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


def whole(heading: Envelope, answers: Sequence[Reply], prompt_tokens: int) -> dict[str, Any]:
    """The body with all answers."""
    choices = [_choice(heading.chat, number, answer, "message") for number, answer in enumerate(answers)]
    return {**heading.body(""), "choices": choices, "usage": usage(answers, prompt_tokens),
            "dflash_mcmc": {"seed": heading.seed}}


async def events(heading: Envelope, answers: Sequence[Reply], prompt_tokens: int,
                 include_usage: bool) -> AsyncIterator[bytes]:
    """The answers as server-sent events. Each answer comes whole: a sampler may change every token until the chain ends."""
    top = {**heading.body(".chunk"), "dflash_mcmc": {"seed": heading.seed}}
    for number, answer in enumerate(answers):
        choice = _choice(heading.chat, number, answer, "delta")
        if heading.chat:
            last = {"index": number, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            yield _event({**top, "choices": [{**choice, "finish_reason": None}]})
            yield _event({**top, "choices": [last]})
        else:
            yield _event({**top, "choices": [choice]})
    if include_usage:
        yield _event({**top, "choices": [], "usage": usage(answers, prompt_tokens)})
    yield b"data: [DONE]\n\n"


def usage(answers: Sequence[Reply], prompt_tokens: int) -> dict[str, int]:
    """Tokens of prompts and answers, and the cost of the chains in token-forwards."""
    drawn = sum(answer.result.trajectory.length for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn,
            "token_forwards": sum(answer.cost.token_forwards for answer in answers)}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def _choice(chat: bool, number: int, answer: Reply, place: str) -> dict[str, Any]:
    result, drawn = answer.result, answer.result.trajectory
    logprobs = None if answer.pieces is None else (_chat_logprobs if chat else _logprobs)(answer, answer.pieces)
    content = {place: {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    details = {"log_p": float(drawn.log_p.sum()), "log_q": float(drawn.log_q.sum()), "proposals": result.proposals,
               "accepted": result.accepted, "moved": result.moved, "token_forwards": answer.cost.token_forwards,
               "finish_reason": answer.finish_reason, "tokens": drawn.tokens.tolist()}
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": _REASONS[answer.finish_reason],
            "dflash_mcmc": details}


def _chat_logprobs(answer: Reply, pieces: Sequence[bytes]) -> dict[str, Any]:
    return {"content": [{"token": piece.decode(errors="replace"), "logprob": log_p, "bytes": list(piece), "top_logprobs": []}
                        for piece, log_p in zip(pieces, answer.result.trajectory.log_p.tolist(), strict=True)],
            "refusal": None}


def _logprobs(answer: Reply, pieces: Sequence[bytes]) -> dict[str, Any]:
    texts = [piece.decode(errors="replace") for piece in pieces]
    offsets = accumulate(map(len, texts[:-1]), initial=0) if texts else []
    return {"tokens": texts, "token_logprobs": answer.result.trajectory.log_p.tolist(), "top_logprobs": None,
            "text_offset": list(offsets)}
