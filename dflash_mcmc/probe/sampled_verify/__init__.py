"""Sample and match against plain sampling on a real pair: the measurements of the pull request that introduced it.

The document is lucebox PR 374, "sampled-verify: speculative decoding with an active sampler".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, cast, final

import numpy as np
from typing_extensions import TypedDict

from dflash_mcmc.chains import build, cost
from dflash_mcmc.dataset.inputs.conversations import template_at
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.probe import Probe, Summary, Unit, Work
from dflash_mcmc.probe.sampled_verify import arms
from dflash_mcmc.probe.sampled_verify.arms import AGENT, LONG, SHORT, GenerationTask
from dflash_mcmc.registry import components, name_of, register
from dflash_mcmc.rng import Key
from dflash_mcmc.store.schema import Count, Instead, Long, OneOf, Range
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.settings import Settings

_FAULTS = ("greedy_first", "greedy_bonus", "greedy_walk", "redraw_after_mismatch", "late_penalty", "finite_window")
_LONG_TEMPERATURE, _AGENT_TEMPERATURE = 0.7, 1.0
"""Temperatures of the long generations and of the agent's answers, as in the document."""


@final
class GenerationRecord(TypedDict):
    """The generation by one decoder at one temperature."""

    decoder: str
    temperature: Annotated[float, Range(0)]
    tokens: list[Count]
    target_forwards: Count
    tool_call: NotRequired[bool]
    """Whether the text has a call of a tool; only where the prompt shows tools."""
    failure: NotRequired[Annotated[str, Instead(("tokens",))]]


@final
class GenerationsRecord(TypedDict):
    """The generations of one unit by all decoders."""

    workload: Annotated[str, OneOf((SHORT, LONG, AGENT))]
    prompt_tokens: Count
    seconds: Annotated[list[Annotated[float, Range(0)]], Long("cells")]
    """The unit's share of the batch's time, for each cell."""
    cells: Annotated[list[GenerationRecord], Long("cells")]


@register("probe", "sampled_verify")
@dataclass(slots=True, kw_only=True)
class SampledVerify(Probe):
    """Sample and match, correct and with the document's faults, against plain sampling on three workloads.

    `short`: num_chains generations of each problem at each temperature. `long`: one generation of each problem that does not
    stop before its horizon. `agent`: answers to one long synthetic prompt with tools. Workloads are shorter where the model
    has fewer positions. Every decoder has random numbers of its own, but `same_key` those of `plain`, and gives the same
    tokens.
    """

    temperatures: list[float] = identity([0.7, 0.85, 1.0], "temperatures of the short workload")
    faults: list[str] = identity(["greedy_first", "greedy_bonus", "greedy_walk", "finite_window"],
                                 "faulty decoders to compare: " + ", ".join(_FAULTS))
    window_share: float = identity(0.0853, "latest tokens that finite_window attends to, as a share of the agent's prompt; "
                                   "0.0853 = 2,048 of 24,000", gt=0)
    long_tokens: int = identity(1200, "tokens of a long generation, at most what the model's positions allow", ge=1)
    agent_tokens: int = identity(24000, "tokens of the agent's prompt, at most what the model's positions allow", ge=1)
    agent_answer: int = identity(256, "longest answer of the agent in tokens", ge=1)
    agent_runs: int = runtime(12, "answers of the agent; may be raised later", ge=0)
    batch_size: int = runtime(50, "generations that are drawn and timed together; a killed run loses at most these", ge=1,
                              le=65_536)

    uses = ("model", "draft", "sampler", "dataset")
    unit = "generation"
    record_type = GenerationsRecord
    tables_in = f"{__name__}.arms"
    needs_draft = True

    def check(self, config: Settings) -> None:
        """Checks sampler, temperatures and faults. Raises ConfigError."""
        able = [name for name, option in components("sampler").items() if _has_temperature(option.cls)]
        if not _has_temperature(type(config.sampler)):
            raise ConfigError("sampler", name_of(config.sampler), f"{', '.join(able)} with probe=sampled_verify")
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        if not self.temperatures or not distinct or min(self.temperatures) <= 0.0:
            raise ConfigError("probe.temperatures", self.temperatures, "a list of numbers > 0, none twice")
        if not set(self.faults) <= set(_FAULTS) or len(set(self.faults)) < len(self.faults):
            raise ConfigError("probe.faults", self.faults, f"a list of {', '.join(_FAULTS)}, none twice")
        if "late_penalty" in self.faults and not config.sampler.law().has_penalty:
            raise ConfigError("probe.faults", self.faults, "a list without late_penalty, or a sampler.repetition_penalty "
                              "that is not 1, or a sampler.frequency_penalty or sampler.presence_penalty that is not 0")

    def arms(self) -> tuple[str, ...]:
        """The decoders, plain decoding first."""
        return (arms.PLAIN, arms.SAME_KEY, arms.MATCH, *self.faults)

    def units(self, config: Settings) -> list[Unit]:
        """The generations of all workloads. Names of long and agent units have the workload in parentheses."""
        problems = [problem.id for problem in config.dataset.problems()]
        return [*(Unit(name, chain) for name in problems for chain in range(config.num_chains)),
                *(Unit(f"(long) {name}") for name in problems),
                *(Unit("(agent)", chain) for chain in range(self.agent_runs))]

    def num_units(self, config: Settings) -> int:
        """The number of generations, without reading a published dataset."""
        return config.dataset.num_chosen() * (config.num_chains + 1) + self.agent_runs

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost with every decoder, up to the model's positions. `assumed.kept`: what one but `plain` keeps of a block."""
        assumed, problems, size = config.assumed, config.dataset.num_chosen(), cost.block_size(config)
        short, long = problems * config.num_chains * len(self.temperatures), problems
        positions = ((shape := config.model.shape("cpu")) and shape.max_positions) or math.inf
        agent_prompt = max(1, min(self.agent_tokens, positions - self.agent_answer))
        prompts = (short + long) * (assumed.prompt_length - 1) + self.agent_runs * (agent_prompt - 1)
        answers = (short * assumed.answer_length * config.dataset.max_new_tokens
                   + long * max(1, min(self.long_tokens, positions - assumed.prompt_length))
                   + self.agent_runs * assumed.answer_length * self.agent_answer)
        drafting, blocks = len(self.arms()) - 1, answers / assumed.kept
        units = self.num_units(config)
        return UnitCost((len(self.arms()) * prompts + answers + drafting * blocks * size) / units, drafting * blocks / units)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Draws the generation of a unit by every decoder. A record has a cell for each decoder and temperature."""
        model = config.model.load(work.device)
        drafter = config.draft.load(model)
        prompt, has_tools = self.agent_prompt(config, model)
        tasks = self._tasks(config, model, prompt, work.units)
        window = max(1, round(self.window_share * len(prompt)))
        temperatures = {SHORT: self.temperatures, LONG: [_LONG_TEMPERATURE], AGENT: [_AGENT_TEMPERATURE]}
        claimed = iter(work)
        while batch := [tasks[unit] for unit in islice(claimed, self.batch_size)]:
            for workload, group in groupby(batch, key=lambda task: task.workload):
                own, cells = list(group), list[list[dict]]()
                for temperature in temperatures[workload]:
                    sampler = dataclasses.replace(cast("Any", config.sampler), temperature=temperature)
                    for arm in self.arms():
                        drawn = arms.draw(
                            config, model.without_stops() if workload == LONG else model,
                            arms.speculation_of(arm, drafter, window), sampler, own,
                            [arms.key_of(arm, config.seed, task.unit, temperature) for task in own])
                        cells.append([{"decoder": arm, "temperature": temperature, **cell} for cell in drawn])
                for row, task in enumerate(own):
                    of_task = [column[row] for column in cells]
                    for cell in of_task if workload == AGENT and has_tools else ():
                        cell["tool_call"] = arms.has_call(model.decode(np.array(cell.get("tokens", []), np.int64)))
                    yield task.unit, {"workload": workload, "prompt_tokens": len(task.prompt),
                                      "seconds": [cell.pop("seconds") for cell in of_task], "cells": of_task}

    def agent_prompt(self, config: Settings, model: LanguageModel) -> tuple[np.ndarray, bool]:
        """The prompt of the agent workload. Raises UserError if the shortest one does not fit into the model's positions."""
        def render(messages: list[dict[str, str]], tools: list[dict] | None) -> np.ndarray:
            if not config.model.chat:
                return model.encode("\n".join(message["content"] for message in messages), True)
            return model.encode(model.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False,
                chat_template=template_at(config.model.date, model.tokenizer, tools)))

        room = (model.max_positions or math.inf) - self.agent_answer
        prompt = arms.agent_prompt(render, Key(config.seed).fold_in("sampled_verify", "agent"),
                                   round(min(self.agent_tokens, room)))
        if (length := len(prompt[0])) > room and self.agent_runs:
            left = room + self.agent_answer - length
            refused = (("probe.agent_answer", self.agent_answer, f"at most {left}") if left > 0 else
                       ("probe.agent_runs", self.agent_runs, "0, or a model with more positions"))
            raise UserError("{}: given {}; allowed: {} ".format(*refused) + f"(the agent's shortest prompt takes {length} of "
                            f"the model's {model.max_positions} positions)")
        return prompt

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """A table for each workload, with a row for each decoder and temperature."""
        return arms.summary(records)

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """One figure: tokens per forward, first token, histograms, degeneration and tool calls by decoder."""
        return {"fig_sampled_verify": arms.figure(summary.tables)} if set(summary.tables) - {"same_key"} else {}

    def _tasks(self, config: Settings, model: LanguageModel, prompt: np.ndarray,
               units: Sequence[Unit]) -> dict[Unit, GenerationTask]:
        """The task of each unit. Raises UserError for a prompt that leaves too little room."""
        problems = {problem.id: problem for problem in config.dataset.problems()}
        named = {unit: unit.problem.removeprefix("(long) ") for unit in units if unit.problem != "(agent)"}
        prompts = build.prompts(config, model, [problems[name] for name in named.values()])
        tasks = {}
        for unit in units:
            if unit not in named:
                tasks[unit] = GenerationTask(unit, AGENT, prompt, self.agent_answer)
            elif unit.problem == named[unit]:
                tasks[unit] = GenerationTask(unit, SHORT, prompts[unit.problem], config.dataset.max_new_tokens)
            else:
                text = prompts[named[unit]]
                room = self.long_tokens if model.max_positions is None else model.max_positions - len(text)
                tasks[unit] = GenerationTask(unit, LONG, text, min(self.long_tokens, room))
        return tasks


def _has_temperature(sampler: type) -> bool:
    """Whether a sampler draws every token at a temperature that can be set."""
    return "temperature" in {field.name for field in dataclasses.fields(sampler)}
