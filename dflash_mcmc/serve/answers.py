"""Answers in the format of OpenAI, errors included, with further fields under `dflash_mcmc`."""

import json
import reprlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dflash_mcmc.engine.batching.stop_strings import TokenTexts
from dflash_mcmc.errors import UserError, one_line
from dflash_mcmc.ops import Chain, Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.serve.workers import DrawnAnswer
from dflash_mcmc.store import records
from dflash_mcmc.types import Cost, Trajectory

_REASONS = {records.STOP_ID: "stop", records.STOP_STRING: "stop", records.LENGTH: "length"}


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

    def whole(self, answers: Mapping[int, DrawnAnswer]) -> dict[str, Any]:
        """The body with all answers, by their numbers."""
        choices = [self._choice(number, answers[number], "message") for number in sorted(answers)]
        return {**self._top(""), "choices": choices, "usage": self.usage(answers.values())}

    async def events(self, ended: AsyncIterator[tuple[int, DrawnAnswer]], include_usage: bool) -> AsyncIterator[bytes]:
        """Each answer as a server-sent event when it ends: a chain may replace any token until then."""
        top, answers = self._top(".chunk"), list[DrawnAnswer]()
        try:
            async for number, answer in ended:
                answers.append(answer)
                yield _event({**top, "choices": [self._choice(number, answer, "delta")]})
        except (UserError, HTTPException) as error:  # the status has been sent
            yield _event(error_of(error)[1])
            return
        if include_usage:
            yield _event({**top, "choices": [], "usage": self.usage(answers)})
        yield b"data: [DONE]\n\n"

    def usage(self, answers: Iterable[DrawnAnswer]) -> dict[str, int]:
        """Tokens of prompts and answers, and the cost of the chains in token-forwards."""
        costs = [(answer.cost.token_forwards, answer.cost.prompt_forwards) for answer in answers]
        drawn = sum(answer.result.trajectory.length for answer in answers)
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": drawn, "total_tokens": self.prompt_tokens + drawn,
                "token_forwards": Cost.together(costs) if costs else 0}

    def _top(self, kind: str) -> dict[str, Any]:
        name = ("chat.completion" + kind) if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model,
                "dflash_mcmc": {"seed": self.seed}}

    def _choice(self, number: int, answer: DrawnAnswer, key: str) -> dict[str, Any]:
        path, text = answer.result.trajectory, self.echoes[number] + answer.text
        content = {key: {"role": "assistant", "content": text}} if self.chat else {"text": text}
        ids = {"token_ids": path.tokens.tolist()} if self.token_ids else {}
        details = {"log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum()),
                   "proposals": answer.result.proposals, "accepted": answer.result.accepted, "moved": answer.result.moved,
                   "token_forwards": answer.cost.token_forwards, "finish_reason": answer.finish_reason,
                   "tokens": path.tokens.tolist()}
        if self.texts is not None and np.isfinite(path.log_q).all():
            details["token_log_q"] = path.log_q.tolist()
        return {"index": number, **content, **ids, **path.sampling_mask(),
                "logprobs": self.texts and self._logprobs(path, self.scorers[number], self.texts),
                "finish_reason": _REASONS[answer.finish_reason], "dflash_mcmc": details}

    def _logprobs(self, path: Trajectory, scorer: TextScorer | None, texts: TokenTexts) -> dict[str, Any]:
        most_likely = None
        if scorer is not None and scorer.path is not None:
            path, most_likely = scorer.path, scorer.most_likely
        tokens, log_p = path.tokens.tolist(), path.log_p.tolist()
        if self.chat:
            content = [{"token": piece.decode(errors="replace"), "logprob": value, "bytes": list(piece), "top_logprobs": []}
                       for piece, value in zip(texts.shown(tokens), log_p, strict=True)]
            return {"content": content, "refusal": None}
        tops: list[Any] | None = most_likely and [{texts.shown([token])[0].decode(errors="replace"): value}
                                                  for token, value in most_likely]
        if scorer is not None and scorer.echo:  # the first token follows nothing
            tokens, log_p, tops = [*path.prompt.tolist(), *tokens], [None, *log_p], tops and [None, *tops]
        pieces = [piece.decode(errors="replace") for piece in texts.shown(tokens)]
        offsets = list(accumulate(map(len, pieces[:-1]), initial=0)) if pieces else []
        return {"tokens": pieces, "token_logprobs": log_p, "top_logprobs": tops, "text_offset": offsets}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"

