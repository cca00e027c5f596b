"""The prompts of a draft's training: training questions of `dataset=arith`, or the questions of a file."""

from __future__ import annotations

from typing import NamedTuple

from dflash_mcmc.dataset.arith import LEVELS, make_problem
from dflash_mcmc.dataset.inputs import rows
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.rng import Key
from dflash_mcmc.train.recipe import DraftPlan, Prompts


class Questions(NamedTuple):
    """The questions. Their order matters: random numbers depend on a question's index."""

    training: list[str]
    held_out: list[str]


def questions(plan: DraftPlan) -> Questions:
    """The questions of a plan. Raises UserError if a file is invalid, or if it has fewer questions than the plan asks for."""
    found = _generated(plan) if plan.prompts.path is None else _from_file(plan.prompts)
    if plan.batch_size > len(found.training):
        raise ConfigError("batch_size", plan.batch_size, f"at most {len(found.training)}, the number of training prompts")
    return found


def _generated(plan: DraftPlan) -> Questions:
    """Questions of alternating levels. The held-out ones are neither training questions nor problems of `dataset=arith`."""
    def make(split: str, use: str, count: int) -> list[str]:
        key = Key(plan.seed).fold_in("draft", use)
        return [make_problem(key.fold_in(index), LEVELS[index % len(LEVELS)], split).question for index in range(count)]

    num = plan.prompts.num
    assert num is not None, "DraftPlan.check refuses a plan with neither prompts.path nor prompts.num"
    return Questions(make("train", "prompt", num), make("test", "held out", plan.prompts.held_out))


def _from_file(prompts: Prompts) -> Questions:
    """The questions of a file. Raises UserError."""
    found = [row[prompts.field] for row in rows.of_file(prompts.path, [prompts.field], "prompts.path")]
    for number, question in enumerate(found, start=1):
        if not isinstance(question, str):
            raise ConfigError("prompts.field", prompts.field, f"a field with a text; row {number} has {question!r:.60}")
    left = len(found) - prompts.held_out
    if left < 1:
        raise ConfigError("prompts.held_out", prompts.held_out, f"at most {len(found) - 1} of the file's {len(found)} lines")
    if prompts.num is not None and prompts.num > left:
        raise ConfigError("prompts.num", prompts.num, f"at most {left}: {prompts.held_out} of the file's {len(found)} lines "
                          "are held out")
    return Questions(found[: prompts.num or left], found[left:])
