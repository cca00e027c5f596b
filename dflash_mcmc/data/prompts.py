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
}


def resolve(prompt: str) -> str:
    """The text of a template given by name or written out. Raises ConfigError for any other text."""
    if prompt in TEMPLATES:
        return TEMPLATES[prompt].text
    if QUESTION not in prompt:
        allowed = f"one of {', '.join(TEMPLATES)}{did_you_mean(prompt, TEMPLATES)}, or a text with {QUESTION} in it"
        raise ConfigError("dataset.prompt", prompt, f"{allowed}, where other braces stand for themselves")
    return prompt
