"""Samples as the tasks of a run: an engine draws them, grading processes grade them, and each becomes one record."""

import math
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from dflash_mcmc.chains import build, cost
from dflash_mcmc.components import name_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset.inputs.conversations import PromptText
from dflash_mcmc.engine.batching.interface import ChainRunner, Finished
from dflash_mcmc.errors import note
from dflash_mcmc.grading import check_golds, extraction, label, settled
from dflash_mcmc.grading.verdicts import CORRECT, NO_ANSWER, NOT_DRAWN, TOO_LONG, UNDRAWN
from dflash_mcmc.ops import Chain
from dflash_mcmc.runner import fitting
from dflash_mcmc.runner.tasks import Results, Tasks, Worker
from dflash_mcmc.runner.tracking import metrics_of, summary_of
from dflash_mcmc.store.files import Schema
from dflash_mcmc.store.records import LENGTH, STOP_STRING, ProblemText, Record, SampleKey, finish_of, sample_schema
from dflash_mcmc.types import ChainResult, Cost, Grade, Problem, Trajectory

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
        return sample_schema()

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
            "finish_reason": finish_of(path, target.stop_ids) if done.result else NOT_DRAWN,
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
