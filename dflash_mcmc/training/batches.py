"""Batches of sequences of like length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dflash_mcmc.rng import Key

POOL_BATCHES = 8
"""Batches are cut from a pool of so many, sorted by length."""
T = TypeVar("T")


def cut_by_length(items: Sequence[T], lengths: Sequence[int], size: int, key: Key) -> list[list[T]]:
    """Batches of `size` items of like length, in an order drawn from the key. What does not fill a batch is left out."""
    ordered = [items[i] for i in np.argsort(np.asarray(lengths), kind="stable")]
    batches = [ordered[i : i + size] for i in range(0, len(ordered) - size + 1, size)]
    return [batches[i] for i in key.uniforms(0, len(batches)).argsort()]
