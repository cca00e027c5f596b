"""The distance a token between the law that an engine of this package draws from and the stated one: that of rounding.

The drawn law is the engine's, in its own precision, with so many tokens a step: 1 without speculation, k + 1 with blocks of k.
The stated one is that of the same weights in float32. Both are whole vectors at a place of a text, so that their total
variation there is exact. Its mean over places that are drawn with equal probability estimates the mean over all tokens without
bias. An interval by betting covers that mean (Waudby-Smith and Ramdas, arXiv 2010.09686, section 4). It assumes only that a
distance lies in [0, 1].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.blend import Blend
from dflash_mcmc.engine.batching import attention
from dflash_mcmc.engine.batching.cache import KVCache, round_up
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.logits_processor import process
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process import bars
from dflash_mcmc.verify.audit import Shift, history_of, log_mean
from dflash_mcmc.verify.drawn import DrawnText

_KEYS, _PIECE = 64, 256
"""Lengths of keys are multiples of the first, as in the engine. A prompt is read in pieces of at most the second."""
_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95])
"""The shares of the stake that a value can lose in the bets of an interval."""


class Distance(NamedTuple):
    """How far two laws of a token are apart, over the tokens of the texts.

    Attributes:
        between: the two laws.
        tv: the mean total variation a token with its interval.
        largest: the largest one.
        nats: the mean distance of log p of the tokens that were drawn, where both laws can draw them.
        answer: `tv.high` times the mean number of tokens of an answer, which bounds the total variation of whole answers.
        places, tokens: the numbers of places that were drawn and of all tokens.
    """

    between: str
    tv: Shift
    largest: float
    nats: float
    answer: float
    places: int
    tokens: int


def distances(model: LanguageModel, reference: LanguageModel, texts: Sequence[DrawnText], law: SamplingParams, count: int,
              width: int, level: float, seed: int, blend: Blend | None = None) -> list[Distance]:
    """The distances from the law of the float32 reference and, of wider steps, from that of single tokens.

    Args:
        count: the places to draw. If there are no more tokens, all are taken, and the mean has no error of sampling.
        width: tokens that a step of the engine reads.
        level: the probability that an interval does not cover its mean.

    Raises ConfigError for a model with recurrent layers.
    """
    if model.recurrent_nets:
        raise ConfigError("--distance", "a model with recurrent layers", "a model of attention layers")
    total, ends = sum(len(text.tokens) for text in texts), np.cumsum([len(text.tokens) for text in texts])
    chosen, times = sampled(total, count, seed)
    precision, plural = str(model.dtype).removeprefix("torch."), "s" * (width > 1)
    measured: dict[str, list[np.ndarray]] = defaultdict(list)
    others = {f"{width} token{plural} a step, {precision}, against float32": (reference, None)} | (
        {f"{width} tokens a step against 1, {precision}": (model, 1)} if width > 1 else {})
    with bars.Bar(len(texts), "text", "measuring") as bar:
        for text, end in zip(texts, ends.tolist(), strict=True):
            start = end - len(text.tokens)
            if len(places := chosen[(chosen >= start) & (chosen < end)] - start):
                law_drawn = laws_of(model, text, law, places, width, blend)
                tokens = torch.from_numpy(text.tokens[places])[:, None].to(law_drawn.device)
                for between, (other, steps) in others.items():
                    stated = laws_of(other, text, law, places, steps, blend)
                    nats = (law_drawn.gather(1, tokens) - stated.gather(1, tokens)).abs()[:, 0].cpu().numpy()
                    measured[between].append(np.stack([total_variation(law_drawn, stated), nats]))
            bar.update(tokens=len(text.tokens))
    return [_distance(name, np.concatenate(each, axis=1), times, total, len(texts), level) for name, each in measured.items()]


def sampled(total: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Different places below `total`, and for each of `count` draws with replacement its place in them; or all, each once."""
    if count >= total:
        return np.arange(total), np.arange(total)
    return np.unique(np.random.default_rng(seed).integers(total, size=count), return_inverse=True)


def mean_interval(values: np.ndarray, level: float) -> Shift:
    """The mean of independent values in [0, 1] with an interval that covers their expectation with probability 1 - level.

    Two players bet against each mean, on larger and on smaller values, in a game that is fair if it is the expectation. A mean
    at which one of them has multiplied the stake by 2 / level is left out. The order of the values does not matter.
    """
    def is_out(mean: float, above: bool) -> bool:
        gain = values / mean - 1.0 if above else (mean - values) / (1.0 - mean)
        return log_mean(np.log1p(_SHARES[:, None] * gain).sum(axis=1)[None])[0] - np.log(len(_SHARES)) >= np.log(2.0 / level)

    average, ends = float(values.mean()), []
    for above in (True, False):
        inside, outside = average, 0.0 if above else 1.0
        for _ in range(50 if average != outside else 0):
            middle = (inside + outside) / 2.0
            inside, outside = (inside, middle) if is_out(middle, above) else (middle, outside)
        ends.append(outside)
    return Shift(average, *ends)


def total_variation(one: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    """The total variation of each row of two float64 tensors of log probabilities, (rows, vocabulary)."""
    return ((one.exp() - other.exp()).abs().sum(dim=1) / 2.0).clamp(max=1.0).cpu().numpy()


@torch.no_grad()
def laws_of(model: LanguageModel, text: DrawnText, law: SamplingParams, places: np.ndarray, width: int | None,
            blend: Blend | None) -> torch.Tensor:
    """Log probabilities of every token at places of an answer, float64 (places, vocabulary).

    Args:
        width: tokens that a step reads after the prompt; None reads prompt and answer in long pieces.
    """
    sequence, first = np.concatenate([text.prompt, text.tokens]), len(text.prompt) - 1
    size, start = (_PIECE, 0) if width is None else (width, first)
    length = round_up(len(sequence) + size, _KEYS)
    runner = ModelRunner(model, blend, attention.implementation("auto", model.device, model.changes_scores),
                         length, _KEYS, _PIECE)
    cache, rows = KVCache(model.cache_shape, 1, length, model.device), []
    with runner.ready():
        runner.read(cache, [Span(0, sequence, 0, start)] if start else [])
        for here in range(start, len(sequence) - 1, size):
            hidden = runner.states(cache, [Span(0, sequence, here, min(here + size, len(sequence)))], size)[0]
            wanted = places[(places + first >= here) & (places + first < here + size)] + first - here
            if len(wanted):
                at = torch.from_numpy(wanted).to(model.device)
                rows.append(runner.logits(hidden[at], [state[0, at] for state in runner.tapped], ())["blended"])
    logits = sequences.checked(torch.cat(rows))
    kept = [process(each[None], law, history_of(each[None], text.prompt, text.tokens, law, slice(place, place + 1)))
            for each, place in zip(logits, places.tolist(), strict=True)]
    return torch.log_softmax(torch.cat(kept).double(), dim=-1)


def _distance(between: str, measured: np.ndarray, times: np.ndarray, total: int, texts: int, level: float) -> Distance:
    values, nats = measured[0][times], measured[1][times]
    tv = mean_interval(values, level) if len(values) < total else Shift(*[float(values.mean())] * 3)
    finite = nats[np.isfinite(nats)]
    return Distance(between, tv, float(measured[0].max()), float(finite.mean()) if len(finite) else 0.0,
                    min(1.0, tv.high * total / texts), len(values), total)
