"""Which problems fit into the model's positions, with their answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from dflash_mcmc.chains import build
from dflash_mcmc.config.schema import Config
from dflash_mcmc.engine.batching.interface import ChainTarget
from dflash_mcmc.errors import UserError
from dflash_mcmc.tokenizer import PromptEncoder
from dflash_mcmc.types import Problem


class TooLong(NamedTuple):
    """A problem that does not fit."""

    prompt_tokens: int
    answer_tokens: int
    """Tokens that the answer may have, or that the dataset's solution has."""
    positions: int
    """Positions of the model."""

    @property
    def reason(self) -> str:
        """The numbers in words."""
        return (f"the prompt has {self.prompt_tokens:,} tokens, and with an answer of up to {self.answer_tokens:,} tokens it "
                f"exceeds the model's {self.positions:,} positions")


class Fit(NamedTuple):
    """Problems by id."""

    prompts: dict[str, np.ndarray]
    """Token ids of the prompts that fit."""
    too_long: dict[str, TooLong]

    def check(self, config: Config, gold: bool = False) -> None:
        """Raises UserError if no problem fits, since that is no property of a single problem; `gold` as in `fit`."""
        if not self.prompts and self.too_long:
            name, needs = min(self.too_long.items(), key=lambda item: item[1].prompt_tokens + item[1].answer_tokens)
            if gold:
                raise UserError(f"dataset: the solution of problem {name} takes {needs.answer_tokens} tokens after a prompt "
                                f"of {needs.prompt_tokens}, and no problem is shorter; allowed: {needs.positions} positions "
                                "together (the model's)")
            taken = f"the shortest problem, {name}, takes {needs.prompt_tokens} of the model's {needs.positions} positions"
            room = needs.positions - needs.prompt_tokens
            if room < 1:
                raise UserError(f"dataset: no problem fits into the model: {taken}; allowed: shorter problems, or a model "
                                "with more positions")
            raise UserError(f"dataset.max_new_tokens: {build.given(config, needs.answer_tokens)}; allowed: at most {room} "
                            f"({taken}), such as dataset.max_new_tokens={max(1, room // 2)}")


def fit(config: Config, model: ChainTarget | PromptEncoder, problems: Iterable[Problem], gold: bool = False,
        known: Mapping[str, np.ndarray] = MappingProxyType({})) -> Fit:
    """Encodes the prompts of problems. Raises UserError for an empty prompt.

    Args:
        gold: whether the answers are the dataset's solutions. Otherwise an answer may have dataset.max_new_tokens.
        known: token ids of prompts that are encoded already, by the ids of their problems.
    """
    by_id = {problem.id: problem for problem in problems}

    def room(name: str) -> int:
        if not gold:
            return config.dataset.max_new_tokens
        solution = by_id[name].solution
        return len(model.encode(solution)) if solution else 0

    return parted(build.encoded(config, model, list(by_id.values()), known), room, model.max_positions)


def parted(prompts: Mapping[str, np.ndarray], room: Callable[[str], int], positions: int | None) -> Fit:
    """The prompts that leave room for an answer, and the others.

    Args:
        prompts: token ids by id.
        room: the tokens that the answer to a prompt may have.
        positions: those of the model; None without a limit.
    """
    too_long = {} if positions is None else {
        name: TooLong(len(tokens), needed, positions) for name, tokens in prompts.items()
        if len(tokens) + (needed := room(name)) > positions}
    return Fit({name: tokens for name, tokens in prompts.items() if name not in too_long}, too_long)


def too_long_units(config: Config, problems: Sequence[str], known: Mapping[str, np.ndarray]) -> dict[str, TooLong]:
    """The units of a probe, by the ids of their problems, whose problem does not fit. Raises UserError if none fits."""
    reads = {"model", "dataset"} <= set(config.probe.sources())
    encoder = config.engine.prompt_encoder(config) if reads else None
    if encoder is None:
        return {}
    gold = not config.probe.draws_answers()
    every = fit(config, encoder, config.dataset.problems(), gold, known)
    every.check(config, gold)
    return {name: every.too_long[name] for name in problems if name in every.too_long}
