"""The samples that a run lacks: claimed, drawn, graded, recorded, tracked."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import label
from dflash_mcmc.grading.verdicts import CORRECT, ERROR, NOT_DRAWN, TIMEOUT
from dflash_mcmc.process import ranks, stopping
from dflash_mcmc.run import build
from dflash_mcmc.run.tracking import Tracking
from dflash_mcmc.store.attempts import Attempts
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import SampleKey
from dflash_mcmc.types import ChainResult, Cost, Grade, Problem, Trajectory

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.engine.batched import BatchedEngine
    from dflash_mcmc.engine.interface import Finished
    from dflash_mcmc.engine.language_model import LanguageModel
    from dflash_mcmc.ops import Chain

_POLL_SECONDS = 0.5
_TRIED = 64
"""Of the samples that others draw, at each look: a lock on a network file system is a message."""


class Pending(NamedTuple):
    """A sample that is to be drawn."""

    problem: Problem
    chain: int
    prompt: np.ndarray
    """Token ids, int64."""


class Sampling:
    """Draws the pending samples that no other process draws. What is under way when it is stopped is given up."""

    def __init__(self, store: RunStore, config: Config, engine: BatchedEngine, pending: dict[SampleKey, Pending],
                 tracking: Tracking):
        self._store, self._config, self._engine, self._pending, self._tracking = store, config, engine, pending, tracking
        self._attempts = Attempts(store, config.hardware.max_attempts)
        self._before, self._shown, self._correct = len(store.records), 0, 0
        self._under_way: dict[SampleKey, Finished | None] = {}
        """What was begun and not recorded; with a result where it is being graded."""

    def run(self) -> None:
        """Comes back when nothing is left that this process can draw. Raises UserError where it cannot record, Stopped."""
        from tqdm import tqdm

        self._tracking.start()
        self._pool = self._config.grader.start()
        # 0.5 s between redraws: where the output is no terminal each one is a line.
        self._bar = tqdm(total=len(self._pending), unit="sample", desc=self._config.label(), smoothing=0.1, mininterval=0.5,
                         dynamic_ncols=True, disable=bool(ranks.rank()))
        try:
            self._draw()
            if not self._is_complete():
                stopping.check()
        except (KeyboardInterrupt, stopping.Stopped, UserError):
            self._give_up()
            raise
        finally:
            self._bar.close()
            self._pool.close()
            self._attempts.close(complete=self._is_complete())
        self._tell()

    def _draw(self) -> None:
        for claimed, alone in self._rounds():
            for done in self._engine.steps(self._begun(claimed, alone)):
                if done is not None and done.result is None:
                    self._keep(Grade(NOT_DRAWN, None, reason=done.failure), done)
                elif done is not None:
                    self._under_way[done.tag] = done
                    text = self._engine.model.decode(done.result.trajectory.tokens)
                    self._pool.submit(done.tag, text, self._pending[done.tag].problem.answer)
                self._record()
            self._record(wait=True)
            self._store.sync()

    def _rounds(self) -> Iterator[tuple[Iterable[SampleKey], bool]]:
        """Samples to be drawn together, or one that is to be drawn alone; in the end what other processes leave.

        Each is claimed when it is asked for.
        """
        suspects = dict.fromkeys(self._attempts.suspects(self._pending))
        begun = (key for key in ranks.own_part_first(list(self._pending)) if key not in suspects)
        yield self._store.take(begun), False
        for key in suspects:
            yield self._store.take([key]), True
        turn = 0
        while ranks.waits() and not self._is_complete() and not stopping.requested():
            recorded = self._store.recorded()
            left = [key for key in self._pending if key not in recorded]
            turn = turn % max(1, len(left))
            tried = [*left[turn:], *left[:turn]][:_TRIED]
            found = self._left_behind(tried)
            if found is None:
                turn += _TRIED
                time.sleep(_POLL_SECONDS)
                self._look()
            else:
                yield found

    def _left_behind(self, tried: list[SampleKey]) -> tuple[Iterable[SampleKey], bool] | None:
        """What a process that is gone had begun: all of it together, but for suspects. None where others draw all of these."""
        fresh = self._store.take(key for key in tried if not self._attempts.is_suspect(key))
        first = next(fresh, None)
        if first is None:
            first = next(self._store.take(tried), None)
        if first is None:
            return None
        self._attempts.reread()  # of its end
        alone = self._attempts.is_suspect(first)
        return ([first], True) if alone else (itertools.chain([first], fresh), False)

    def _begun(self, claimed: Iterable[SampleKey], alone: bool) -> Iterator[tuple[SampleKey, Chain]]:
        """The chains of samples, as the engine has room for them."""
        from dflash_mcmc.engine.interface import Finished

        for key in claimed:
            if stopping.requested():
                return
            entry, failure = self._pending[key], self._attempts.failure(key)
            if failure:
                self._keep(Grade(NOT_DRAWN, None, reason=failure), Finished(key, None, Cost(), 0.0, 0.0, failure))
                continue
            self._attempts.begin(key, alone)
            self._under_way[key] = None
            yield key, build.chain(self._config, self._config.sampler, entry.problem.id, entry.chain, entry.prompt)

    def _record(self, wait: bool = False) -> None:
        for key, grade in self._pool.finished(wait):
            # A signal to every process of a job ends those that grade, too: that is no grade.
            if not (stopping.requested() and grade.verdict in (ERROR, TIMEOUT)):
                self._keep(grade, self._under_way[key])

    def _keep(self, grade: Grade, done: Finished) -> None:
        record = record_of(self._pending[done.tag], grade, done, self._engine.model)
        self._store.append({**record, "grader": label(self._config.grader)})
        self._under_way.pop(done.tag, None)
        self._show()

    def _give_up(self) -> None:
        """What is graded is kept; what is not is drawn again."""
        try:
            self._record()
        finally:  # whatever ends this, it is no death of what was under way
            for key in self._under_way:
                self._attempts.give_up(key)

    def _look(self) -> None:
        """Takes in what others have recorded."""
        self._store.refresh()
        self._show()

    def _show(self) -> None:
        self._tracking.catch_up()
        records = self._store.records
        self._correct += sum(record["verdict"] == CORRECT for record in records[self._shown :])
        self._shown = len(records)
        share = f"correct {100 * self._correct / self._shown:.1f} % of {self._shown}" if records else ""
        self._bar.set_postfix_str(share, refresh=False)
        self._bar.update(self._shown - self._before - self._bar.n)

    def _is_complete(self) -> bool:
        return self._pending.keys() <= self._store.recorded()

    def _tell(self) -> None:
        """What the engine has done goes into run.json, and samples that could not be drawn are told."""
        if ranks.rank():
            return
        counters = self._engine.counters
        self._store.add_to_session({"engine": {**counters._asdict(), "utilisation": counters.utilisation}})
        records = self._store.records
        failed = [record for record in records if record["verdict"] == NOT_DRAWN]
        if failed:
            print(f"{self._store.folder}: {len(failed)} of {len(records)} samples could not be drawn and count as not "
                  f"correct: {failed[0]['problem']}: {failed[0]['reason']}", file=sys.stderr)


def record_of(entry: Pending, grade: Grade, done: Finished, model: LanguageModel) -> dict:
    """The line of a sample in the run's records."""
    problem, cost = entry.problem, done.cost
    result = done.result or ChainResult(Trajectory.start(entry.prompt))
    path = result.trajectory
    return {
        "problem": problem.id, "chain": entry.chain, "level": problem.level, "subject": problem.subject,
        **grade._asdict(), "gold": problem.answer,
        "text": model.decode(path.tokens), "num_tokens": path.length, "ended": path.ended,
        "log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum()),
        "proposals": result.proposals, "accepted": result.accepted,
        "moved": result.moved, "abandoned": result.abandoned, "law_error": result.law_error, **cost._asdict(),
        "seconds": round(done.seconds, 6), "share_seconds": round(done.share_seconds, 6), "tokens": path.tokens.tolist(),
        "trace": list(result.trace), **({"walk": list(done.walk)} if done.walk else {}),
    }


def metrics_of(record: dict) -> dict[str, float]:
    """What a tracker shows of a sample."""
    metrics = {"sample/correct": float(record["verdict"] == "correct"), "sample/num_tokens": record["num_tokens"],
               "sample/log_p": record["log_p"], "sample/seconds": record["seconds"],
               "sample/token_forwards": record["token_forwards"]}
    if record["proposals"]:
        metrics["sample/acceptance"] = record["accepted"] / record["proposals"]
        metrics["sample/moved_rate"] = record["moved"] / record["proposals"]
        metrics["sample/abandoned_rate"] = record["abandoned"] / record["proposals"]
    if record["tokens_drafted"]:
        metrics["sample/accepted_length"] = record["tokens_drawn"] / record["blocks_drafted"]
    return metrics
