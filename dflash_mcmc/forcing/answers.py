"""The answers that a probe teacher-forces: the dataset's worked solutions, or the target's greedy answers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dflash_mcmc.chains import build
from dflash_mcmc.components import Settings, name_of
from dflash_mcmc.engine import slots
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.tokenizer import PromptEncoder
from dflash_mcmc.types import ChainResult, Problem, Trajectory, Unit, Work

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel


class Answer(NamedTuple):
    """An answer to a problem, token ids int64."""

    prompt: np.ndarray
    tokens: np.ndarray
    failure: str = ""
    """The reason for a missing answer."""

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([self.prompt, self.tokens])

    def skipped(self, least: int = 1) -> str | None:
        """The reason why the answer cannot be measured; None if it can be measured.

        Args:
            least: minimal number of tokens for a measurement.
        """
        if self.failure:
            return self.failure
        if not len(self.tokens):
            return "empty"
        return f"shorter than {least} tokens" if len(self.tokens) < least else None


def check_source(config: Settings, source: str) -> None:
    """Checks that the dataset has solutions for `gold`, except in a dry run that does not read it. Raises ConfigError."""
    if source != "gold" or config.dataset.is_unread(config):
        return
    if any(problem.solution is None for problem in config.dataset.problems()):
        raise ConfigError("probe.answers", source, f"'greedy', since there are problems of dataset={name_of(config.dataset)} "
                          "without a solution")


def answers(config: Settings, model: "LanguageModel", work: Work, source: str) -> Iterator[tuple[Unit, Answer]]:
    """The answer of each unit of `work`: the dataset's solution (`gold`) or the target's greedy answer (`greedy`).

    Raises UserError before the first answer if any answer does not fit into the model's positions.
    """
    problems = {problem.id: problem for problem in config.dataset.problems()}
    pending = [problems[unit.problem] for unit in work.units]
    if source == "gold":
        prompts, tokens = solutions(config, model, pending)
        return ((unit, Answer(prompts[unit.problem], tokens[unit.problem])) for unit in work)
    prompts = build.prompts(config, model, pending)
    engine = slots.engine_of(config, model, max(map(len, prompts.values())), len(work.units), None)

    def chain(prompt: np.ndarray) -> Chain:
        greedy = SamplingParams(temperature=0.0)
        return ChainResult((yield Draw(Trajectory.start(prompt), config.dataset.max_new_tokens, greedy, Key(config.seed))))

    def drawn() -> Iterator[tuple[Unit, Answer]]:
        for done in engine.run((unit, chain(prompts[unit.problem])) for unit in work):
            tokens = np.empty(0, np.int64) if done.result is None else done.result.trajectory.tokens
            asked = cast("Unit", done.tag)
            yield asked, Answer(prompts[asked.problem], tokens, done.failure)

    return drawn()


def solutions(config: Settings, model: "LanguageModel | PromptEncoder",
              pending: list[Problem]) -> tuple[dict[str, np.ndarray], ...]:
    """The token ids of each problem's prompt and of its solution, by problem id.

    Raises UserError for a solution that does not fit into the model's positions.
    """
    prompts = build.prompts(config, model, pending, room=0)
    tokens = {problem.id: model.encode(problem.solution) if problem.solution else np.empty(0, np.int64) for problem in pending}
    for name, prompt in prompts.items():
        needed = len(prompt) + len(tokens[name])
        if model.max_positions is not None and needed > model.max_positions:
            raise UserError(f"dataset: the solution of problem {name} takes {len(tokens[name])} tokens after a prompt of "
                            f"{len(prompt)}; allowed: {model.max_positions} positions together (the model's)")
    return prompts, tokens
