"""Named templates of `dataset.prompt`, each with its source. The problem replaces {question}."""

from __future__ import annotations

from typing import NamedTuple

from dflash_mcmc.errors import ConfigError, did_you_mean

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
