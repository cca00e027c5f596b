"""A server in the test's process that draws all its requests in one batch, right or with a fault that load alone shows."""

import json
import shutil
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.process.http import NoReplyError
from dflash_mcmc.verify.drawn import _TINY

FAULTS = {"late": "a rejection is applied a step late", "neighbour": "logits of the row before are drawn from",
          "seed": "a request has the seed of the one before", "stale": "a row that was preempted keeps keys of another one",
          "bonus": "the token n + 1 is that of the row before"}
_DRAFTED = 3
"""Tokens that a step drafts; the next one is drawn from the target itself."""
_NEXT = 1 << 24
"""The distance of the seeds of two answers to one request."""


def one_layer(folder: Path) -> Path:
    """Writes the first layer of the embedded model as a model of its own: whatever its law is, it is fast."""
    shutil.copytree(_TINY, folder)
    whole = json.loads((folder / "config.json").read_text())
    whole |= {"num_hidden_layers": 1, "layer_types": whole["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(_TINY / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


class _Row:
    """A request in progress."""

    def __init__(self, body: Mapping[str, Any], seed: int):
        self.cache, self.limit = list(body["prompt"]), body["max_tokens"]
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.drawn, self.values, self.done, self.gone = list[int](), list[float](), threading.Event(), False
        self.rejected, self.preempted = False, False


class CraftedServer:
    """Answers requests at temperature 1 by speculative sampling from a flatter draft, whose law is that of the target.

    Args:
        fault: a key of `FAULTS`; empty for a right server.
        above: requests in progress up to which the fault does not appear. Once there were more, it stays until none is in
            progress, so that the audit of a slow machine, whose clients are late, sees it too.
    """

    def __init__(self, model: LanguageModel, fault: str = "", above: int = 0):
        self.model, self.fault, self.above = model, fault, above
        self._rows, self._asked, self._open = list[_Row](), threading.Condition(), True
        self._crowded = False
        self._known = dict[tuple[int, ...], torch.Tensor]()
        threading.Thread(target=self._serve, daemon=True).start()

    def fetch(self, url: str, body: dict[str, Any] | None = None, *, seconds: float, **options: Any) -> Any:
        """In place of `process.http.fetch_json`."""
        if body is None:
            return {"data": [{"id": "crafted", "owned_by": "crafted"}]}
        with self._asked:
            shared = self.fault == "seed" and self._rows and len(self._rows) >= self.above
            rows = [_Row(body, (self._rows[-1].seed if shared else body["seed"]) + _NEXT * place)
                    for place in range(body.get("n", 1))]
            self._rows += rows
            self._asked.notify()
        for row in rows:
            if not row.done.wait(seconds):
                row.gone = True
                raise NoReplyError("left", timed_out=True)
        return {"choices": [{"token_ids": row.drawn, "text": "", "logprobs": {"token_logprobs": row.values}} for row in rows]}

    def close(self) -> None:
        with self._asked:
            self._open = False
            self._asked.notify()

    def _serve(self) -> None:
        while True:
            with self._asked:
                self._crowded &= bool(self._rows)
                self._asked.wait_for(lambda: self._rows or not self._open)
                if not self._open:
                    return
                rows = [row for row in self._rows if not row.gone]
            if rows:
                self._step(rows)
            with self._asked:
                self._rows = [row for row in self._rows if not row.done.is_set() and not row.gone]

    def _step(self, rows: list[_Row]) -> None:
        self._crowded |= len(rows) > self.above
        crowded = self._crowded
        if crowded and self.fault == "stale":
            for row, other in pairwise(rows):
                if row.drawn and not row.preempted:
                    row.preempted, row.cache[-1] = True, other.cache[-1]
        logits = torch.stack(self._logits([tuple(row.cache) for row in rows]))
        target, draft = logits.softmax(-1).numpy(), (logits / 2.0).softmax(-1).numpy()
        if crowded and self.fault == "neighbour":
            target, draft = np.roll(target, 1, axis=0), np.roll(draft, 1, axis=0)
        tokens = [self._token(row, p, q, crowded) for row, p, q in zip(rows, target, draft, strict=True)]
        if crowded and self.fault == "bonus":
            tokens = [tokens[place - 1] if self._is_bonus(row) else tokens[place] for place, row in enumerate(rows)]
        for row, token, p in zip(rows, tokens, target, strict=True):
            row.drawn.append(token)
            row.cache.append(token)
            row.values.append(float(np.log(p[token])))
            if len(row.drawn) == row.limit or token in self.model.stop_ids:
                row.done.set()

    def _logits(self, texts: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """The logits behind each text, float64 (vocabulary,). A text that comes again is not computed again."""
        if missing := [text for text in dict.fromkeys(texts) if text not in self._known]:
            lengths = torch.tensor([len(text) for text in missing])
            padded = torch.zeros(len(missing), int(lengths.max()), dtype=torch.int64)
            for place, text in zip(padded, missing, strict=True):
                place[: len(text)] = torch.tensor(text)
            with torch.no_grad():
                hidden = sequences.read(self.model, padded).hidden[torch.arange(len(missing)), lengths - 1]
                found = self.model.logits(hidden).double().masked_fill(self.model.forbidden, -torch.inf)
            self._known.update(zip(missing, found, strict=True))
        return [self._known[text] for text in texts]

    @staticmethod
    def _is_bonus(row: _Row) -> bool:
        return len(row.drawn) % (_DRAFTED + 1) == _DRAFTED

    def _token(self, row: _Row, p: np.ndarray, q: np.ndarray, crowded: bool) -> int:
        of_draft, of_acceptance, of_residual = row.rng.random(3)
        if self._is_bonus(row):
            return _inverse(p, of_draft)
        drafted = _inverse(q, of_draft)
        rejected = of_acceptance * q[drafted] >= p[drafted]
        now, row.rejected = (row.rejected if crowded and self.fault == "late" else rejected), rejected
        return _inverse(np.maximum(p - q, 0.0), of_residual) if now else drafted


def _inverse(weights: np.ndarray, uniform: float) -> int:
    upto = weights.cumsum()
    return int(np.searchsorted(upto, uniform * upto[-1], side="right"))
