"""A completions server in the test's process, over a toy model, with the faults that real servers have."""

import json
import math
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np

from dflash_mcmc.engine.oracle.tabular import TabularModel
from dflash_mcmc.process.http import NoReplyError
from tests.laws import conditional, logits_of

_LAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


class Standing:
    """Answers requests by the definition of the law of a token.

    Args:
        model: the toy.
        kind: what the server calls itself.
        processed: whether log p is that of the law of the request.
        echoes: whether given tokens are scored; llama.cpp ignores that they are asked for.
        law: parameters that the server sets by itself, whatever is asked for.
        spoil: changes a reply, given its number and the request; what it returns is sent.
        text: the text of tokens.
    """

    def __init__(self, model: TabularModel, kind: str = "vllm", processed: bool = False, echoes: bool = True,
                 law: dict[str, Any] | None = None,
                 spoil: Callable[[int, dict, dict], dict] = lambda number, body, reply: reply,
                 text: Callable[[list[int]], str] = lambda tokens: ""):
        self.model, self.kind, self.processed, self.echoes, self.spoil = model, kind, processed, echoes, spoil
        self.law, self.bodies, self.text = law or {}, list[dict[str, Any]](), text
        self._laws: dict[tuple, dict[int, float]] = {}
        self._lock = threading.Lock()

    def fetch(self, url: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        """In place of `process.http.fetch_json`."""
        if url.endswith("/models"):
            return {"data": [{"id": "toy", "owned_by": self.kind}]}
        body = json.loads(json.dumps(body))
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies)
        if body.get("echo") and not self.echoes and self.kind != "llamacpp":
            raise NoReplyError("status 400: echo is not supported", 400)
        return self.spoil(number, body, {"choices": [self._choice(body)]})

    def probabilities(self, prefix: tuple[int, ...], **law: Any) -> dict[int, float]:
        key = (prefix, tuple(sorted(law.items())))
        if key not in self._laws:
            self._laws[key] = self._of(prefix, law)
        return self._laws[key]

    def _of(self, prefix: tuple[int, ...], law: dict[str, Any]) -> dict[int, float]:
        if law.get("temperature") == 0.0:
            logits = logits_of(self.model, prefix, None)
            return {logits.index(max(logits)): 1.0}
        return dict(sorted(conditional(logits_of(self.model, prefix, None), prefix, **law).items()))

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        law = {**{name: body[name] for name in _LAW if name in body}, **self.law}
        law["top_k"] = max(0, law.get("top_k", 0))
        prompt, drawn, stops = tuple(body["prompt"]), list[int](), {*self.model.stop_ids, *body.get("stop_token_ids", ())}
        stream, reason = np.random.default_rng(body.get("seed", 0)), "length"
        for _ in range(body["max_tokens"]):
            p = self.probabilities((*prompt, *drawn), **law)
            drawn.append(int(stream.choice(list(p), p=np.array(list(p.values())) / sum(p.values()))))
            if drawn[-1] in stops:
                reason = "stop"
                break
        echoes = body.get("echo") and self.echoes
        shown, first = ([*prompt, *drawn], 0) if echoes else (drawn, len(prompt))
        values, top = list[float | None](), list[dict[str, float] | None]()
        for place, token in enumerate(shown, start=first):
            prefix = (*prompt, *drawn)[:place]
            raw = self.probabilities(prefix) if prefix else {}
            told = self.probabilities(prefix, **law) if self.processed and place >= len(prompt) else raw
            values.append(math.log(told.get(token, 1e-9)) if prefix else None)  # a prompt may have other ids
            most = sorted(told, key=lambda other: -told[other])[: body["logprobs"]]
            top.append({f"token_id:{other}": math.log(told[other]) for other in most} if prefix else None)
        if self.kind == "llamacpp":
            content = [{"id": token, "logprob": value, "top_logprobs": [
                {"id": int(name[9:]), "logprob": of} for name, of in (row or {}).items()]}
                for token, value, row in zip(shown, values, top, strict=True)]
            return {"text": self.text(drawn), "logprobs": {"content": content}, "finish_reason": reason}
        names = [f"token_id:{token}" for token in shown]
        return {"text": self.text(drawn), "token_ids": drawn, "finish_reason": reason,
                "logprobs": {"tokens": names, "token_logprobs": values, "top_logprobs": top}}


class Listening:
    """A `Standing` behind a socket. `answer` may send something else: it gets the handler, the number and the reply."""

    def __init__(self, standing: Standing, answer: Callable[[BaseHTTPRequestHandler, int, bytes], bool] | None = None):
        numbers = iter(range(1, 1 << 30))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: dict[str, Any] | None) -> None:
                try:
                    sent = json.dumps(standing.fetch(self.path, body)).encode()
                except NoReplyError as refused:
                    return self.whole(refused.status or 500, b'{"error": "refused"}')
                if answer is None or body is None or not answer(self, next(numbers), sent):
                    self.whole(200, sent)

            def whole(self, status: int, sent: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
