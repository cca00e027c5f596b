"""Turns a problem into the conversation that a model continues: template, system prompt and few-shot examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.dataset.inputs import prompts
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.types import Message, Problem


class Prompting(NamedTuple):
    """How the problems of a dataset are presented to a model."""

    template: str
    """Text in which `{question}` is replaced by the question, or by the last turn of the user."""
    system: str | None = None
    examples: tuple[Problem, ...] = ()
    """Problems for few-shot examples, in the order in which they are chosen."""
    num_examples: int = 0

    def conversation(self, problem: Problem) -> Conversation:
        """The conversation that presents a problem to a model. Raises UserError.

        The examples are the first `num_examples` that are not the problem itself.
        """
        if self.system is not None and problem.messages and problem.messages[0]["role"] == "system":
            raise ConfigError("dataset.system", self.system, f"null, since problem {problem.id} has a system turn of its own")
        others = list(islice((other for other in self.examples if not _same(other, problem)), self.num_examples))
        if len(others) < self.num_examples:
            raise ConfigError("dataset.fewshot", self.num_examples, f"at most {len(others)}, the other problems with an "
                              f"answer that can be shown (problem {problem.id} is not an example of itself)")
        shown = tuple((self._text(other.question), shown_answer(other)) for other in others)
        return Conversation(self._turns(problem), problem.tools, shown, self.system)

    def _turns(self, problem: Problem) -> tuple[Message, ...]:
        turns: tuple[Message, ...] = problem.messages or ({"role": "user", "content": problem.question},)
        last = max(place for place, turn in enumerate(turns) if turn["role"] == "user")
        asked: Message = {**turns[last], "content": self._text(turns[last].get("content", ""))}
        return (*turns[:last], asked, *turns[last + 1:])

    def _text(self, question: str) -> str:
        return self.template.replace(prompts.QUESTION, question)


def shuffled(problems: Sequence[Problem], seed: int) -> tuple[Problem, ...]:
    """The problems in an order that depends on the seed and their number only."""
    return tuple(Stream(Key(seed).fold_in("fewshot")).shuffle(list(problems)))


def shown_answer(problem: Problem) -> str:
    """The answer of a few-shot example: its worked solution, or its gold answer. Raises UserError if it has neither."""
    answer = problem.answer if problem.solution is None else problem.solution
    if not answer.strip() or problem.messages:
        raise UserError(f"dataset.fewshot: problem {problem.id} cannot be an example, since it has "
                        f"{'several turns' if problem.messages else 'no answer'}; allowed: 0, or examples of questions with "
                        "answers, dataset.fewshot_path=FILE")
    return answer


def template_of(prompt: str, file: str | None) -> str:
    """The template's text: the file's text without its last newline, or the resolved prompt. Raises ConfigError."""
    if file is None:
        return prompts.resolve(prompt)
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError("dataset.prompt_file", file, f"a text file that can be read ({reason})") from error
    if prompts.QUESTION not in text:
        raise ConfigError("dataset.prompt_file", file, f"a file with {prompts.QUESTION} in its text")
    return text.removesuffix("\n")


def _same(one: Problem, other: Problem) -> bool:
    return (one.question, one.messages) == (other.question, other.messages)
