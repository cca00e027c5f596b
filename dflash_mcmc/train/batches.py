"""Batches of sequences of similar length, which need little padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dflash_mcmc.rng import Key

POOL_BATCHES = 8
"""Number of batches in a pool. The sequences of a pool are sorted by length and then divided into batches."""
T = TypeVar("T")


def cut_by_length(items: Sequence[T], lengths: Sequence[int], size: int, key: Key) -> list[list[T]]:
    """Batches of `size` items of similar length, in random order by `key`. An incomplete last batch is dropped."""
    ordered = [items[i] for i in np.argsort(np.asarray(lengths), kind="stable")]
    batches = [ordered[i : i + size] for i in range(0, len(ordered) - size + 1, size)]
    return [batches[i] for i in key.uniforms(0, len(batches)).argsort()]
