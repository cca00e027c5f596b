"""What a sampler may ask an engine for: `Draw` and `Score`. A sampler is a generator that yields these and gets answers.

    def chain(self, prompt, horizon, key):
        path = yield Draw(Trajectory.start(prompt), horizon, SamplingParams(temperature=0.5), key)
        return ChainResult(path)

Engines: `engine/batched.py` runs many chains at once, `engine/reference.py` one forward a token without a cache,
`engine/tabular.py` a toy model whose random choices are enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias

import numpy as np

from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory


class SamplingParams(NamedTuple):
    """How a token is drawn from logits, in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Nothing is inherited from a model's generation_config. Ties at a cut-off are kept in the order of token ids.
    """

    temperature: float = 1.0
    """0 takes the most likely token (the smallest id among equals)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or generation (Keskar et al. 2019)."""


class Floor(NamedTuple):
    """When a draw may be abandoned: once it cannot be accepted any more (early rejection).

    After token t of the draw, W_t = sum of alpha * log p - log q over its tokens. Its bound on the log of the
    Metropolis-Hastings ratio is b_t = W_t - reference, plus log(length / t) where `length` is given (t counts from the start
    of the generation). The engine may stop as soon as b_t + margin <= log_uniform.
    """

    log_uniform: float
    alpha: float
    reference: float
    """W of the current sequence from where the draw starts."""
    length: int | None
    margin: float
    """Nats: rounding, or log(1 / epsilon)."""

    def weights(self, path: Trajectory, start: int) -> np.ndarray:
        """W_t after each token of `path` from `start` on, float64, added one by one as an engine's device does."""
        return np.cumsum(self.alpha * path.log_p[start:] - path.log_q[start:])

    def bound(self, weight: float, generated: int) -> float:
        """b_t for W_t = `weight` after `generated` tokens of the generation."""
        return weight - self.reference + (0.0 if self.length is None else math.log(self.length / generated))

    def crossed(self, weight: float, generated: int) -> bool:
        """Whether the draw may be abandoned."""
        # Written with `<` and the uniform on its left, which is all that an enumerated uniform can answer.
        return not self.log_uniform < self.bound(weight, generated) + self.margin


class Draw(NamedTuple):
    """Continue `path` token by token until a stop id or until it has `horizon` generated tokens. Answer: the longer Path.

    Token number t (counted from the start of the generation) is drawn with uniform number t of `key`, by inverse
    transform over token ids; a decoder that keeps the law, but not the tokens, draws from keys of its own below it. With a
    floor the answer may be a path that is not complete: the draw was abandoned.
    """

    path: Trajectory
    horizon: int
    law: SamplingParams
    key: Key
    source: str = "blended"
    """The logits that the token is drawn from: `blended` (those of the target), `base` (without the blend) or `draft`: the
    draft's, on the grid that `grid_slot` tells, those of the target where the grid has none."""
    along: Trajectory | None = None
    """A path that begins with `path` and whose tokens after it were drawn from the same law and source. Changes no
    answer: as long as the draw takes its tokens, an engine need not ask the target."""
    floor: Floor | None = None
    """Changes no answer that a sampler would accept."""


class Score(NamedTuple):
    """Teacher-force `tokens` after `path`. Answer: the longer Path, with `log_q` under the law and source."""

    path: Trajectory
    tokens: np.ndarray
    law: SamplingParams
    source: str = "blended"


def grid_slot(number: int, block_size: int) -> int:
    """Which slot of the draft's absolute grid generated token `number` (from 0) is in.

    Blocks start at tokens 0, B, 2B, ... of the generation, wherever a draw starts, so that what the draft says of a token is
    a function of the sequence. The first token of a block is its anchor, slot 0, of which the draft says nothing; what it
    says of slot k is a function of the tokens up to the anchor.
    """
    return number % block_size


def grid_origin(blend: object, path: Trajectory) -> int:
    """The position at which the first block starts, for an operation on `path`: that of the first generated token.

    Under a blend with `grid=cut` it is where the operation starts.
    """
    return len(path.prompt) + (path.length if getattr(blend, "grid", "absolute") == "cut" else 0)


Operation: TypeAlias = Draw | Score
Chain: TypeAlias = Generator[Operation, Trajectory, ChainResult]


def drive(chain: Chain, answer: Callable[[Operation], Trajectory]) -> ChainResult:
    """Runs one chain to its end, each operation answered at once: what engines without a batch do."""
    try:
        operation = next(chain)
        while True:
            operation = chain.send(answer(operation))
    except StopIteration as stop:
        return stop.value
