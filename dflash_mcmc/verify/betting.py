"""Evidence against a stated law that may be looked at after every token: test martingales, and an interval for a shift.

A bet pays q(x) / p(x) for a token x, where p is the stated law and q another one. If the tokens follow p, the product of the
payments is a martingale that starts at 1. It reaches 1 / level with a probability of at most `level`, at whatever token one
stops (Ville 1939; Ramdas et al. 2022, arXiv 2210.01948). The mean of several such products is one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Bet(NamedTuple):
    """A law that may explain the tokens better than the stated one."""

    group: str
    """The kind of departure. Each kind has the same share of the stake, and each bet the same share of its kind."""
    says: str
    """What is wrong with the tokens if the bet wins."""


class Standing(NamedTuple):
    """The evidence of a bet, or of all together, in factors of ten: log10 of the product of payments."""

    evidence: float
    """After the last token."""
    largest: float
    """The largest after any token."""
    red_at: int | None
    """The number of tokens after which it first reached 1 / level; None if it never did."""


class Ledger:
    """The products of payments of all bets, token by token.

    Args:
        bets: at least one.
        level: the probability of a false alarm that is allowed, in (0, 1).
    """

    def __init__(self, bets: Sequence[Bet], level: float):
        self.bets, self.level = tuple(bets), level
        groups = [bet.group for bet in bets]
        self._log_stake = -np.log([len(set(groups)) * groups.count(group) for group in groups])
        self._wealth = np.zeros(len(bets))
        self._largest = np.zeros(len(bets) + 1)
        self._red_at = np.zeros(len(bets) + 1, np.int64)
        self.tokens = 0

    def add(self, payments: np.ndarray) -> None:
        """Adds the log payments of further tokens, float64 (tokens, bets), in nats. -inf is a bet that is lost for good."""
        if not len(payments):
            return
        wealth = self._wealth + payments.cumsum(axis=0)
        together = _log_mean(wealth + self._log_stake)
        paths = np.column_stack([wealth, together])
        for place in np.flatnonzero(self._red_at == 0):
            if len(crossed := np.flatnonzero(paths[:, place] >= -np.log(self.level))):
                self._red_at[place] = self.tokens + crossed[0] + 1
        self._largest = np.maximum(self._largest, paths.max(axis=0))
        self._wealth = wealth[-1]
        self.tokens += len(payments)

    def together(self) -> Standing:
        """The standing of all bets together. It alone has the promise of `level`."""
        return self._standing(float(_log_mean((self._wealth + self._log_stake)[None])[0]), len(self.bets))

    def each(self) -> list[Standing]:
        """The standing of each bet. It says what is wrong, once all together say that something is."""
        return [self._standing(float(wealth), place) for place, wealth in enumerate(self._wealth)]

    def _standing(self, wealth: float, place: int) -> Standing:
        return Standing(wealth / np.log(10.0), float(self._largest[place]) / np.log(10.0), int(self._red_at[place]) or None)


def _log_mean(logs: np.ndarray) -> np.ndarray:
    """Logs of the sums of exp(logs), (rows, n), by rows; the shares of the stake are in `logs`."""
    highest = logs.max(axis=-1, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(logs - highest).sum(axis=-1)) + highest[:, 0]


class Shift(NamedTuple):
    """The mean difference between what was drawn and what the law expects, with an interval that holds at every token."""

    value: float
    low: float
    high: float


def shift_of(drawn: np.ndarray, expected: np.ndarray, level: float) -> Shift:
    """The shift of a share: the mean of drawn - expected, both (tokens,) in [0, 1].

    The predictable plug-in empirical Bernstein interval of Waudby-Smith and Ramdas (arXiv 2010.09686, theorem 2). It covers
    the mean over tokens, with weights that are known before each token, at all tokens together with probability 1 - level.
    """
    values = (drawn - expected + 1.0) / 2.0
    before = np.arange(1, len(values) + 1)
    means = (0.5 + values.cumsum()) / (before + 1)
    variances = (0.25 + ((values - means) ** 2).cumsum()) / (before + 1)
    mean, variance = np.concatenate([[0.5], means[:-1]]), np.concatenate([[0.25], variances[:-1]])
    weight = np.minimum(np.sqrt(2.0 * np.log(2.0 / level) / (variance * before * np.log(1.0 + before))), 0.5)
    total = weight.sum()
    centre = (weight * values).sum() / total
    half = (np.log(2.0 / level) + ((values - mean) ** 2 * (-np.log1p(-weight) - weight)).sum()) / total
    return Shift(2.0 * centre - 1.0, max(-1.0, 2.0 * (centre - half) - 1.0), min(1.0, 2.0 * (centre + half) - 1.0))
