"""Builds the parts that draw the samples of a configured run: prompts, the chain of each sample, and a potential."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import numpy as np

from dflash_mcmc.components import Settings, groups_of, name_of
from dflash_mcmc.engine.batching.interface import ChainTarget
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.grading import AnswerGrader, extraction
from dflash_mcmc.grading.math.string_rule import normal_form
from dflash_mcmc.ops import Chain, Evaluated, Tilt, tilted, until_ended
from dflash_mcmc.potential import Evaluator
from dflash_mcmc.rng import Key
from dflash_mcmc.tokenizer import PromptEncoder
from dflash_mcmc.types import Problem


def prompts(config: Settings, model: ChainTarget | PromptEncoder, problems: Sequence[Problem],
            room: int | None = None) -> dict[str, np.ndarray]:
    """The token ids of each problem's prompt, by problem id. Raises UserError for a prompt that leaves too little room.

    Args:
        room: positions needed after a prompt; None means dataset.max_new_tokens.
    """
    room = config.dataset.max_new_tokens if room is None else room
    by_id = encoded(config, model, problems)
    for name, tokens in by_id.items():
        if model.max_positions is not None and len(tokens) + room > model.max_positions:
            raise UserError(f"dataset.max_new_tokens: {given(config, room)}; allowed: at most "
                            f"{model.max_positions - len(tokens)} (problem {name} takes {len(tokens)} of the model's "
                            f"{model.max_positions} positions)")
    return by_id


def given(config: Settings, room: int) -> str:
    """The words for a longest answer in an error, which say where it comes from if it is the dataset's default."""
    is_default = room == vars(type(config.dataset))["__dataclass_fields__"]["max_new_tokens"].default
    return f"given {room}{f', the default of dataset={name_of(config.dataset)}' if is_default else ''}"


def encoded(config: Settings, model: ChainTarget | PromptEncoder, problems: Sequence[Problem],
            known: Mapping[str, np.ndarray] = MappingProxyType({})) -> dict[str, np.ndarray]:
    """The token ids of each problem's prompt, of any length, by problem id. Raises UserError for an empty prompt.

    Args:
        known: prompts that are encoded already.
    """
    by_id = {problem.id: known[problem.id] for problem in problems if problem.id in known}
    prompting = config.dataset.prompting()
    for problem in problems:
        if problem.id not in by_id:
            by_id[problem.id] = model.encode(
                config.model.render(model.tokenizer, prompting.conversation(problem)), not config.model.chat)
            if not len(by_id[problem.id]):
                raise UserError(f"dataset.prompt: problem {problem.id} gives an empty prompt; allowed: at least one token")
    return by_id


def ending(model: ChainTarget, prompt: np.ndarray) -> str:
    """The last characters of a prompt as text, with special tokens: graders know whether it ends with `<think>`."""
    return model.tokenizer.decode(prompt[-8:].tolist(), skip_special_tokens=False)


def first_prompt(config: Settings) -> str:
    """The whole prompt of the first requested problem as text, with special tokens.

    Loads the tokenizer but not the model. Raises UserError.
    """
    if not {"model", "dataset"} <= set(groups_of(config)):
        raise ConfigError("probe", name_of(config.probe), "with show=prompt: none, or a probe that uses a model and a dataset")
    problem = config.dataset.problems()[0]
    tokenizer = config.model.tokenizer()
    text = config.model.render(tokenizer, config.dataset.prompting().conversation(problem))
    tokens = tokenizer(text, add_special_tokens=not config.model.chat)["input_ids"]
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def chain(config: Settings, sampler: Any, problem: str, index: int, prompt: np.ndarray, model: ChainTarget,
          tilt: Tilt | None = None) -> Chain:
    """Chain `index` of a problem. Its random numbers depend only on seed, problem and index."""
    return begun(config, sampler, prompt, Key(config.seed).fold_in(problem, index), model, tilt)


def tilt_of(config: Settings, evaluator: Evaluator, problem: Problem, prompt: np.ndarray, model: ChainTarget) -> Tilt:
    """The factor of a potential for the answers to a problem. It reads texts as the grader does."""
    def evaluate(tokens: np.ndarray) -> Future[Evaluated]:
        return evaluator.submit(problem, extraction.continued(ending(model, prompt), model.decode(tokens)))

    potential = config.potential
    return Tilt(potential.beta, evaluate, potential.bounds, potential.stop_at_max)


def begun(config: Settings, sampler: Any, prompt: np.ndarray, key: Key, model: ChainTarget,
          tilt: Tilt | None = None) -> Chain:
    """A chain after a prompt. A sampler that compares answers reads them as the grader does, in their normal form.

    Raises ConfigError for a potential where the caller has none: it is a part of runs alone.
    """
    if tilt is None and not config.potential.is_null:
        raise ConfigError("potential", name_of(config.potential), "none, except for runs of samples")
    horizon, grader = config.dataset.max_new_tokens, config.grader

    def answer_of(tokens: np.ndarray) -> str | None:
        text = extraction.continued(ending(model, prompt), model.decode(tokens), config.model.thinking)
        found = grader.extraction().find(text).answer if isinstance(grader, AnswerGrader) else text
        return normal_form(found) if found else None

    def begin(key: Key) -> Chain:
        drawn = sampler.comparing(prompt, horizon, key, answer_of)
        return drawn if tilt is None else tilted(drawn, tilt, horizon)

    if config.dataset.must_end:
        return until_ended(begin, horizon, key)
    return begin(key)
