"""The audit of a law: reads what was drawn along the target, one text after another, and keeps the evidence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.layers import pieces
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.registry import name_of
from dflash_mcmc.verify.evidence import Evidence, Repeats, Rounding, Steps, bets_of, payments, shift_of

if TYPE_CHECKING:
    from dflash_mcmc.blend import Blend
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.verify.drawn import DrawnText
    from dflash_mcmc.verify.evidence import Bet, BetEvidence, Payments, Shift

_NEAR, _NEAR_BFLOAT16 = 0.1, 0.5
"""The distance of logits within which a token outside counts as a near-tie of another rounding. bfloat16 rounds logits between
16 and 32 to multiples of 0.125, after many roundings on the way."""
_MASS, _MASS_BFLOAT16 = 1e-3, 0.02
"""The mass behind `top_p` in which a token counts as a near-tie, too."""
OFF = 0.02
"""The mean distance a token of a stated log p, in nats, above which it is wrong."""


class Audit(NamedTuple):
    """What an audit has found.

    Attributes:
        law: the stated law of a token; None if only log p could be compared, since the texts are states of a chain or were
            drawn until one ended.
        bets: the bets, and `each` the evidence of each.
        together: the evidence of all, which decides.
        course: (texts, 2), tokens and log10 of the evidence of all together after each text.
        top: the shift of the share of most likely tokens.
        outside: the tokens that the law cannot draw: text, place in it, and distance from the kept ones in nats.
        near, near_ties: the distance in nats within which they are near-ties of another rounding, and the number of those.
        kept_otherwise: whether the law can draw all others in the other order of truncation and temperature.
        log_p_error: the mean and the largest distance a token between stated and recomputed log p, in nats; None if none
            is stated.
        at: where the texts are from, before the verdict; empty for all texts.
        texts, tokens: their numbers.
        left_out: texts of a run that is not complete, behind the first one that it lacks.
        defaults: steps that the checkpoint's generation_config.json sets and the stated law lacks, in words.
    """

    law: SamplingParams | None
    level: float
    bets: tuple[Bet, ...]
    each: tuple[BetEvidence, ...]
    together: BetEvidence
    course: np.ndarray
    top: Shift | None
    outside: tuple[tuple[str, int, float], ...]
    near: float
    near_ties: int
    kept_otherwise: bool
    log_p_error: tuple[float, float] | None
    texts: int
    tokens: int
    left_out: int = 0
    defaults: str = ""
    at: str = ""

    @property
    def is_red(self) -> bool:
        """Whether the texts do not follow what was stated."""
        impossible = len(self.outside) > self.near_ties
        wrong = self.log_p_error is not None and self.log_p_error[0] > OFF
        return impossible or wrong or self.together.red_at is not None

    @property
    def best(self) -> int:
        """The bet with the largest evidence."""
        return max(range(len(self.each)), key=lambda place: self.each[place].evidence)


def audit(model: LanguageModel, texts: Iterable[DrawnText], law: SamplingParams | None, level: float,
          blend: Blend | None = None, processed: bool = False) -> Audit:
    """Audits texts against a law.

    Args:
        law: how each token was drawn from the target's logits, as it is stated; None compares log p alone.
        level: the probability of a false alarm that is allowed.
        blend: a change of the target's last hidden state by its layers.
        processed: whether the texts' log p is that of the law, and not the target's.

    Raises:
        ConfigError: for a blend that needs a draft or mixes logits.
    """
    if blend is not None and (blend.needs_draft or blend.needs_companion):
        raise ConfigError("blend", name_of(blend), "none, or a blend of the target's own hidden states")
    read = law or SamplingParams(temperature=0.0)  # which pays nothing, so that log p alone is compared
    near = near_of(model, read.temperature or 1.0)
    learned, steps = (Repeats(), Steps()) if read.temperature > 0.0 else (None, None)
    more = (*(learned.bets if learned else ()), *(steps.bets if steps else ()))
    evidence = Evidence([*bets_of(read), *more], level)
    course, tops, outside, errors, kept_otherwise = [], [], [], [], True
    for text in texts:
        paid = read_text(model, text, read, blend)
        paths = [paid.log] + ([learned.payments(text.prompt, text.tokens, paid.log_p)] if learned else [])
        evidence.add(np.hstack([*paths, *([steps.payments(text.steps, paid.top, paid.expected_top)] if steps else [])]))
        if text.log_p is not None:
            errors.append(abs(text.log_p - (paid.log_p if processed else paid.target_log_p).sum()) / len(text.tokens))
        if law is not None:
            tops.append(np.stack([paid.top, paid.expected_top]))
            kept_otherwise &= bool(paid.kept_otherwise[paid.outside > near].all())
            outside += [(text.name, int(place), float(paid.outside[place])) for place in np.flatnonzero(paid.outside > 0.0)]
        course.append((evidence.tokens, evidence.together().evidence))
    if not course:
        raise ConfigError("TARGET", "no text", "at least one text with a token")
    shares = np.concatenate(tops, axis=1) if read.temperature > 0.0 else None
    top = None if shares is None else shift_of(shares[0], shares[1], level)
    return Audit(law, level, evidence.bets, tuple(evidence.each()), evidence.together(), np.array(course), top,
                 tuple(outside), near, sum(distance <= near for _, _, distance in outside), kept_otherwise,
                 (float(np.mean(errors)), max(errors)) if errors else None, len(course), evidence.tokens)


def near_of(model: LanguageModel, temperature: float) -> float:
    """The distance in nats at a temperature within which tokens are near-ties of another rounding."""
    return _NEAR_BFLOAT16 / temperature if model.dtype == torch.bfloat16 else _NEAR


@torch.no_grad()
def read_text(model: LanguageModel, text: DrawnText, law: SamplingParams, blend: Blend | None) -> Payments:
    """What the tokens of a text pay, and their log p."""
    layers = () if blend is None else blend.tapped_layers(len(model.layers))
    sequence = torch.from_numpy(np.concatenate([text.prompt, text.tokens])).to(model.device)
    reading, first = sequences.read(model, sequence[None], layers), len(text.prompt) - 1
    last, outputs = (reading.hidden[0, first:-1], [output[0, first:-1] for output in reading.outputs])

    def logits(piece: slice) -> torch.Tensor:
        state = last[piece]
        if blend is not None and not blend.is_null:
            state = blend.mix(state, [output[piece] for output in outputs], model.final_norm)
        return sequences.checked(model.logits(state))

    near = Rounding(near_of(model, law.temperature or 1.0), _MASS_BFLOAT16 if model.dtype == torch.bfloat16 else _MASS)
    return payments(logits, text.prompt, text.tokens, law, list(pieces(model, len(text.tokens))), near)
