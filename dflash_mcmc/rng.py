"""The only source of randomness. It is counter-based and keyed, so that no draw can shift another.

A `Key` names one use of randomness: `Key(seed).fold_in(problem_id, chain, block, step, "token")`. Its uniforms are
addressed by position and not consumed in order, so that batching, resuming, sharding, early rejection and
speculation cannot change them. The generator is Philox-4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"). Only its raw 64-bit words are used. Its specification fixes them, so they are the same in all numpy releases.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
_WORDS_PER_COUNTER = 4


class Key:
    """Names one use of randomness. Equal parts give equal uniforms, on every machine and in every process."""

    __slots__ = ("_digest",)

    def __init__(self, seed: int | bytes):
        self._digest = seed if isinstance(seed, bytes) else _digest(b"dflash_mcmc", seed)

    @property
    def digest(self) -> bytes:
        """16 bytes from which `Key` makes the same key again, in another process."""
        return self._digest

    def fold_in(self, *parts: str | int) -> "Key":
        """An independent child key. Parts are typed (`1` and `"1"` differ) and order matters."""
        digest = self._digest
        for part in parts:
            digest = _digest(digest, part)
        return Key(digest)

    def uniforms(self, start: int, stop: int) -> np.ndarray:
        """Uniforms number `start` to `stop - 1` of this key: float64, shape (stop - start,), strictly inside (0, 1)."""
        start, stop = operator.index(start), operator.index(stop)  # numpy's generator takes no numpy integers
        if not 0 <= start <= stop:
            raise ValueError(f"uniforms({start}, {stop}): need 0 <= start <= stop")
        skipped, offset = divmod(start, _WORDS_PER_COUNTER)
        generator = np.random.Philox(key=np.frombuffer(self._digest, dtype=np.uint64))
        if skipped:
            generator.advance(skipped)
        words = generator.random_raw(offset + stop - start)[offset:]
        return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def uniform(self) -> float:
        """Uniform number 0 of this key."""
        return float(self.uniforms(0, 1)[0])

    def log_uniform(self) -> float:
        """The logarithm of uniform number 0: finite and negative."""
        return math.log(self.uniform())

    def integer(self, bound: int) -> int:
        """Uniform on {0 .. bound - 1} from uniform number 0 of this key (bias below bound * 2**-52)."""
        if bound < 1:
            raise ValueError(f"integer({bound}): the bound must be at least 1")
        return int(self.uniform() * bound)

    def contest(self, count: int) -> "Contest":
        """A choice among `count` contestants, from uniforms number 0 to `count` - 1 of this key."""
        return Contest(-np.log(-np.log(self.uniforms(0, count))))

    def categorical(self, probabilities: np.ndarray) -> int:
        """An index drawn with these probabilities, float64 (n,), by inverse transform of uniform number 0 of this key."""
        upto = np.cumsum(probabilities)
        return int(np.searchsorted(upto, self.uniform() * upto[-1], side="right"))


class Contest:
    """A choice in proportion to weights that are known later: the largest log-weight plus Gumbel noise wins.

    Gumbel 1954; Maddison, Tarlow & Minka 2014, "A* sampling". Contestant i wins with probability w_i / sum w.
    """

    __slots__ = ("_noise",)

    def __init__(self, noise: np.ndarray):
        self._noise = noise

    def lead(self, first: int, other: int) -> float:
        """The log-weight by which `other` must exceed `first` to beat it."""
        return float(self._noise[first] - self._noise[other])

    def winner(self, log_weights: np.ndarray) -> int:
        """The winner's number. `log_weights` is float64 (n,), with minus infinity for a weight of zero."""
        return int(np.argmax(self._noise + log_weights))


class Stream:
    """Draws from a key in sequence, for code that makes data and does not know the number of draws in advance."""

    __slots__ = ("_block", "_key", "_next")
    _SIZE = 64

    def __init__(self, key: Key):
        self._key, self._next, self._block = key, 0, np.empty(0)

    def uniform(self) -> float:
        offset = self._next % self._SIZE
        if offset == 0:
            self._block = self._key.uniforms(self._next, self._next + self._SIZE)
        self._next += 1
        return float(self._block[offset])

    def integer(self, low: int, high: int) -> int:
        """Uniform on {low .. high}, including both ends."""
        return low + int(self.uniform() * (high - low + 1))

    def choice(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        """One of the options, uniformly or in proportion to the weights."""
        if weights is None:
            return options[self.integer(0, len(options) - 1)]
        u, total = self.uniform() * sum(weights), 0.0
        for option, weight in zip(options, weights, strict=True):
            total += weight
            if u < total:
                return option
        return options[-1]

    def shuffle(self, items: list[T]) -> list[T]:
        """A shuffled copy."""
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.integer(0, last)
            items[last], items[other] = items[other], items[last]
        return items


def _digest(parent: bytes, part: str | int) -> bytes:
    # operator.index accepts every integer type, including numpy's, and refuses everything else.
    text = b"s" + part.encode() if isinstance(part, str) else b"i" + str(operator.index(part)).encode()
    return hashlib.blake2b(parent + text, digest_size=16).digest()
