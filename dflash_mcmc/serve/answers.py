"""Bodies of answers in the format of OpenAI, errors included, with further fields under `dflash_mcmc`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.errors import one_line
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.store import records
from dflash_mcmc.types import ChainResult, Cost, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.stop_strings import TokenTexts
    from dflash_mcmc.ops import Chain

_REASONS = {records.STOP_ID: "stop", records.STOP_STRING: "stop", records.LENGTH: "length"}
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


class DrawnAnswer(NamedTuple):
    """A drawn answer."""

    result: ChainResult
    cost: Cost
    text: str
    """The text without special tokens, up to a stop string."""
    finish_reason: str
    """One of `records.REASONS`."""

    def details(self) -> dict[str, Any]:
        """What the interfaces of other programs have no field for, as values of JSON."""
        result, path = self.result, self.result.trajectory
        return {"log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum()), "proposals": result.proposals,
                "accepted": result.accepted, "moved": result.moved, "token_forwards": self.cost.token_forwards,
                "finish_reason": self.finish_reason, "tokens": path.tokens.tolist()}


class Reply(NamedTuple):
    """An answer with what was asked for besides it, or a part of it."""

    number: int
    path: Trajectory
    """The tokens so far."""
    text: str
    """The text that is new."""
    begin: int
    """The first token that is new."""
    answer: DrawnAnswer | None
    """None while it is drawn."""
    texts: TokenTexts | None
    """Tells the bytes of tokens; None if log p was not asked for."""
    token_ids: bool
    """Whether the token ids were asked for."""
    scored: TextScorer | None = None
    """The log probabilities, where more than those of the answer's own tokens were asked for."""

    @property
    def shown_path(self) -> Trajectory:
        """The tokens whose log probabilities are shown."""
        return self.path if self.scored is None or self.scored.path is None else self.scored.path


class Teller:
    """Tells a connection what a chain has drawn, from the thread that draws.

    A text is told once it can no longer change: not the bytes of half a character, nor the beginning of a stop string. `text`
    and `begin` are the text and the number of tokens that were told, and `steps` the requests of the chain.

    Args:
        hear: takes the trajectory, the new text and the place of the first new token.
        piece: tokens between two parts of an answer that is drawn in order; 0 tells no part.
    """

    def __init__(self, hear: Callable[[Trajectory, str, int], object], decode: Callable[[Any], str], stop: Sequence[str],
                 piece: int):
        self._hear, self._decode, self._stop, self._piece = hear, decode, stop, piece
        self.text, self.begin, self.steps = "", 0, 0

    def begun(self, start: Callable[[], Chain]) -> Chain:
        """The chain with its draws in pieces. Token t of a draw has uniform t of its key, so that no piece changes a token."""
        answer: Any = None
        with closing(start()) as chain:
            while True:
                try:
                    request: Any = chain.send(answer)
                except StopIteration as end:
                    return end.value
                answer = request.trajectory if self._piece else (yield request)
                self.steps += 1
                while self._piece and not answer.complete(request.horizon):
                    upto = min(request.horizon, answer.length + self._piece)
                    answer = yield request._replace(trajectory=answer, horizon=upto)
                    self._tell(answer)

    def _tell(self, path: Trajectory) -> None:
        text = cut(self._decode(path.tokens), self._stop).rstrip("\ufffd")
        beginnings = (string[:length] for string in self._stop for length in range(1, len(string)))
        text = text[: len(text) - max(map(len, filter(text.endswith, beginnings)), default=0)]
        if len(text) > len(self.text) and text.startswith(self.text):
            self._hear(path, text[len(self.text):], self.begin)
            self.text, self.begin = text, path.length


class TextScorer:
    """Log p of each token of a text at temperature 1, and the most likely token at its place.

    The text is forced once the sampler's chain has ended. The place of a token that is not the most likely one costs a further
    forward, which draws that one.

    Args:
        echo: the prompt's text, whose tokens are scored too, from the second on; None scores the answer alone.
        top: whether the most likely tokens are wanted.
    """

    def __init__(self, echo: str | None, top: bool):
        self.echo, self._top = echo, top
        self.path: Trajectory | None = None
        self.most_likely: list[tuple[int, float]] | None = None

    def after(self, start: Callable[[], Chain]) -> Chain:
        """The chain of a sampler, and then the operations that score its text."""
        with closing(start()) as chain:
            result = yield from chain
        text = result.trajectory.sequence
        first = len(result.trajectory.prompt) if self.echo is None else 1
        greedy = SamplingParams(temperature=0.0)
        path = Trajectory.start(text[:first])
        if first < len(text):
            path = yield Score(path, text[first:], greedy)
        self.path, most_likely = path, []
        for position in range(path.length if self._top else 0):
            # log q of temperature 0 is 0 for the most likely token, and -inf for others.
            if path.log_q[position] != 0.0:
                one: Trajectory = yield Draw(path.prefix(position), position + 1, greedy, Key(0))
            else:
                one = path.prefix(position + 1)
            most_likely.append((int(one.tokens[position]), float(one.log_p[position])))
        self.most_likely = most_likely if self._top else None
        return result


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
    choices = [_choice(heading.chat, reply, "message") for reply in replies]
    return {**heading.body(""), "choices": choices, "usage": usage(replies, prompt_tokens),
            "dflash_mcmc": {"seed": heading.seed}}


async def events(heading: Envelope, parts: AsyncIterator[Reply | str], prompt_tokens: int,
                 include_usage: bool) -> AsyncIterator[bytes]:
    """Parts of answers as server-sent events. A text instead of a part is a comment, which clients pass over."""
    top = {**heading.body(".chunk"), "dflash_mcmc": {"seed": heading.seed}}
    whole: list[Reply] = []
    try:
        async for part in parts:
            if isinstance(part, str):
                yield f": {part}\n\n".encode()
                continue
            choice = _choice(heading.chat, part, "delta")
            whole += [part] if part.answer is not None else []
            ends = heading.chat and part.answer is not None
            yield _event({**top, "choices": [{**choice, "finish_reason": None} if ends else choice]})
            if ends:
                last = {"index": part.number, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
                yield _event({**top, "choices": [last]})
    except Refused as error:  # the status has been sent
        yield _event(error.body())
        return
    if include_usage:
        yield _event({**top, "choices": [], "usage": usage(whole, prompt_tokens)})
    yield b"data: [DONE]\n\n"


def usage(replies: Sequence[Reply], prompt_tokens: int) -> dict[str, int]:
    """Tokens of prompts and answers, and the cost of the chains in token-forwards."""
    drawn = sum(reply.path.length for reply in replies)
    costs = [(cost.token_forwards, cost.prompt_forwards) for reply in replies if reply.answer for cost in [reply.answer.cost]]
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn,
            "token_forwards": Cost.together(costs) if costs else 0}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def _choice(chat: bool, reply: Reply, key: str) -> dict[str, Any]:
    answer, tokens = reply.answer, reply.path.tokens.tolist()
    listed = _chat_logprobs if chat else _logprobs
    text = ((reply.scored.echo or "") if reply.scored else "") + reply.text
    role = {"role": "assistant"} if reply.begin == 0 else {}  # the first part alone, since clients join the parts
    content = {key: {**role, "content": text}} if chat else {"text": text}
    ids = {"token_ids": tokens[reply.begin:]} if reply.token_ids else {}
    ids |= {name: sets[reply.begin:] for name, sets in reply.path.sampling_mask().items()}
    end = {} if answer is None else {"dflash_mcmc": answer.details() | (
        {"token_log_q": reply.path.log_q.tolist()} if reply.texts and np.isfinite(reply.path.log_q).all() else {})}
    return {"index": reply.number, **content, **ids, "logprobs": reply.texts and listed(reply, reply.texts),
            "finish_reason": None if answer is None else _REASONS[answer.finish_reason], **end}


def _most_likely(reply: Reply, texts: TokenTexts) -> list[tuple[bytes, float]] | None:
    if reply.scored is None or reply.scored.most_likely is None:
        return None
    tokens = [token for token, _ in reply.scored.most_likely]
    return [(piece, log_p) for piece, (_, log_p) in zip(texts.shown(tokens), reply.scored.most_likely, strict=True)]


def _entry(piece: bytes, log_p: float) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "logprob": log_p, "bytes": list(piece)}


def _chat_logprobs(reply: Reply, texts: TokenTexts) -> dict[str, Any]:
    path, top = reply.shown_path, _most_likely(reply, texts)
    each = zip(texts.shown(path.tokens.tolist()), path.log_p.tolist(), strict=True)
    content = [{**_entry(piece, value), "top_logprobs": [] if top is None else [_entry(*top[position])]}
               for position, (piece, value) in enumerate(each)]
    return {"content": content[reply.begin:], "refusal": None}


def _logprobs(reply: Reply, texts: TokenTexts) -> dict[str, Any]:
    path, top = reply.shown_path, _most_likely(reply, texts)
    log_p: list[float | None] = path.log_p.tolist()
    most_likely: list[dict[str, float] | None] | None = (
        None if top is None else [{piece.decode(errors="replace"): value} for piece, value in top])
    tokens = path.tokens.tolist()
    if reply.scored is not None and reply.scored.echo is not None:  # the first token follows nothing
        tokens, log_p = [*path.prompt.tolist(), *tokens], [None, *log_p]
        most_likely = most_likely and [None, *most_likely]
    pieces = [piece.decode(errors="replace") for piece in texts.shown(tokens)]
    offsets = list(accumulate(map(len, pieces[:-1]), initial=0)) if pieces else []
    return {"tokens": pieces[reply.begin:], "token_logprobs": log_p[reply.begin:], "top_logprobs": most_likely,
            "text_offset": offsets[reply.begin:]}
