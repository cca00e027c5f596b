"""Answers in the format of OpenAI, errors included, with further fields under `dflash_mcmc`."""

import json
import reprlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dflash_mcmc.engine.batching.stop_strings import TokenTexts
from dflash_mcmc.errors import UserError, one_line
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.ops import Chain, Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.store import records
from dflash_mcmc.types import Cost, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.serve.workers import DrawnAnswer

_REASONS = {records.STOP_ID: "stop", records.STOP_STRING: "stop", records.LENGTH: "length"}
_TOKENS = 4
"""Tokens between two parts of a streamed answer."""


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer to an error."""
    status, message, param = 500, "the server failed; its log says why", None
    if isinstance(error, RequestValidationError):
        errors = error.errors()
        place = errors[0]["loc"][:2]
        param = place[1] if len(place) == 2 and isinstance(place[1], str) else "body"
        words = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in errors if each["loc"][:2] == place)
        given = error.body if param == "body" else errors[0]["input"]
        allowed = "a JSON object, as application/json" if param == "body" else " or ".join(words)
        status, message = 400, f"{param}: given {reprlib.repr(given)}; allowed: {allowed}"
    elif isinstance(error, UserError):
        status, message, param = 400, str(error), str(error).partition(":")[0]
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": one_line(message), "type": kind, "param": param and one_line(param), "code": None}}


class Piece(NamedTuple):
    """What is new of an answer while it is drawn, or the rest of it at its end."""

    number: int
    path: Trajectory
    """The tokens so far."""
    text: str
    """The text that is new."""
    begin: int
    """The first token that is new."""
    answer: "DrawnAnswer | None" = None
    """None while it is drawn."""


class Teller:
    """Tells what a chain has drawn, from the thread that draws.

    A text is told once it can no longer change: not the bytes of half a character, nor the beginning of a stop string. `text`
    and `begin` are the text and the number of tokens that were told.

    Args:
        number: of the answer in its request.
        put: takes a part.
    """

    def __init__(self, number: int, put: Callable[[Piece], object], decode: Callable[[Any], str], stop: Sequence[str]):
        self._number, self._put, self._decode, self._stop = number, put, decode, stop
        self.text, self.begin = "", 0

    def in_pieces(self, start: Callable[[], Chain]) -> Chain:
        """The chain with its draws in pieces. Token t of a draw has uniform t of its key, so that no piece changes a token."""
        answer: Any = None
        with closing(start()) as chain:
            while True:
                try:
                    request: Any = chain.send(answer)
                except StopIteration as end:
                    return end.value
                answer = request.trajectory
                while not answer.complete(request.horizon):
                    upto = min(request.horizon, answer.length + _TOKENS)
                    answer = yield request._replace(trajectory=answer, horizon=upto)
                    self._tell(answer)

    def _tell(self, path: Trajectory) -> None:
        text = cut(self._decode(path.tokens), self._stop).rstrip("\ufffd")
        beginnings = (string[:length] for string in self._stop for length in range(1, len(string)))
        text = text[: len(text) - max(map(len, filter(text.endswith, beginnings)), default=0)]
        if len(text) > len(self.text) and text.startswith(self.text):
            self._put(Piece(self._number, path, text[len(self.text):], self.begin))
            self.text, self.begin = text, path.length

    def rest(self, answer: "DrawnAnswer") -> Piece:
        """What follows the parts that were told. Raises HTTPException if they do not fit together."""
        if not answer.text.startswith(self.text):
            raise HTTPException(500, "the tokenizer changed a text that was told before; ask without stream")
        return Piece(self._number, answer.result.trajectory, answer.text[len(self.text):], self.begin, answer)


class TextScorer:
    """Log p of each token of a text at temperature 1, and the most likely token at its place.

    The text is forced once the sampler's chain has ended. The place of a token that is not the most likely one costs a further
    forward, which draws that one.

    Args:
        echo: whether the tokens of the prompt are scored too, from the second on.
        top: whether the most likely tokens are wanted.
    """

    def __init__(self, echo: bool, top: bool):
        self.echo, self._top = echo, top
        self.path: Trajectory | None = None
        self.most_likely: list[tuple[int, float]] | None = None

    def after(self, start: Callable[[], Chain]) -> Chain:
        """The chain of a sampler, and then the operations that score its text."""
        with closing(start()) as chain:
            result = yield from chain
        text = result.trajectory.sequence
        first = 1 if self.echo else len(result.trajectory.prompt)
        greedy = SamplingParams(temperature=0.0)
        path = Trajectory.start(text[:first])
        if first < len(text):
            path = yield Score(path, text[first:], greedy)
        self.path = path
        if not self._top:
            return result
        self.most_likely = []
        for position in range(path.length):
            # log q of temperature 0 is 0 for the most likely token, and -inf for others.
            one: Trajectory = path.prefix(position + 1)
            if path.log_q[position] != 0.0:
                one = yield Draw(path.prefix(position), position + 1, greedy, Key(0))
            self.most_likely.append((int(one.tokens[position]), float(one.log_p[position])))
        return result


class Bodies(NamedTuple):
    """The bodies of the answers to a request."""

    id: str
    created: int
    model: str
    seed: int
    chat: bool
    prompt_tokens: int
    texts: TokenTexts | None
    """Tells the bytes of tokens; None if log p was not asked for."""
    token_ids: bool
    """Whether the token ids were asked for."""
    echoes: Sequence[str]
    """By answer: the prompt's text, if it was asked for, or nothing."""
    scorers: Sequence[TextScorer | None]
    """By answer: the log probabilities, where more than those of the answer's own tokens were asked for."""

    def whole(self, parts: Sequence[Piece]) -> dict[str, Any]:
        """The body with all answers."""
        return {**self._top(""), "choices": [self._choice(part, "message") for part in parts], "usage": self.usage(parts)}

    async def events(self, parts: AsyncIterator[Piece], include_usage: bool) -> AsyncIterator[bytes]:
        """Parts of answers as server-sent events."""
        top, ended = self._top(".chunk"), list[Piece]()
        try:
            async for part in parts:
                ended += [part] if part.answer is not None else []
                yield _event({**top, "choices": [self._choice(part, "delta")]})
        except (UserError, HTTPException) as error:  # the status has been sent
            yield _event(error_of(error)[1])
            return
        if include_usage:
            yield _event({**top, "choices": [], "usage": self.usage(ended)})
        yield b"data: [DONE]\n\n"

    def usage(self, parts: Sequence[Piece]) -> dict[str, int]:
        """Tokens of prompts and answers, and the cost of the chains in token-forwards."""
        drawn = sum(part.path.length for part in parts)
        costs = [(part.answer.cost.token_forwards, part.answer.cost.prompt_forwards) for part in parts if part.answer]
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": drawn, "total_tokens": self.prompt_tokens + drawn,
                "token_forwards": Cost.together(costs) if costs else 0}

    def _top(self, kind: str) -> dict[str, Any]:
        name = ("chat.completion" + kind) if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model,
                "dflash_mcmc": {"seed": self.seed}}

    def _choice(self, part: Piece, key: str) -> dict[str, Any]:
        path, answer, text = part.path, part.answer, self.echoes[part.number] + part.text
        role = {"role": "assistant"} if part.begin == 0 else {}  # the first part alone, since clients join the parts
        content = {key: {**role, "content": text}} if self.chat else {"text": text}
        ids = {"token_ids": path.tokens.tolist()[part.begin:]} if self.token_ids else {}
        ids |= {name: sets[part.begin:] for name, sets in path.sampling_mask().items()}
        end: dict[str, Any] = {}
        if answer is not None:
            details = {"log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum()),
                       "proposals": answer.result.proposals, "accepted": answer.result.accepted, "moved": answer.result.moved,
                       "token_forwards": answer.cost.token_forwards, "finish_reason": answer.finish_reason,
                       "tokens": path.tokens.tolist()}
            if self.texts is not None and np.isfinite(path.log_q).all():
                details["token_log_q"] = path.log_q.tolist()
            end = {"dflash_mcmc": details}
        return {"index": part.number, **content, **ids, "logprobs": self.texts and self._logprobs(part, self.texts),
                "finish_reason": answer and _REASONS[answer.finish_reason], **end}

    def _logprobs(self, part: Piece, texts: TokenTexts) -> dict[str, Any]:
        scorer, path, most_likely = self.scorers[part.number], part.path, None
        if scorer is not None and scorer.path is not None:
            path, most_likely = scorer.path, scorer.most_likely
        tokens, log_p = path.tokens.tolist(), path.log_p.tolist()
        if self.chat:
            content = [{"token": piece.decode(errors="replace"), "logprob": value, "bytes": list(piece), "top_logprobs": []}
                       for piece, value in zip(texts.shown(tokens), log_p, strict=True)]
            return {"content": content[part.begin:], "refusal": None}
        tops: list[Any] | None = most_likely and [{texts.shown([token])[0].decode(errors="replace"): value}
                                                  for token, value in most_likely]
        if scorer is not None and scorer.echo:  # the first token follows nothing
            tokens, log_p, tops = [*path.prompt.tolist(), *tokens], [None, *log_p], tops and [None, *tops]
        pieces = [piece.decode(errors="replace") for piece in texts.shown(tokens)]
        offsets = list(accumulate(map(len, pieces[:-1]), initial=0)) if pieces else []
        return {"tokens": pieces[part.begin:], "token_logprobs": log_p[part.begin:], "top_logprobs": tops,
                "text_offset": offsets[part.begin:]}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"

