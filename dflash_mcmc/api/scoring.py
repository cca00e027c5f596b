"""Log probabilities of given tokens from Python (`LoadedEngine.score`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.api.prompts import array_of
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.ops import Chain, SamplingParams, Score
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.interface import Finished


class Scored(NamedTuple):
    """What the target says of an answer."""

    log_p: list[float]
    """Log probability of each token under the (blended) target at temperature 1, in nats."""
    is_greedy: bool
    """Whether each token is the most likely one (the smallest id among equals)."""


class PromptAndAnswer(NamedTuple):
    """A prompt and its answer, token ids, int64."""

    prompt: np.ndarray
    answer: np.ndarray


def length_of(pair: PromptAndAnswer) -> int:
    """The number of tokens of a pair."""
    return len(pair.prompt) + len(pair.answer)


def pairs_of(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], vocabulary: int,
             positions: int | None) -> list[PromptAndAnswer]:
    """The pairs. Raises ConfigError.

    Args:
        vocabulary: number of known token ids.
        positions: longest sequence of the model; None without a limit.
    """
    if not len(prompts) or len(prompts) != len(answers):
        raise ConfigError("answers", f"{len(answers)} for {len(prompts)} prompts", "one for each prompt, and at least one")
    pairs = [PromptAndAnswer(_ids("prompts", prompt, vocabulary), _ids("answers", answer, vocabulary))
             for prompt, answer in zip(prompts, answers, strict=True)]
    for number, pair in enumerate(pairs):
        if positions is not None and length_of(pair) > positions:
            raise ConfigError("answers", f"answer {number} of {len(pair.answer)} tokens after {len(pair.prompt)}",
                              f"{positions} tokens together, the model's positions")
    return pairs


def _ids(field: str, given: Sequence[int], vocabulary: int) -> np.ndarray:
    tokens = array_of(given)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ConfigError(field, given, f"lists of at least one token id, each from 0 to {vocabulary - 1}")
    return tokens.astype(np.int64)


def chain(pair: PromptAndAnswer) -> Chain:
    """A chain that draws nothing: it forces the answer. The law of temperature 0 shows whether each token is greedy."""
    return ChainResult((yield Score(Trajectory.start(pair.prompt), pair.answer, SamplingParams(temperature=0.0))))


def scored(number: int, done: Finished[Any]) -> Scored:
    """The result of a chain that has ended. Raises UserError if the model gave no numbers."""
    if done.result is None:
        raise UserError(f"answer {number}: cannot be scored: {done.failure}")
    trajectory = done.result.trajectory
    return Scored(trajectory.log_p.tolist(), bool((trajectory.log_q == 0.0).all()))
