"""Answers that the engine draws speculatively, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dflash_mcmc.chains import build
from dflash_mcmc.engine import slots
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.process import bars
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.batched import BatchedEngine
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter


class BlockWalk(NamedTuple):
    """An answer, drawn block by block with sample and match."""

    problem: str
    prompt: np.ndarray
    """int64 (prompt length,)."""
    tokens: np.ndarray
    """int64 (answer length,)."""
    gained: tuple[int, ...]
    """Tokens that each forward of the target gave, in the order of the answer."""

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([self.prompt, self.tokens])

    def anchors(self) -> np.ndarray:
        """Position in the sequence of each block's anchor, int64 (blocks,). The first one is the prompt's last token."""
        return len(self.prompt) - 1 + np.concatenate([[0], np.cumsum(self.gained)[:-1]]).astype(np.int64)


def prompts_of(config: Config, model: LanguageModel) -> dict[str, np.ndarray]:
    """The token ids of each problem's prompt, by problem id. Raises UserError."""
    return build.prompts(config, model, config.dataset.problems())


def draw(config: Config, model: LanguageModel, drafter: Drafter, prompts: dict[str, np.ndarray], temperature: float,
         name: str) -> list[BlockWalk]:
    """An answer to each prompt. Raises UserError if an answer cannot be drawn.

    Args:
        temperature: the target's. The draft proposes its most likely tokens.
        name: the title of the progress bar.
    """
    engine, walks = engine_of(config, model, drafter, prompts), dict[str, BlockWalk]()
    with bars.Bar(len(prompts), "answer", name) as bar:
        for walk in walked(engine, config, prompts, temperature):
            walks[walk.problem] = walk
            bar.update()
    return [walks[problem] for problem in prompts if len(walks[problem].tokens) > 1]


def engine_of(config: Config, model: LanguageModel, drafter: Drafter | None, prompts: dict[str, np.ndarray],
              trace: bool = True) -> BatchedEngine:
    """An engine with the configuration's decoder and a trace, or without a drafter a plain one. Raises UserError."""
    speculation = None if drafter is None else config.decoder.speculation(drafter)
    return slots.engine_of(config, model.stopping_at(config.dataset.stop), max(map(len, prompts.values())), len(prompts), None,
                           speculation and speculation._replace(trace=trace), drafter)


def walked(engine: BatchedEngine, config: Config, prompts: dict[str, np.ndarray], temperature: float) -> Iterator[BlockWalk]:
    """The answers as they end; steps without a trace gain one token. Raises UserError if one cannot be drawn."""
    sampling = SamplingParams(temperature=temperature)

    def chain(problem: str) -> Chain:
        key = Key(config.seed).fold_in("drafts", problem)
        return ChainResult((yield Draw(Trajectory.start(prompts[problem]), config.dataset.max_new_tokens, sampling, key)))

    for done in engine.run((problem, chain(problem)) for problem in prompts):
        if done.result is None:
            raise UserError(f"draft: the answer to problem {done.tag} cannot be drawn: {done.failure}")
        tokens = done.result.trajectory.tokens.astype(np.int64)
        gained = tuple(cast("int", block["gained"]) for block in done.walk) or (1,) * len(tokens)
        yield BlockWalk(done.tag, prompts[done.tag], tokens, gained)


def by_position(walks: Sequence[BlockWalk], edges: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, forwards) of each walk, in each range of positions of the answer. A block counts where it begins."""
    by_range = []
    for first, below in zip((0, *edges), (*edges, np.inf), strict=True):
        inside = [[gained for gained, start in zip(walk.gained, walk.anchors() + 1 - len(walk.prompt), strict=True)
                   if first <= start < below] for walk in walks]
        by_range.append((np.array([sum(each) for each in inside]), np.array([len(each) for each in inside])))
    return by_range
