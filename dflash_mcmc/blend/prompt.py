"""Prompt blend: mixes a share of the target's logits under another prompt into those under the problem's."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.blend import LogitsBlend
from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.dataset.inputs.conversations import QUESTION, Conversation
from dflash_mcmc.engine.batching.interface import ChainTarget
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.tokenizer import PromptEncoder
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan

_SECOND = "{second}"
"""What the dataset's `second_template` replaces in `blend.prompt`."""


@register("blend", "prompt")
@dataclass(slots=True, kw_only=True)
class PromptBlend(LogitsBlend):
    """logits = (1 - beta) * target + beta * other, where `other` is the target after another prompt and the same answer.

    With beta = 1 - gamma this is classifier-free guidance (Sanchez et al., arXiv 2306.17806), whose unconditional prompt is
    the last token of the prompt. With beta = -alpha it is context-aware decoding (Shi et al., arXiv 2305.14739), whose second
    prompt lacks the context. The second prompt belongs to the problem, so the blend is a law for every sampler.
    """

    prompt: str | None = identity(None, "second prompt: a text in which {question} is replaced by the problem's last turn and "
                                  "{second} by that of dataset.second_template, as the only turn of the user, without system "
                                  "prompt, examples and earlier turns; null = the prompt's last token")

    needs_companion = has_prompts = True

    def companion(self, target: "language_model.LanguageModel") -> "language_model.LanguageModel":
        """The target itself. Raises UserError for one whose attention or states depend on more than the distance of tokens."""
        if target.recurrent_nets or not target.masks.plain:
            raise ConfigError("blend", "prompt", "another blend for a model with recurrent layers, windows or chunks")
        return target

    def companion_shape(self, target: "plan.TargetShape") -> "plan.TargetShape":
        """That of the target, whose weights are there already."""
        return target._replace(num_parameters=0, head_copy=False)

    def second_prompts(self, config: Settings, model: ChainTarget | PromptEncoder, problems: Sequence[Problem],
                       prompts: Mapping[str, np.ndarray]) -> dict[bytes, np.ndarray]:
        """See `Blend.second_prompts`. Raises ConfigError for one that is longer than the first, or ends in another token."""
        second_of: dict[bytes, tuple[str, np.ndarray]] = {}
        for problem in problems:
            first = prompts.get(problem.id)
            if first is None:  # the problem is too long
                continue
            second = first[-1:] if self.prompt is None else model.encode(config.model.render(
                model.tokenizer, Conversation.of(self._text(problem))), not config.model.chat)
            fits = 0 < len(second) <= len(first)
            if not fits or second[-1] != first[-1]:
                what = "another last token than the first" if fits else f"{len(second)} tokens, and the first {len(first)}"
                raise ConfigError("blend.prompt", self.prompt, "null, or a text whose prompt is not longer than the problem's "
                                  f"and ends in the same token (that of problem {problem.id} has {what})")
            name, other = second_of.setdefault(first.tobytes(), (problem.id, second))
            if not np.array_equal(second, other):  # an engine knows a second prompt by the first
                raise ConfigError("blend.prompt", self.prompt, "a text that gives problems with the same first prompt the "
                                  f"same second one (problems {name} and {problem.id} differ only in the second)")
        return {first: second for first, (_, second) in second_of.items()}

    def _text(self, problem: Problem) -> str:
        """The second prompt of a problem. Raises ConfigError if the dataset gives none for {second}."""
        if self.prompt is not None and _SECOND in self.prompt and problem.second is None:
            raise ConfigError("blend.prompt", self.prompt, "a text without {second}, or a dataset with "
                              "dataset.second_template='{{ field }}', as dataset=jsonl and dataset=hub have it")
        parts = {QUESTION: problem.question, _SECOND: problem.second or ""}
        return re.sub("|".join(map(re.escape, parts)), lambda named: parts[named[0]], self.prompt or "")
