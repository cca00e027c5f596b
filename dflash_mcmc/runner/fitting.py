"""Which problems fit into the model's positions, with their answers, and lines about samples without an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from dflash_mcmc.chains import build
from dflash_mcmc.config.schema import Config
from dflash_mcmc.engine.batching.interface import ChainTarget
from dflash_mcmc.engine.batching.prompt_encoder import PromptEncoder
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import extraction
from dflash_mcmc.grading.verdicts import NO_ANSWER, NOT_DRAWN, TOO_LONG, UNDRAWN
from dflash_mcmc.registry import name_of
from dflash_mcmc.store.records import LENGTH, STOP_STRING, Record
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


class Prompted(NamedTuple):
    """A problem and its prompt."""

    problem: Problem
    prompt: np.ndarray
    """Token ids, int64; empty if the problem is too long."""
    too_long: TooLong | None = None


class Fit(NamedTuple):
    """Problems by id."""

    prompts: dict[str, np.ndarray]
    """Token ids of the prompts that fit."""
    too_long: dict[str, TooLong]
    gold: bool = False
    """Whether the answers are the dataset's solutions."""

    def of(self, problems: Iterable[Problem]) -> dict[str, Prompted]:
        """Problems with their prompts, by id."""
        nothing = np.empty(0, np.int64)
        return {problem.id: Prompted(problem, self.prompts.get(problem.id, nothing), self.too_long.get(problem.id))
                for problem in problems}

    def check(self, config: Config) -> None:
        """Raises UserError if no problem fits, since that is no property of a single problem."""
        if not self.prompts and self.too_long:
            name, needs = min(self.too_long.items(), key=lambda item: item[1].prompt_tokens + item[1].answer_tokens)
            if self.gold:
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
    prompts = build.encoded(config, model, list(by_id.values()), known)
    return Fit(*parted(prompts, lambda name: _room(config, model, by_id[name], gold), model.max_positions), gold)


def parted(prompts: Mapping[str, np.ndarray], room: Callable[[str], int],
           positions: int | None) -> tuple[dict[str, np.ndarray], dict[str, TooLong]]:
    """The prompts that leave room for an answer, and the others.

    Args:
        prompts: token ids by id.
        room: the tokens that the answer to a prompt may have.
        positions: those of the model; None without a limit.
    """
    too_long = {} if positions is None else {
        name: TooLong(len(tokens), needed, positions) for name, tokens in prompts.items()
        if len(tokens) + (needed := room(name)) > positions}
    return {name: tokens for name, tokens in prompts.items() if name not in too_long}, too_long


def too_long(record: Record, prompted: Prompted) -> Record:
    """The record of a sample of a problem that is too long, with the length of its prompt.

    Args:
        record: that of a sample that was not drawn, which is changed.
    """
    if prompted.too_long is None:
        raise ValueError(f"problem {prompted.problem.id} is not too long")
    record["verdict"], record["reason"], record["finish_reason"] = TOO_LONG, prompted.too_long.reason, TOO_LONG
    record["prompt_tokens"] = prompted.too_long.prompt_tokens
    return record


def failures(records: Sequence[Record]) -> str | None:
    """A line about the samples that have no text; None if there are none."""
    lines = []
    for verdict, what in ((NOT_DRAWN, "could not be drawn"), (TOO_LONG, "are too long for the model")):
        failed = [record for record in records if record["verdict"] == verdict]
        if failed:
            lines.append(f"{len(failed)} of {len(records)} samples {what} and count as not correct: "
                         f"{failed[0]['problem']}: {failed[0]['reason']}")
    return "; ".join(lines) or None


def unread(config: Config, records: Sequence[Record], folder: Path) -> str:
    """Why more than half of the answers were not read, most likely, and the command that helps; else empty.

    An answer that was cut off may have been read all the same, such as a number of its derivation by `grader.extract=auto`.
    """
    drawn = [record for record in records if record["verdict"] not in UNDRAWN]
    lost = [record for record in drawn if record["verdict"] == NO_ANSWER]
    most, grader = config.dataset.max_new_tokens, name_of(config.grader)
    longer = f"repeat the command with dataset.max_new_tokens={4 * most}"
    if 2 * len(lost) <= len(drawn):
        cut = sum(record["finish_reason"] == LENGTH for record in drawn)
        return f"{cut} of {len(drawn)} answers were cut off at dataset.max_new_tokens={most}: {longer}" if 2 * cut > len(
            drawn) else ""
    (cause, _), = Counter(_cause(record) for record in lost).most_common(1)
    return f"{len(lost)} of {len(drawn)} answers were not read, since " + {
        STOP_STRING: "their thinking ended at a string of dataset.stop: repeat the command with dataset.stop=[]",
        extraction.UNFINISHED: f"their thinking did not end: {longer}, or with model.enable_thinking=false",
        LENGTH: f"they were cut off at dataset.max_new_tokens={most}: {longer}",
        extraction.NO_BOX: f"they have no box: python -m dflash_mcmc.regrade {folder} grader={grader} grader.extract=auto",
    }.get(cause, f"grader={grader} finds none in their texts ({cause}): read some in {folder / 'records.jsonl'}")


def _cause(record: Record) -> str:
    """Why a text has no answer: it was cut off, a stop string ended its thinking, or the grader's rule."""
    if record["rule"] == extraction.UNFINISHED and record["finish_reason"] == STOP_STRING:
        return STOP_STRING
    is_cut = record["rule"] != extraction.UNFINISHED and record["finish_reason"] == LENGTH
    return LENGTH if is_cut else record["rule"]


def too_long_units(config: Config, problems: Sequence[str], known: Mapping[str, np.ndarray]) -> dict[str, TooLong]:
    """The units of a probe, by the ids of their problems, whose problem does not fit. Raises UserError if none fits."""
    if not {"model", "dataset"} <= set(config.probe.sources()):
        return {}
    encoder = config.engine.prompt_encoder(config)
    if encoder is None:
        return {}
    every = fit(config, encoder, config.dataset.problems(), not config.probe.draws_answers(), known)
    every.check(config)
    return {name: every.too_long[name] for name in problems if name in every.too_long}


def _room(config: Config, model: ChainTarget | PromptEncoder, problem: Problem, gold: bool) -> int:
    if not gold:
        return config.dataset.max_new_tokens
    return len(model.encode(problem.solution)) if problem.solution else 0
