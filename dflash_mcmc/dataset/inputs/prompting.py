"""Turns a problem into the conversation that a model continues: template, system prompt and few-shot examples.

`TEMPLATES` are the named templates of `dataset.prompt`, each with its source. The problem replaces {question}.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.types import Message, Problem

QUESTION = "{question}"


class Template(NamedTuple):
    """A text with {question} in it. Other braces stay as they are."""

    text: str
    source: str


TEMPLATES = {
    "document": Template(
        "Can you solve the following math problem? {question} Please reason step by step, and put your final answer within "
        "\\boxed{}.",
        "the guided-power-sampling document: PROMPT_TEMPLATE of experiments/guided_power_math500.py in "
        "maxwell-gao/flashSpeculation, as formatted"),
    "paper": Template(
        "Can you solve the following math problem? {question} Please reason step by step, and put your final answer within "
        "\\boxed{{}}.",
        "the power-sampling paper (arXiv 2510.14901): PROMPT and COT of llm_experiments/constants.py in "
        "aakaran/reasoning-with-sampling, joined to the problem without formatting, so that both pairs of braces are sent"),
    "boxed": Template(
        "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "the instruction for mathematics of Qwen3's model card, on a line of its own as in z-lab/dflash's benchmark"),
    "plain": Template("{question}", "the problem and nothing else: with model.chat=false, a text to complete"),
    "code": Template(
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        "```python\n{question}\n```",
        "the instruction for chat models of EvalPlus (arXiv 2305.01210), without the beginning of an answer that it adds"),
    "mbpp": Template(
        "You are an expert Python programmer, and here is your task: {question}",
        "MBPP (Austin et al. 2021, arXiv 2108.07732), section 3.1; the question ends in the tests"),
    "choice": Template(
        "Answer the following multiple choice question. The last line of your response should be of the following format: "
        "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n{question}",
        "QUERY_TEMPLATE_MULTICHOICE of openai/simple-evals; the question ends in the options"),
    "program": Template(
        "You will be given a question (problem specification) and will generate a correct Python program that matches the "
        "specification and passes all tests.\n\n{question}",
        "LiveCodeBench (Jain et al. 2024, arXiv 2403.07974): the system prompt of lcb_runner; the question ends "
        "in the format of the answer, as lcb_runner writes it"),
}


def resolve(prompt: str) -> str:
    """The text of a template given by name or written out. Raises ConfigError for any other text."""
    if prompt in TEMPLATES:
        return TEMPLATES[prompt].text
    if QUESTION not in prompt:
        allowed = f"one of {', '.join(TEMPLATES)}{did_you_mean(prompt, TEMPLATES)}, or a text with {QUESTION} in it"
        raise ConfigError("dataset.prompt", prompt, f"{allowed}, in which other braces are kept as they are")
    return prompt


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
        last = max(index for index, turn in enumerate(turns) if turn["role"] == "user")
        question_turn: Message = {**turns[last], "content": self._text(turns[last].get("content", ""))}
        return (*turns[:last], question_turn, *turns[last + 1:])

    def _text(self, question: str) -> str:
        return self.template.replace(QUESTION, question)


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
        return resolve(prompt)
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError("dataset.prompt_file", file, f"a text file that can be read ({reason})") from error
    if QUESTION not in text:
        raise ConfigError("dataset.prompt_file", file, f"a file with {QUESTION} in its text")
    return text.removesuffix("\n")


def _same(one: Problem, other: Problem) -> bool:
    return (one.question, one.messages) == (other.question, other.messages)
