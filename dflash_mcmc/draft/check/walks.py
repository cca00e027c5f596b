"""Answers that the engine draws speculatively, with the number of tokens that each verified block gained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dflash_mcmc.engine import slots
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.runner import build
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.model.hf import HFModel

SYSTEM = "You are a helpful assistant."
"""The system turn of the template states that have one."""


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


class TemplateState(NamedTuple):
    """A way to present the problems to the model."""

    name: str
    config: Config


def template_states(config: Config) -> list[TemplateState]:
    """The other ways to present the problems, each with one thing changed: chat template, thinking, system turn."""
    model, dataset = cast("HFModel", config.model), config.dataset
    found = [TemplateState(f"model.chat={_word(not model.chat)}", dataclasses.replace(
        config, model=dataclasses.replace(model, chat=not model.chat)))]
    if model.chat:
        thinking = not model.enable_thinking
        found.append(TemplateState(f"model.enable_thinking={_word(thinking)}", dataclasses.replace(
            config, model=dataclasses.replace(model, enable_thinking=thinking))))
    system = None if dataset.system is not None else SYSTEM
    found.append(TemplateState("no system turn" if system is None else "a system turn", dataclasses.replace(
        config, dataset=dataclasses.replace(dataset, system=system))))
    return found


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
    from tqdm import tqdm

    engine = slots.engine_of(config, model.stopping_at(config.dataset.stop), max(map(len, prompts.values())), len(prompts),
                             None, config.decoder.speculation(drafter), drafter)
    sampling, walks = SamplingParams(temperature=temperature), dict[str, BlockWalk]()

    def chain(problem: str) -> Chain:
        key = Key(config.seed).fold_in("drafts", problem)
        return ChainResult((yield Draw(Trajectory.start(prompts[problem]), config.dataset.max_new_tokens, sampling, key)))

    with tqdm(total=len(prompts), unit="answer", desc=name, mininterval=0.5, dynamic_ncols=True) as bar:
        for done in engine.run((problem, chain(problem)) for problem in prompts):
            if done.result is None:
                raise UserError(f"draft: the answer to problem {done.tag} cannot be drawn: {done.failure}")
            gained = tuple(cast("int", block["gained"]) for block in done.walk)
            tokens = done.result.trajectory.tokens.astype(np.int64)
            walks[done.tag] = BlockWalk(done.tag, prompts[done.tag], tokens, gained)
            bar.update()
    return [walks[problem] for problem in prompts if len(walks[problem].tokens) > 1]


def same_prompts(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether all prompts have the same tokens."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def by_position(walks: Sequence[BlockWalk], edges: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, forwards) of each walk, in each range of positions of the answer. A block counts where it begins."""
    parts = []
    for first, below in zip((0, *edges), (*edges, np.inf), strict=True):
        inside = [[gained for gained, start in zip(walk.gained, walk.anchors() + 1 - len(walk.prompt), strict=True)
                   if first <= start < below] for walk in walks]
        parts.append((np.array([sum(each) for each in inside]), np.array([len(each) for each in inside])))
    return parts


def _word(value: bool) -> str:
    return str(value).lower()
