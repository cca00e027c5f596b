"""Walks along an answer block by block, with a frozen draft and with drafts that learn. The record of an answer.

The walk drafts a block at its anchor and keeps the drafted tokens before the first one that differs from the answer. The
answer's token replaces that one and is the next anchor. A second set of blocks, at every B-th token of the answer, gives the
draft's log-probability of each token. These blocks are the same for all settings, so that the means are over the same tokens.
The draft has then learned what the walk has learned up to them.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.draft.adaptation.learning import Adapter, AdaptSettings, Blocks, LowRankDraft, Student, padded
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.answers import Answer

FROZEN = "frozen"
_BLOCKS_AT_ONCE = 32


def name_of(settings: AdaptSettings) -> str:
    """The name of a setting in records and tables."""
    pace = f"{settings.steps} steps" if settings.mode == "context" else f"every {settings.every_blocks}"
    return f"{settings.mode}, {settings.modules}, rank {settings.rank}, rate {settings.rate:g}, {pace}"


class _Text(NamedTuple):
    """An answer after its prompt, and what the target gives for it."""

    tokens: np.ndarray
    """int64 (length,), prompt and answer."""
    start: int
    """Position of the answer's first token."""
    features: torch.Tensor
    """(1, length, features), in the draft's dtype."""
    hidden: torch.Tensor
    """(length, hidden), the target's last states."""


class Walker:
    """Measures answers with one draft.

    Args:
        drafter: the draft, as its checkpoint is.
        settings: how it learns.
    """

    def __init__(self, drafter: DFlashDrafter, settings: list[AdaptSettings]):
        self._drafter, self._target, self._settings = drafter, drafter.target, settings
        table = drafter.target.decoder.get_input_embeddings().weight
        self._students = {name_of(each): Student(LowRankDraft(drafter.network, each.modules, each.rank), table, drafter.logits,
                                                 drafter.num_drafted, each) for each in settings}

    def record(self, answer: Answer) -> dict:
        """The record of an answer of at least two tokens. Raises NotNumbers.

        For every setting it has the blocks as pairs (offset in the answer, tokens gained), log q of the tokens that the second
        set of blocks drafts, the steps, the dropped steps, and the seconds of the steps.
        """
        layers = self._drafter.tapped_layers
        tokens = torch.from_numpy(answer.sequence).to(self._target.device)
        reading = sequences.read(self._target, tokens[None], layers)
        features = reading.features(self._target, layers).to(self._drafter.dtype)
        text = _Text(answer.sequence, len(answer.prompt), features, reading.hidden[0])
        frozen = next(iter(self._students.values()))
        found = {FROZEN: self._frozen(frozen, text, Adapter.fresh(frozen.start), Adapter.fresh(frozen.start), 0.0)}
        for name, student in self._students.items():
            adapter, started = Adapter.fresh(student.start), time.perf_counter()
            if student.settings.mode == "online":
                found[name] = self._online(student, text, adapter)
                continue
            if text.start > 1:
                student.learn_prompt(adapter, text.features[:, : text.start - 1], answer.prompt)
            found[name] = self._frozen(student, text, adapter, adapter, time.perf_counter() - started)
        log_p = self._log_p(text, self._drafted_at(text))
        if not np.isfinite(log_p).all():
            raise sequences.NotNumbers
        return {"num_tokens": len(answer.tokens), "prompt_length": text.start, "log_p": _short(log_p),
                "seconds": {name: entry.pop("seconds") for name, entry in found.items()}, "settings": found}

    @torch.no_grad()
    def _frozen(self, student: Student, text: _Text, adapter: Adapter, counted: Adapter, seconds: float) -> dict:
        """The record of a draft that learns nothing along the answer."""
        anchor, blocks, log_q = text.start - 1, [], []
        while anchor < len(text.tokens) - 1:
            gained = self._gained(student, text, adapter, anchor)
            blocks.append((anchor + 1 - text.start, gained))
            anchor += gained
        anchors = self._grid(text)
        for start in range(0, len(anchors), _BLOCKS_AT_ONCE):
            log_q.append(self._log_q(student, text, adapter, anchors[start : start + _BLOCKS_AT_ONCE]))
        return _entry(blocks, np.concatenate(log_q), counted, seconds)

    def _online(self, student: Student, text: _Text, adapter: Adapter) -> dict:
        """The record of a draft that learns from the blocks of the walk."""
        anchor, blocks, pending, seconds = text.start - 1, [], list[tuple[int, int]](), 0.0
        grid, log_q = list(self._grid(text)), []
        while anchor < len(text.tokens) - 1:
            with torch.no_grad():
                gained = self._gained(student, text, adapter, anchor)
                due = [at for at in grid if at < anchor + gained]
                if due:
                    log_q.append(self._log_q(student, text, adapter, np.array(due)))
            grid = grid[len(due) :]
            blocks.append((anchor + 1 - text.start, gained))
            pending.append((anchor, min(gained, student.num_drafted)))
            anchor += gained
            if len(pending) == student.settings.every_blocks:
                started = time.perf_counter()
                self._learn(student, text, adapter, pending)
                pending, seconds = [], seconds + time.perf_counter() - started
        return _entry(blocks, np.concatenate(log_q), adapter, seconds)

    def _learn(self, student: Student, text: _Text, adapter: Adapter, pending: list[tuple[int, int]]) -> None:
        """A step on the target's laws in the latest blocks. Slots without a kept token before them are not learned."""
        anchors, counts = (np.array(part) for part in zip(*pending, strict=True))
        at = torch.from_numpy(anchors[:, None] + np.arange(student.num_drafted)).clamp(max=len(text.tokens) - 1)
        with torch.no_grad():
            target = self._target.logits(text.hidden[at.flatten().to(text.hidden.device)]).view(*at.shape, -1)
        student.learn_verified(adapter, text.features, anchors, text.tokens[anchors], counts, target)

    def _gained(self, student: Student, text: _Text, adapter: Adapter, anchor: int) -> int:
        """Tokens of the answer that one forward of the target gives after an anchor."""
        proposed = student.logits(self._blocks(student, text, np.array([anchor])), adapter.values)[0].argmax(dim=-1)
        expected = text.tokens[anchor + 1 : anchor + 1 + student.num_drafted]
        same = proposed.cpu().numpy()[: len(expected)] == expected
        return min(int(same.cumprod().sum()) + 1, len(text.tokens) - 1 - anchor)

    def _log_q(self, student: Student, text: _Text, adapter: Adapter, anchors: np.ndarray) -> np.ndarray:
        """log q of the tokens that the blocks at these anchors draft, float64 (tokens,)."""
        logits = student.logits(self._blocks(student, text, anchors), adapter.values)
        at = anchors[:, None] + 1 + np.arange(student.num_drafted)
        inside = at < len(text.tokens)
        labels = torch.from_numpy(text.tokens[np.minimum(at, len(text.tokens) - 1)]).to(logits.device)
        log_q = torch.log_softmax(logits, dim=-1).gather(2, labels[..., None])[..., 0]
        return log_q.cpu().numpy()[inside].astype(np.float64)

    def _log_p(self, text: _Text, positions: np.ndarray) -> np.ndarray:
        """log p of the tokens at these positions under the target, float64 (tokens,)."""
        found, at_once = [], sequences.positions_at_once(self._target.vocab_size)
        with torch.no_grad():
            for part in torch.from_numpy(positions).to(text.hidden.device).split(at_once):
                laws = torch.log_softmax(self._target.logits(text.hidden[part - 1]), dim=-1)
                labels = torch.from_numpy(text.tokens[part.cpu().numpy()]).to(laws.device)
                found.append(laws.gather(1, labels[:, None])[:, 0].cpu().numpy().astype(np.float64))
        return np.concatenate(found)

    def _grid(self, text: _Text) -> np.ndarray:
        """Anchors of the second set of blocks: the prompt's last token, and every B-th token of the answer."""
        return np.arange(text.start - 1, len(text.tokens) - 1, self._drafter.num_drafted + 1)

    def _drafted_at(self, text: _Text) -> np.ndarray:
        """Positions of the tokens that the second set of blocks drafts."""
        at = (self._grid(text)[:, None] + 1 + np.arange(self._drafter.num_drafted)).flatten()
        return at[at < len(text.tokens)]

    def _blocks(self, student: Student, text: _Text, anchors: np.ndarray) -> Blocks:
        device, last = text.features.device, max(int(anchors[-1]), 1)
        return Blocks(*padded(text.features[:, :last]), torch.from_numpy(anchors).to(device),
                      torch.from_numpy(text.tokens[anchors]).to(device), torch.empty(0, student.num_drafted))


def _entry(blocks: list[tuple[int, int]], log_q: np.ndarray, adapter: Adapter, seconds: float) -> dict:
    return {"blocks": blocks, "log_q": _short(log_q), "steps": adapter.steps, "dropped": adapter.dropped,
            "seconds": round(seconds, 6)}


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]
