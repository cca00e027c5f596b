"""Turns a problem into the conversation that a model continues: template, system prompt and few-shot examples; and
conversations into texts, with a chat template or without one.

`TEMPLATES` are the named templates of `dataset.prompt`, each with its source. The problem replaces {question}.
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, reason_of
from dflash_mcmc.store.files import loaded
from dflash_mcmc.types import Message, Problem

ROLES = ("system", "user", "assistant", "tool", "developer")
"""Who may speak. A template writes a role beside special tokens, so that any other text would be a turn of its own."""
_LAST = ("user", "tool")
_GAP = "\n\n"
DATE = "2024-07-26"
"""What a chat template that asks for the time is told, unless `model.date` says another: the date in Llama 3.1's template."""


CLOCK = "strftime_now"
"""The function of chat templates that tells the time."""


def template_at(date: str, tokenizer: Any, tools: Any = None) -> str | None:
    """The chat template, whose clock stands at midnight of a date; None if it does not ask for the time.

    transformers passes plain data alone to a template. The clock is therefore a macro, which replaces each directive by its
    text. Raises ValueError for no date in ISO format.
    """
    midnight = datetime.strptime(date, "%Y-%m-%d")
    template = tokenizer.get_chat_template(tools=tools)
    if CLOCK not in template:
        return None
    directives = [f"%{pad}{letter}" for pad in ("-", "") for letter in ascii_letters]
    texts = "".join(f"|replace({each!r}, {midnight.strftime(each)!r})" for each in directives)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{- format{texts} -}}}}{{%- endmacro -%}}{template}"


class PromptText(str):
    """A prompt that a chat template made, in which names of special tokens stand in a message.

    `plain` has the places (start, stop) of these names: they are tokenized as text, and never become special tokens.
    """

    plain: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, text: str, plain: Sequence[tuple[int, int]]) -> "PromptText":
        """The text with these places."""
        made = cls(text)
        made.plain = tuple(plain)
        return made


class Conversation(NamedTuple):
    """The input of a model: a system prompt and worked examples, if configured, and then the turns of a problem."""

    turns: tuple[Message, ...]
    """The turns of the problem. The last one is the turn that the model answers."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the model may call, as JSON schemas."""
    examples: tuple[tuple[str, str], ...] = ()
    """Few-shot examples: the prompt and the answer of each."""
    system: str | None = None
    """The system prompt; None if there is none, or if the turns begin with one."""

    @classmethod
    def of(cls, text: str) -> "Conversation":
        """A conversation of a single turn of the user."""
        return cls(({"role": "user", "content": text},))

    def messages(self) -> list[Message]:
        """All turns in order: the system turn, a user turn and an assistant turn for each example, the problem's turns."""
        own = 1 if self.turns[0]["role"] == "system" else 0
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        shown: list[Message] = [turn for prompt, answer in self.examples
                                for turn in (Message(role="user", content=prompt), Message(role="assistant", content=answer))]
        return [*system, *self.turns[:own], *shown, *self.turns[own:]]

    def as_text(self) -> str:
        """The text for a model without a chat template. Raises UserError if the conversation has tools.

        The blocks are separated by an empty line, and an example's answer follows its prompt after a space, as in
        lm-evaluation-harness. The texts of a conversation of several turns begin with their roles.
        """
        if self.tools or any("content" not in turn or turn["role"] == "tool" for turn in self.turns):
            raise UserError("model.chat: given False for a conversation with tools; allowed: true, with a tokenizer that has "
                            "a chat template")
        turns = list(self.turns)
        before = [] if self.system is None else [self.system]
        if turns[0]["role"] == "system":
            before.append(turns.pop(0)["content"])
        if len(turns) == 1:
            shown = (prompt + ("" if prompt[-1:].isspace() else " ") + answer for prompt, answer in self.examples)
            return _GAP.join([*before, *shown, turns[0]["content"]])
        return _GAP.join(f"{turn['role']}: {turn['content']}" for turn in self.messages())

    def with_template(self, tokenizer: Any, enable_thinking: bool, date: str = DATE) -> str:
        """The text that the tokenizer's chat template makes. Raises UserError if the template refuses the conversation.

        Names of special tokens in messages stay text: see `PromptText`.
        """
        messages, tools = self.messages(), list(self.tools) or None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        names = {*(token.content for token in added.values() if token.special), *getattr(tokenizer, "all_special_tokens", ())}
        given = json.dumps([messages, tools], ensure_ascii=False, default=str)
        specials = sorted((name for name in names if name and json.dumps(name, ensure_ascii=False)[1:-1] in given),
                          key=len, reverse=True)
        templated = partial(_templated, tokenizer, enable_thinking=enable_thinking, date=date)
        text = _with_plain_names(templated, messages, tools, specials) if specials else templated(messages, tools)
        if tools and not specials and text == templated(messages, None):
            raise UserError(f"dataset: given {len(tools)} tools, which the chat template of the tokenizer leaves out; "
                            "allowed: a model whose template shows tools, or problems without tools")
        return text


def messages_of(value: object, where: str) -> tuple[Message, ...]:
    """The turns of a conversation up to the one that the model answers: answers at the end are left out.

    Args:
        value: a list of role and content; fields that are None count as missing.
        where: the row, for errors.

    Raises:
        UserError: for anything that is not such a list, or has no turn of the user.
    """
    turns = turns_of(value)
    if turns is None:
        raise UserError(f"dataset.path: {where} has no conversation for its messages; allowed: a list of role "
                        f"({', '.join(ROLES)}) and content, a text, with a turn of the user")
    while not is_answerable(turns):
        turns = turns[:-1]
    return turns


def turns_of(value: object) -> tuple[Message, ...] | None:
    """The turns of a list of role and content, without parts that are None; None if there is no turn of the user."""
    turns = [{name: each for name, each in turn.items() if each is not None} if isinstance(turn, dict) else {}
             for turn in (value if isinstance(value, list) else [])]
    for turn in turns:
        text = turn.get("content", "" if turn.get("tool_calls") else None)
        if not (turn.get("role") in ROLES and isinstance(text, str)):
            return None
    if not (any(turn["role"] == "user" for turn in turns) and _is_json(turns)):
        return None
    return tuple(turns)  # type: ignore[arg-type]


def is_answerable(turns: tuple[Message, ...]) -> bool:
    """Whether a model answers the last turn."""
    return turns[-1]["role"] in _LAST


def tools_of(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """The tools of a problem, from a list of JSON schemas or from its JSON text. Raises UserError."""
    listed = value
    if isinstance(value, str):
        try:
            listed = loaded(value) if value.strip() else []
        except ValueError:
            listed = value
    tools = [] if listed is None else listed
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools) or not _is_json(tools):
        raise UserError(f"dataset.tools_field: {where} has {value!r:.80} for its tools; allowed: a list of JSON schemas, or "
                        "its JSON text")
    return tuple(tools)


def last_question(messages: tuple[Message, ...]) -> str:
    """The text of the last turn of the user."""
    return next(turn.get("content", "") for turn in reversed(messages) if turn["role"] == "user")


def _is_json(value: object) -> bool:
    """Whether a value can be written as JSON in UTF-8. A tokenizer accepts no lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        return False
    return True


def _with_plain_names(templated: Callable[..., str], messages: list[Message], tools: list[dict[str, Any]] | None,
                      specials: Sequence[str]) -> PromptText:
    """The text of a conversation with names of special tokens, and their places. The template sees marks instead of them."""
    whole = json.dumps([messages, tools], ensure_ascii=False)
    codes = (chr(code) for code in range(0xF0000, 0xFFFFD))  # characters for private use, of which a text has few
    marks = {mark: name for name, mark in zip(specials, (code for code in codes if code not in whole), strict=False)}

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            for mark, name in marks.items():
                value = value.replace(name, mark)
        elif isinstance(value, dict):
            return {key: each if key == "role" else marked(each) for key, each in value.items()}
        elif isinstance(value, (list, tuple)):
            return [marked(each) for each in value]
        return value

    texts, plain, length = [], [], 0
    for piece in re.split(f"([{''.join(marks)}])", templated(marked(messages), marked(tools))):
        name = marks.get(piece, piece)
        if piece in marks:
            plain.append((length, length + len(name)))
        texts.append(name)
        length += len(name)
    return PromptText.of("".join(texts), plain)


def _templated(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None, enable_thinking: bool,
               date: str) -> str:
    try:
        template = template_at(date, tokenizer, tools)
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True,
                                             enable_thinking=enable_thinking, chat_template=template)
        text.encode()  # a tokenizer accepts no lone surrogates
        return text
    except Exception as error:  # a template is a program of the checkpoint's authors: it may raise anything
        reason = reason_of(error, 200)
        roles = ", ".join(dict.fromkeys(turn["role"] for turn in messages))
        raise UserError(f"model.chat: the tokenizer's chat template refuses the conversation of {roles}: "
                        f"{type(error).__name__}: {reason}; allowed: roles and fields that the template knows, or "
                        "model.chat=false") from error


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
        own = problem.question, problem.messages
        others = list(islice((other for other in self.examples if (other.question, other.messages) != own), self.num_examples))
        if len(others) < self.num_examples:
            raise ConfigError("dataset.fewshot", self.num_examples, f"at most {len(others)}, the other problems with an "
                              f"answer that can be shown (problem {problem.id} is not an example of itself)")
        shown = []
        for other in others:  # with its worked solution, or its gold answer
            answer = other.answer if other.solution is None else other.solution
            if not answer.strip() or other.messages:
                raise UserError(f"dataset.fewshot: problem {other.id} cannot be an example, since it has "
                                f"{'several turns' if other.messages else 'no answer'}; allowed: 0, or examples of questions "
                                "with answers, dataset.fewshot_path=FILE")
            shown.append((self._text(other.question), answer))
        turns: tuple[Message, ...] = problem.messages or ({"role": "user", "content": problem.question},)
        last = max(index for index, turn in enumerate(turns) if turn["role"] == "user")
        question_turn: Message = {**turns[last], "content": self._text(turns[last].get("content", ""))}
        return Conversation((*turns[:last], question_turn, *turns[last + 1:]), problem.tools, tuple(shown), self.system)

    def _text(self, question: str) -> str:
        return self.template.replace(QUESTION, question)


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
