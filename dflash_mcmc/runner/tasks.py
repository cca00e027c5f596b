"""The tasks of a run: samples, or the units of a probe. The loop (`loop.py`) treats both through `Tasks` and `Worker`.

An engine draws samples, grading processes grade them, and each becomes one record. A probe measures units, which are recorded,
and summarised in tables and figures. `tasks_of` gives those of any run.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import numpy as np

from dflash_mcmc.chains import build, cost
from dflash_mcmc.chains.cost import CostEstimate
from dflash_mcmc.components import name_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset.inputs.conversations import PromptText
from dflash_mcmc.engine.batching.interface import ChainRunner, Finished
from dflash_mcmc.errors import note
from dflash_mcmc.grading import check_golds, extraction, label, settled
from dflash_mcmc.grading.verdicts import CORRECT, NO_ANSWER, NOT_DRAWN, TOO_LONG, UNDRAWN
from dflash_mcmc.ops import Chain
from dflash_mcmc.probe import Probe
from dflash_mcmc.runner import fitting
from dflash_mcmc.statistics import summaries
from dflash_mcmc.statistics.votes import Vote
from dflash_mcmc.store import records as stored
from dflash_mcmc.store.files import Schema, write_atomically
from dflash_mcmc.store.records import FAILURE, LENGTH, STOP_STRING, ProblemText, Record, SampleKey
from dflash_mcmc.types import ChainResult, Cost, Grade, Problem, Summary, Trajectory, Unit, Work

R = TypeVar("R", bound=Mapping)
"""The type of the records: JSON values, with `problem` and `chain`."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results that follow from all records of a run."""

    summary: dict[str, object]
    """The content of `summary.json`."""
    metrics: dict[str, object]
    """The summary values that the tracker logs."""
    tables: dict[str, list[dict]]
    """The tables that the tracker logs, by name."""

    def write(self, folder: Path) -> list[Path]:
        """Writes tables and figures into the run folder. Returns the paths of the figures."""
        return []


class Worker(ABC, Generic[R]):
    """Does tasks, and holds everything that they need."""

    @abstractmethod
    def do(self, keys: Sequence[SampleKey], claimed: Iterable[SampleKey]) -> Generator[R | None, None, None]:
        """Does the claimed tasks and yields the record of each when it is done, in any order.

        A UserError that refuses the configuration is raised before the first yield. An implementation that has nothing more
        to refuse may yield None at once.

        Args:
            keys: all keys that `claimed` can give.
            claimed: an iterator. Each step claims a task and marks it as begun. The worker takes a step only when it has
                room for another task.
        """

    def ready(self) -> Iterator[R]:
        """Records that are done and that `do` has not yielded yet. The loop asks for them after an interruption."""
        return iter(())

    def counters(self) -> dict[str, object]:
        """Counts of this worker's work, for `run.json`."""
        return {}

    def close(self) -> None:
        """Releases what the worker holds."""


class Tasks(ABC, Generic[R]):
    """All tasks that a configuration requests."""

    unit: str
    """The word for one task."""
    not_in_memory: tuple[str, ...] = ()
    """Large fields of records that are not kept in memory."""

    @abstractmethod
    def schema(self) -> Schema:
        """The schema of the records, which is checked when they are written and read."""

    @abstractmethod
    def keys(self) -> Sequence[SampleKey]:
        """The keys of all requested tasks, in the order of the reports. Loads no model. Raises UserError."""

    @abstractmethod
    def prepare(self, pending: Sequence[SampleKey], device: str) -> Worker[R]:
        """Loads what the pending tasks need. Raises UserError."""

    @abstractmethod
    def metrics(self, record: R) -> Mapping[str, float | None]:
        """The numbers of a record that the tracker logs."""

    @abstractmethod
    def summarise(self, records: Sequence[R]) -> Results:
        """The results of a complete run, from its records only."""

    @staticmethod
    @abstractmethod
    def table(folders: Sequence[Path]) -> str:
        """The table that a command prints at its end, for all folders of complete runs of this kind.

        It is a function of the kind alone, so that the runs of a sweep share one table.
        """

    @abstractmethod
    def estimate(self) -> CostEstimate:
        """The expected cost. Loads no model."""

    @abstractmethod
    def assumptions(self) -> list[str]:
        """The lines that explain the numbers of `estimate`."""

    @abstractmethod
    def warning(self, records: Sequence[R], folder: Path) -> str | None:
        """A line about tasks of the run in this folder that failed, and what helps; None if there are none."""

    def notes(self) -> dict[str, object]:
        """Values that describe this start of the run in `run.json`."""
        return {}

    def missing_problems(self, known: Collection[str]) -> Iterable[ProblemText]:
        """The problems of the tasks except those with known ids. The loop asks for them after `prepare`."""
        return ()

    def progress(self, fresh: Sequence[R]) -> str:
        """Text after the progress bar. `fresh` holds the records that were added since the last call."""
        return ""


_WIDE = 3.0
"""A blend whose logits deviate more than this many times as much as the target's is reported."""


class Samples(Tasks[Record]):
    """`num_chains` samples of each problem of the dataset."""

    unit = "sample"
    not_in_memory = ("tokens", "trace", "walk", "sampling_mask", "sampling_mask_logprobs")

    def __init__(self, config: Config, prompts: Mapping[str, np.ndarray]):
        self._config, self._prompts = config, prompts
        self._num_correct, self._num_cut, self._num_seen = 0, 0, 0
        self._tokenizer: Any = None  # `prepare` loads it

    @cached_property
    def _problems(self) -> list[Problem]:
        return self._config.dataset.problems()

    def schema(self) -> Schema:
        return stored.sample_schema()

    def keys(self) -> list[SampleKey]:
        """The chains of one problem are adjacent, so that its prompt is read once."""
        return list(dict.fromkeys((problem.id, chain) for problem in self._problems
                                  for chain in range(self._config.num_chains)))

    def prepare(self, pending: Sequence[SampleKey], device: str) -> "SampleWorker":
        problem_of = {problem.id: problem for problem in self._problems}
        problems = [problem_of[problem] for problem, _ in pending]
        check_golds(self._config.grader, problems)
        self._config.grader.preflight()
        model = self._config.engine.load(self._config, device)
        self._tokenizer = model.tokenizer
        fit = fitting.fit(self._config, model, problems, known=self._prompts)
        if len(fit.too_long) == len(problem_of):  # a start with some of the problems records those as too long
            fit.check(self._config)
        longest = max(map(len, fit.prompts.values()), default=1)  # an engine has a length also if no pending prompt fits
        first = list(fit.prompts.values())[:2]  # a forward each, before the first sample
        ratio = self._config.engine.blend_width(self._config.blend, model, first) if first else None
        if ratio is not None and ratio > _WIDE:
            note(f"blend: the logits that it mixes in deviate {ratio:.1f} times as much as the target's on the first prompts: "
                 f"beta weighs {ratio:.1f} times what it says; blend.norm=final has another scale")
        second = self._config.blend.second_prompts(self._config, model, problems, fit.prompts)
        engine = self._config.engine.start(self._config, model, longest, len(pending), second)
        return SampleWorker(self._config, engine, problem_of, fit)

    def metrics(self, record: Record) -> dict[str, float | None]:
        return metrics_of(record)

    def summarise(self, records: Sequence[Record]) -> Results:
        config = self._config
        summary = summary_of(config.label(), list(records), config.aggregates(), config.vote, config.num_chains)
        return Results(summary, summary, {})

    @staticmethod
    def table(folders: Sequence[Path]) -> str:
        from dflash_mcmc.report.parts import overall

        return overall(folders)

    def estimate(self) -> cost.CostEstimate:
        return cost.estimate(self._config)

    def assumptions(self) -> list[str]:
        config = self._config
        rated = [] if config.potential.is_null else config.potential.remarks([] if config.dataset.is_unread(config)
                                                                             else self._problems)
        return [*cost.assumptions(config), *config.sampler.remarks(), *rated]

    def notes(self) -> dict[str, object]:
        return {"num_problems": len(self._problems)}

    def missing_problems(self, known: Collection[str]) -> Iterator[ProblemText]:
        config, prompting = self._config, self._config.dataset.prompting()
        for problem in (each for each in self._problems if each.id not in known):
            self._tokenizer = self._tokenizer or config.model.tokenizer()  # a complete run has loaded none
            text = config.model.render(self._tokenizer, prompting.conversation(problem))
            line: ProblemText = {"id": problem.id, "question": problem.question, "gold": problem.answer, "prompt": text}
            if isinstance(text, PromptText):
                line["plain"] = list(text.plain)
            yield line

    def progress(self, fresh: Sequence[Record]) -> str:
        self._num_correct += sum(record["verdict"] == CORRECT for record in fresh)
        self._num_cut += sum(record["finish_reason"] == LENGTH for record in fresh)
        self._num_seen += len(fresh)
        cut = f", {self._num_cut} cut off" if 2 * self._num_cut > self._num_seen else ""
        return f"correct {100 * self._num_correct / self._num_seen:.1f} % of {self._num_seen}{cut}" if self._num_seen else ""

    def warning(self, records: Sequence[Record], folder: Path) -> str | None:
        lines = []
        for verdict, what in ((NOT_DRAWN, "could not be drawn"), (TOO_LONG, "are too long for the model")):
            failed = [record for record in records if record["verdict"] == verdict]
            if failed:
                lines.append(f"{len(failed)} of {len(records)} samples {what} and count as not correct: "
                             f"{failed[0]['problem']}: {failed[0]['reason']}")
        return "; ".join(filter(None, [*lines, unread(self._config, records, folder)])) or None


def metrics_of(record: Record) -> dict[str, float | None]:
    """The numbers of a sample that a tracker logs."""
    metrics: dict[str, float | None] = {
        "sample/correct": float(record["verdict"] == CORRECT), "sample/num_tokens": record["num_tokens"],
        "sample/cut_off": float(record["finish_reason"] == LENGTH),
        "sample/log_p": record["log_p"], "sample/seconds": record["seconds"],
        "sample/token_forwards": record["token_forwards"]}
    if record["proposals"]:
        metrics["sample/acceptance"] = record["accepted"] / record["proposals"]
        metrics["sample/moved_rate"] = record["moved"] / record["proposals"]
        metrics["sample/abandoned_rate"] = record["abandoned"] / record["proposals"]
    metrics |= {f"sample/{name}": value for name, value in record.get("measures", {}).items()}
    if (length := summaries.accepted_length([record])) is not None:
        metrics["sample/accepted_length"] = length
    return metrics


def summary_of(label: str, records: Sequence[Record], aggregates: Sequence[str], vote: Vote, num_chains: int) -> dict:
    """The content of `summary.json`."""
    summary = {**summaries.summarise(label, records), **summaries.rates(records), **stored.finish_counts(records),
               **summaries.measures(records), **summaries.beside(records),
               **summaries.times(records)}
    for name in aggregates:
        summary |= summaries.aggregate(label, records, vote.rules.get(name, name), num_chains)
    return summary


def unread(config: Config, records: Sequence[Record], folder: Path) -> str:
    """Why more than half of the answers were not read, most likely, and the command that helps; else empty.

    An answer that was cut off may have been read all the same, such as a number of its derivation by `grader.extract=auto`.
    """
    def cause_of(record: Record) -> str:  # it was cut off, a stop string ended its thinking, or the grader's rule
        unfinished, finish = record["rule"] == extraction.UNFINISHED, record["finish_reason"]
        return finish if finish == (STOP_STRING if unfinished else LENGTH) else record["rule"]

    drawn = [record for record in records if record["verdict"] not in UNDRAWN]
    lost = [record for record in drawn if record["verdict"] == NO_ANSWER]
    most, grader = config.dataset.max_new_tokens, name_of(config.grader)
    longer = f"repeat the command with dataset.max_new_tokens={4 * most}"
    if 2 * len(lost) <= len(drawn):
        cut = sum(record["finish_reason"] == LENGTH for record in drawn)
        return f"{cut} of {len(drawn)} answers were cut off at dataset.max_new_tokens={most}: {longer}" if 2 * cut > len(
            drawn) else ""
    (cause, _), = Counter(map(cause_of, lost)).most_common(1)
    return f"{len(lost)} of {len(drawn)} answers were not read, since " + {
        STOP_STRING: "their thinking ended at a string of dataset.stop: repeat the command with dataset.stop=[]",
        extraction.UNFINISHED: f"their thinking did not end: {longer}, or with model.enable_thinking=false",
        LENGTH: f"they were cut off at dataset.max_new_tokens={most}: {longer}",
        extraction.NO_BOX: f"they have no box: python -m dflash_mcmc.regrade {folder} grader={grader} grader.extract=auto",
    }.get(cause, f"grader={grader} finds none in their texts ({cause}): read some in {folder / 'records.jsonl'}")


class SampleWorker(Worker[Record]):
    """Draws samples with one engine and grades each while the next ones are drawn.

    Args:
        problems: the problems of all samples, by id.
        fit: the prompts of the problems of all pending samples.
    """

    def __init__(self, config: Config, engine: ChainRunner, problems: dict[str, Problem], fit: fitting.Fit):
        self._config, self._engine, self._problems, self._fit = config, engine, problems, fit
        self._grading: dict[SampleKey, Finished[SampleKey]] = {}
        self._too_long: list[SampleKey] = []
        self._pool = config.grader.start()
        self._evaluator = None if config.potential.is_null else config.potential.start(config)

    def do(self, keys: Sequence[SampleKey], claimed: Iterable[SampleKey]) -> Generator[Record | None, None, None]:
        yield None  # nothing is refused from here on, so that the loop can describe the run before its first record
        model = self._engine.model
        for done in self._engine.steps(self._chains(claimed)):
            if done is not None:
                if done.result is None:
                    yield self._record(Grade(NOT_DRAWN, None, reason=done.failure), done)
                else:
                    self._grading[done.tag] = done
                    problem, prompt = self._problems[done.tag[0]], self._fit.prompts[done.tag[0]]
                    text = extraction.continued(build.ending(model, prompt), model.decode(done.result.trajectory.tokens),
                                                self._config.model.thinking)
                    self._pool.submit(done.tag, text, problem.answer, problem.question)
            yield from self.ready()
        yield from self.ready(wait=True)

    def _chains(self, claimed: Iterable[SampleKey]) -> Iterator[tuple[SampleKey, Chain]]:
        for key in claimed:
            problem, chain = key
            if problem in self._fit.too_long:
                self._too_long.append(key)
                continue
            prompt, model = self._fit.prompts[problem], self._engine.model
            tilt = None if self._evaluator is None else build.tilt_of(self._config, self._evaluator, self._problems[problem],
                                                                      prompt, model)
            yield key, build.chain(self._config, self._config.sampler, problem, chain, prompt, model, tilt)

    def ready(self, wait: bool = False) -> Iterator[Record]:
        """Yields graded samples, and those that are too long. With `wait` it waits until all drawn samples are graded."""
        while self._too_long:
            key = self._too_long.pop(0)
            needs = self._fit.too_long[key[0]]
            record = self._record(Grade(TOO_LONG, None, reason=needs.reason), Finished(key, None, Cost(), 0.0, 0.0, ""))
            yield {**record, "finish_reason": TOO_LONG, "prompt_tokens": needs.prompt_tokens}
        for key, grade in settled(self._pool, wait):
            yield self._record(grade, self._grading.pop(key))

    def _record(self, grade: Grade, done: Finished[SampleKey]) -> Record:
        """The record of a sample. `done.result` is None for a sample that could not be drawn."""
        name, chain = done.tag
        problem, target = self._problems[name], self._engine.model
        result = done.result or ChainResult(Trajectory.start(self._fit.prompts.get(name, np.empty(0, np.int64))))
        path, cost = result.trajectory, done.cost
        log_q = float(path.log_q.sum())
        record: dict[str, Any] = {
            "problem": name, "chain": chain, "level": problem.level, "subject": problem.subject,
            "verdict": grade.verdict, "answer": grade.answer, "rule": grade.rule, "reason": grade.reason,
            "same_string": grade.same_string, "walls": grade.walls, "gold": problem.answer,
            "text": target.decode(path.tokens), "num_tokens": path.length, "ended": path.ended,
            "finish_reason": stored.finish_of(path, target.stop_ids) if done.result else NOT_DRAWN,
            "log_p": float(path.log_p.sum()), "log_q": log_q if math.isfinite(log_q) else None,
            "proposals": result.proposals, "accepted": result.accepted,
            "moved": result.moved, "abandoned": result.abandoned, "law_error": result.law_error,
            "tokens_drawn": cost.tokens_drawn, "target_forwards": cost.target_forwards, "token_forwards": cost.token_forwards,
            "tokens_skipped": cost.tokens_skipped, "blocks_drafted": cost.blocks_drafted,
            "tokens_drafted": cost.tokens_drafted, "tokens_kept": cost.tokens_kept,
            "seconds": round(done.seconds, 6), "share_seconds": round(done.share_seconds, 6), "tokens": path.tokens.tolist(),
            "trace": list(result.trace),
        }
        # A field without a value is left out, so that the records of runs without it keep their bytes and checksums.
        if done.prefill_seconds is not None:
            record["prefill_seconds"] = round(done.prefill_seconds, 6)
        if grade.grade_seconds is not None:
            record["grade_seconds"] = round(grade.grade_seconds, 6)
        record |= grade.shown()
        record |= path.sampling_mask()
        if result.measures:
            record["measures"] = dict(result.measures)
        if cost.blocks_verified:
            record |= {"blocks_verified": cost.blocks_verified, "tokens_verified": cost.tokens_verified}
        counts = {name: getattr(cost, name) for name in ("tokens_shared", "prompt_forwards", "companion_forwards")}
        record |= {name: count for name, count in counts.items() if count}
        if done.walk:
            record["walk"] = list(done.walk)
        record["grader"] = label(self._config.grader)
        if self._config.engine.is_remote:
            record["bits"] = "server"
        return cast("Record", record)

    def counters(self) -> dict[str, object]:
        counters = self._engine.counters
        return {"engine": {**counters._asdict(), "utilisation": counters.utilisation}}

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
        self._pool.close()
        self._engine.close()


_NO_PROBLEMS = ("(agent)", "(long) ")
"""What the names of units that are no problems begin with."""


class Units(Tasks[dict]):
    """The units of the configured probe."""

    def __init__(self, config: Config, prompts: Mapping[str, np.ndarray]):
        self._config, self._probe, self._prompts = config, config.probe, prompts
        self.unit = self._probe.unit

    def schema(self) -> Schema:
        return stored.unit_schema()

    def keys(self) -> list[Unit]:
        return self._probe.units(self._config)

    def prepare(self, pending: Sequence[SampleKey], device: str) -> "UnitWorker":
        """Loads nothing: the probe loads what it needs when it measures."""
        return UnitWorker(self._config, device, self._prompts)

    def metrics(self, record: dict) -> dict[str, float]:
        return _numbers({name: value for name, value in record.items() if name not in Unit._fields})

    def summarise(self, records: Sequence[dict]) -> Results:
        """The probe summarises the units that were measured. Units without a measurement are only counted."""
        measured = [record for record in records if FAILURE not in record]
        of_probe = self._probe.summarise(self._config, measured) if measured else Summary({}, {}, {})
        failed, undrawn = len(records) - len(measured), {"skipped", FAILURE}
        counts: dict[str, object] = {}
        if "dataset" in self._probe.sources():  # the problems that the intervals are over: those not skipped, and drawn
            drawn = [record["problem"] for record in measured if not undrawn & record.keys() and not all(
                undrawn & cell.keys() for cell in record.get("cells") or [record])]
            counts["num_problems"] = len({problem for problem in drawn if not problem.startswith(_NO_PROBLEMS)})
        if failed:
            counts["num_units_failed"] = failed
        summary: dict[str, object] = {
            "condition": self._config.label(), "probe": name_of(self._probe), "num_units": len(records),
            **counts, **of_probe.values, "tables": of_probe.tables}
        return UnitResults(summary, {**of_probe.values}, of_probe.tables, self._config, measured, of_probe)

    @staticmethod
    def table(folders: Sequence[Path]) -> str:
        from dflash_mcmc.report.parts import of_probes

        return of_probes(folders)

    def estimate(self) -> CostEstimate:
        return cost.of_tasks(self._config, self._probe.num_units(self._config), self._probe.expected_cost(self._config))

    def assumptions(self) -> list[str]:
        name, expected = f"probe={name_of(self._probe)}: counted in {self.unit}s", self._probe.expected_cost(self._config)
        if expected is None:
            return [f"{name}; no estimate: the probe, or its sampler, does not give one"]
        if not expected.token_forwards:
            return [f"{name}; it evaluates no model"]
        if {"sampler", "decoder"} <= set(self._probe.sources()):
            return [name, *cost.assumptions(self._config)]
        return [name, cost.lengths(self._config), cost.rate(self._config)]

    def warning(self, records: Sequence[dict], folder: Path) -> str | None:
        failed = [record for record in records if FAILURE in record]
        if not failed:
            return None
        return (f"{len(failed)} of {len(records)} {self.unit}s could not be measured and are left out: "
                f"{failed[0]['problem']}: {failed[0][FAILURE]}")


class UnitWorker(Worker[dict]):
    """Lets the probe measure units."""

    def __init__(self, config: Config, device: str, prompts: Mapping[str, np.ndarray]):
        self._config, self._device, self._prompts = config, device, prompts

    def do(self, keys: Sequence[SampleKey], claimed: Iterable[SampleKey]) -> Generator[dict, None, None]:
        """Yields the record of each unit. Raises RuntimeError if the probe does not yield one for each unit that it took."""
        probe: Probe = self._config.probe
        taken, recorded, unfit = 0, 0, list[dict]()
        too_long = fitting.too_long_units(self._config, [problem for problem, _ in keys], self._prompts)

        def counted() -> Iterator[Unit]:
            nonlocal taken
            for key in claimed:
                if key[0] in too_long:
                    unfit.append({**Unit(*key)._asdict(), FAILURE: f"{TOO_LONG}: {too_long[key[0]].reason}"})
                    continue
                taken += 1
                yield Unit(*key)

        fits = [Unit(*key) for key in keys if key[0] not in too_long]
        measured = (probe.measure(self._config, Work(fits, self._device, counted())) if fits
                    else ((unit, {}) for unit in counted()))  # claims the units, and yields none of them
        for unit, record in measured:
            recorded += 1
            yield {**unit._asdict(), **record}
        yield from unfit
        if recorded != taken:
            raise RuntimeError(f"probe={name_of(probe)} has taken {taken} units and recorded {recorded}")


@dataclass(frozen=True, slots=True)
class UnitResults(Results):
    """The results of a probe, and the data of its figures."""

    config: Config
    records: list[dict]
    of_probe: Summary

    def write(self, folder: Path) -> list[Path]:
        """Writes a CSV file for each table, and each figure as PNG and SVG."""
        from dflash_mcmc.report import figure, parts

        for name, rows in {**self.of_probe.tables, **self.of_probe.data}.items():
            write_atomically(folder / f"{name}.csv", parts.csv_of(rows))
        if not self.records:
            return []
        with figure.style():
            figures = self.config.probe.figures(self.config, self.records, self.of_probe)
            for name, drawn in figures.items():
                figure.save(drawn, folder, name)
        return [folder / f"{name}.png" for name in figures]


def _numbers(values: dict, prefix: str = "unit") -> dict[str, float]:
    """The numbers among the values and in nested dictionaries, named by their path."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers.update(_numbers(value, f"{prefix}/{name}"))
        elif isinstance(value, (int, float)):
            numbers[f"{prefix}/{name}"] = float(value)
    return numbers


def tasks_of(config: Config, prompts: Mapping[str, np.ndarray] = MappingProxyType({})) -> Tasks:
    """The tasks of a configuration: the units of its probe, or samples if it has none.

    Args:
        prompts: token ids of prompts that are encoded already, by the ids of their problems.
    """
    return Samples(config, prompts) if config.probe.is_null else Units(config, prompts)
