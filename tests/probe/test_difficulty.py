"""Answers equal those of a run, signals depend on the answer alone, and tables are computed from the records."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.chains import build
from dflash_mcmc.config import command
from dflash_mcmc.config.checks import to_config
from dflash_mcmc.errors import UserError
from dflash_mcmc.probe import Unit, Work, difficulty
from dflash_mcmc.probe.difficulty import Difficulty
from dflash_mcmc.process import stopping
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import read_records
from dflash_mcmc.types import Grade
from tests.runs import execute

GREEDY = ("probe=difficulty", "draft=tiny", "sampler=greedy")
WARM = ("probe=difficulty", "draft=tiny", "sampler=temperature", "sampler.temperature=1.0", "num_chains=2")


def records(folder) -> list[dict]:
    found = read_records(folder)
    return sorted(found, key=lambda record: (record["problem"], record["chain"]))


def measured(config) -> list[dict]:
    """The records of all units, measured without a run, in the order of `records`."""
    work = Work(config.probe.units(config), "cpu")
    return sorted(({**unit._asdict(), **record} for unit, record in config.probe.measure(config, work)),
                  key=lambda record: (record["problem"], record["chain"]))


@pytest.fixture(scope="module")
def fifteen(tmp_path_factory) -> tuple[str, ...]:
    """The arguments for fifteen greedy answers."""
    return (*GREEDY, "dataset.limit=15", "tracker=none", f"paths.outputs={tmp_path_factory.mktemp('outputs')}")


@pytest.fixture(scope="module")
def result(fifteen):
    """The run of the fifteen answers."""
    with command.composer("config") as composing:
        return execute(to_config(composing.compose(fifteen).values))


def test_answers_equal_those_of_a_run_and_signals_depend_on_the_answer_alone(make_config):
    config = make_config(*WARM, "dataset.limit=3")
    found = measured(config)
    drawn = records(execute(make_config(*WARM[2:], "dataset.limit=3")).folder)
    assert [record["verdict"] for record in found] == [record["verdict"] for record in drawn]
    model = config.model.load("cpu")
    drafter = config.draft.load(model)
    prompts = build.prompts(config, model, config.dataset.problems())
    for record, sample in zip(found, drawn, strict=True):
        tokens = np.array(sample["tokens"])
        alone = difficulty.along(model, drafter, prompts[record["problem"]], tokens)
        assert (record["level"], record["num_tokens"]) == (sample["level"], len(tokens))
        assert record["num_compared"] == len(tokens) // 8 * 7
        for statistic, of in (("mean", np.mean), ("max", np.max)):
            expected = {name: of(values) for name, values in alone.items()}
            assert record[statistic] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_tables_equal_those_of_the_records(result):
    found, tables = records(result.folder), result.summary["tables"]
    wrong = np.array([record["verdict"] != "correct" for record in found])
    assert 0 < wrong.sum() < len(wrong)
    for row in tables["answers"]:
        values = np.array([record[row["statistic"]][row["signal"]] if row["statistic"] else record[row["signal"]]
                           for record in found])
        expected = stats.mannwhitneyu(values[wrong], values[~wrong]).statistic / (wrong.sum() * (~wrong).sum())
        assert row["auroc"] == pytest.approx(expected)
    by_label = {(row["signal"], row["statistic"]): row for row in tables["answers"]}
    kinds = {row["signal"]: row["kind"] for row in tables["answers"]}
    assert set(kinds) == {*difficulty.SIGNALS["draft"], *difficulty.SIGNALS["target"], "num_tokens", "level"}
    best = max(row["auroc"] for row in tables["answers"] if row["kind"] != "draft")
    for row in tables["answers"]:
        assert row["minus_best"] is None or row["minus_best"] == pytest.approx(row["auroc"] - best)
        entropy = by_label["target_entropy", row["statistic"] or "mean"]
        assert row["minus_entropy"] is None or row["minus_entropy"] == pytest.approx(row["auroc"] - entropy["auroc"])
    summary = result.summary
    assert summary["best_baseline_auroc"] == best
    assert summary["difference"] == pytest.approx(summary["best_draft_auroc"] - best)
    (outcome,) = tables["outcomes"]
    assert (outcome["n"], outcome["wrong"]) == (len(wrong), wrong.sum())
    right = [1 - record["mean"]["total_variation"] for record in found if record["verdict"] == "correct"]
    assert outcome["acceptance_right"] == pytest.approx(np.mean(right))
    names = {path.name for path in result.folder.iterdir()}
    assert {"fig_difficulty_auroc.png", "fig_difficulty_auroc.svg", "outcomes.csv", "answers.csv"} <= names


def test_an_interrupted_run_has_the_same_records(make_config, monkeypatch, tmp_path):
    monkeypatch.setattr(Difficulty, "figures", lambda *given: {})
    whole = execute(make_config(*WARM, "dataset.limit=4", f"paths.outputs={tmp_path / 'whole'}"))
    config = make_config(*WARM, "dataset.limit=4")
    append = RunStore.append

    def interrupted(store, record):
        append(store, record)
        if len(store.records) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunStore, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(config)
    monkeypatch.setattr(RunStore, "append", append)
    continued = execute(config)
    assert continued.num_new == 5
    assert records(continued.folder) == records(whole.folder)
    assert continued.summary == whole.summary


def test_a_shorter_block_gives_other_signals_of_other_tokens(make_config, result):
    short = measured(make_config(*GREEDY, "dataset.limit=2", "draft.block_size=3"))
    for record, long in zip(short, records(result.folder), strict=False):
        assert record["num_tokens"] == long["num_tokens"]
        assert record["num_compared"] == record["num_tokens"] // 3 * 2 != long["num_compared"]
        assert record["mean"] != long["mean"]


class LatePool:
    """A pool that returns grades only when nothing else is left to do, in another order."""

    def __init__(self):
        self.texts, self.closed = {}, False

    def submit(self, tag, text, gold, question):
        self.texts[tag] = f"{text} {gold}"

    def finished(self, wait=False):
        if wait:
            for tag in reversed(list(self.texts)):
                yield tag, Grade("no_answer" if tag.problem == "arith-001" else "wrong", None)

    def close(self):
        self.closed = True


class EndedPool(LatePool):
    """A pool whose processes are ended by a signal."""

    def finished(self, wait=False):
        for tag in self.texts if wait else ():
            yield tag, Grade("ungradable", None)


def test_late_grades_are_matched_to_their_answers(make_config, monkeypatch, result):
    config, pool = make_config(*GREEDY, "dataset.limit=3"), LatePool()
    monkeypatch.setattr(type(config.grader), "start", lambda self: pool)
    late = measured(config)
    assert pool.closed
    assert [record["verdict"] for record in late] == ["wrong", "no_answer", "wrong"]
    for record, known in zip(late, records(result.folder), strict=False):
        assert {**record, "verdict": None} == {**known, "verdict": None}
    values = Difficulty().summarise(None, late).values
    assert (values["num_no_answer"], values["num_wrong"]) == (1, 3)


def test_the_graders_processes_end_after_an_error(make_config, monkeypatch):
    config, pool = make_config(*GREEDY, "dataset.limit=3"), LatePool()
    monkeypatch.setattr(type(config.grader), "start", lambda self: pool)
    monkeypatch.setattr(difficulty, "along", lambda *given: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        measured(config)
    assert pool.closed


def test_skipped_answers_are_counted(make_config, monkeypatch):
    monkeypatch.setattr(difficulty, "along", lambda *given: {"target_entropy": np.array([np.nan])})
    found = measured(make_config(*GREEDY, "dataset.limit=2"))
    assert all("not numbers" in record["skipped"] for record in found)
    values = Difficulty().summarise(None, found).values
    assert (values["num_problems"], values["num_skipped"]) == (0, 2)
    assert values["num_skipped_not_correct"] == sum(record["verdict"] != "correct" for record in found)
    with pytest.raises(UserError, match=r"^dataset\.max_new_tokens: given 7; allowed: at least 8, a block$"):
        measured(make_config(*GREEDY, "dataset.limit=2", "dataset.max_new_tokens=7"))


def test_what_a_stop_ends_is_no_verdict(monkeypatch):
    """A signal to every process of a job ends the grading processes too. The next start measures the answer again."""
    path = SimpleNamespace(length=3, tokens=np.arange(3), prompt=np.arange(4))
    finished = [SimpleNamespace(tag=Unit("a"), result=SimpleNamespace(trajectory=path), failure="")]
    model = SimpleNamespace(decode=str, tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "a question"))
    engine = SimpleNamespace(steps=lambda chains: iter(finished), model=model)
    config = SimpleNamespace(grader=SimpleNamespace(start=EndedPool))
    problems = {"a": SimpleNamespace(level=2, answer="7", question="")}
    assert len(list(difficulty._graded(config, engine, problems, iter(()), lambda answer: {"num_tokens": 3}))) == 1
    monkeypatch.setattr(stopping, "requested", lambda: True)
    assert not list(difficulty._graded(config, engine, problems, iter(()), lambda answer: {"num_tokens": 3}))


def test_short_answers_and_those_not_drawn_are_skipped_with_their_verdict():
    units = [Unit("a"), Unit("b")]
    short = SimpleNamespace(trajectory=SimpleNamespace(length=3, tokens=np.arange(3), prompt=np.arange(4)))
    finished = [SimpleNamespace(tag=units[0], result=None, failure="no memory"), None,
                SimpleNamespace(tag=units[1], result=short, failure="")]
    model = SimpleNamespace(decode=str, tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "a question"))
    engine = SimpleNamespace(steps=lambda chains: iter(finished), model=model)
    problems = {name: SimpleNamespace(level=2, answer="7", question="") for name in "ab"}
    config = SimpleNamespace(grader=SimpleNamespace(start=LatePool))
    found = dict(difficulty._graded(config, engine, problems, iter(()), lambda answer: difficulty._signals(
        None, SimpleNamespace(num_drafted=7), answer)))
    assert found[units[0]] == {"level": 2, "verdict": "not_drawn", "num_tokens": 0, "skipped": "no memory"}
    assert found[units[1]] == {"level": 2, "verdict": "wrong", "num_tokens": 3, "skipped": "shorter than 8 tokens"}
