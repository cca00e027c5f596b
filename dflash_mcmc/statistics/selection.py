"""Selection of one of several chains of a problem, from their records: by log p, or by importance weights for p^alpha."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import UNDRAWN

if TYPE_CHECKING:
    from dflash_mcmc.store.records import Record

KEYS = ("log_p", "power")


def check_key(records: Sequence[Record], key: str, alpha: float | None) -> None:
    """Checks that this key can choose among the records. Raises UserError."""
    if key not in KEYS:
        raise UserError(f"best of several chains: key given {key!r}; allowed: {', '.join(KEYS)}")
    if key != "power":
        return
    if alpha is None or not alpha > 0.0:
        raise UserError(f"best of several chains by power: alpha given {alpha}; allowed: a number > 0")
    check_log_q(records, "best of several chains by power")


def check_log_q(records: Sequence[Record], what: str) -> None:
    """Checks that log_q of each record is the log-probability of its draw, as `what` needs. Raises UserError."""
    for record in records:
        name = f"{what}: problem {record['problem']}, chain {record['chain']}:"
        if record.get("log_q") is None:
            raise UserError(f"{name} the record has no log_q; allowed: records with the log-probability of their draw")
        if record.get("proposals") or record.get("trace"):
            raise UserError(f"{name} its sampler chose among draws, so log_q is not its log-probability; allowed: independent "
                            "draws, as of sampler=temperature")


def weights(chains: Sequence[Record], key: str, alpha: float | None) -> np.ndarray:
    """Probability of choosing each chain, float64 (chains,). They sum to 1, or to 0 if no chain could be drawn."""
    drawn = np.array([record["verdict"] not in UNDRAWN for record in chains])
    if not drawn.any():
        return np.zeros(len(chains))
    log_p = np.array([record["log_p"] for record in chains], np.float64)
    if key == "log_p":
        chosen = drawn & (log_p == log_p[drawn].max())
        return chosen / chosen.sum()
    if alpha is None:
        raise ValueError("power needs alpha: see check_key")
    log_weights = np.where(drawn, alpha * log_p - np.array([record["log_q"] for record in chains], np.float64), -np.inf)
    found = np.exp(log_weights - log_weights.max())
    return found / found.sum()


def expected_likeliest(chains: Sequence[Record], k: int) -> float:
    """Expected correctness of the chain with the largest log p, over all ways to choose k of the chains.

    The N chains are sorted in descending order of log p. The best of k chosen chains is among the first r of them with
    probability 1 - C(N - r, k) / C(N, k). Equal values are chosen uniformly. Chains that could not be drawn come last and are
    not correct.
    """
    def rank(record: Record) -> tuple[bool, float]:
        not_drawn = record["verdict"] in UNDRAWN
        return not_drawn, 0.0 if not_drawn else -record["log_p"]

    value, place, passed, ways = 0.0, 0, 0.0, math.comb(len(chains), k)
    for _, equal in groupby(sorted(chains, key=rank), key=rank):
        hits = [record["verdict"] == "correct" for record in equal]
        place += len(hits)
        upto = 1.0 - math.comb(len(chains) - place, k) / ways
        value, passed = value + (upto - passed) * sum(hits) / len(hits), upto
    return value
