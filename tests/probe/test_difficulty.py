"""Answers equal those of a run, signals depend on the answer alone, and tables are computed from the records."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_mcmc.chains import build
from dflash_mcmc.config import command
from dflash_mcmc.config.schema import to_config
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.errors import UserError
from dflash_mcmc.probe import Unit, Work, difficulty
from dflash_mcmc.probe.difficulty import Answers, Difficulty
from dflash_mcmc.process import stopping
from dflash_mcmc.statistics.estimates import Clusters
from dflash_mcmc.store.records import read_records
from dflash_mcmc.types import Grade
from tests.runs import execute
from tests.train.drafts import BLOCK_SIZE, block_alone, random_draft, random_target

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


@pytest.mark.slow
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
    assert {"outcomes.csv", "answers.csv"} <= {path.name for path in result.folder.iterdir()}


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


@pytest.mark.slow
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


SHORT = SimpleNamespace(tag=Unit("b"), failure="", result=SimpleNamespace(
    trajectory=SimpleNamespace(length=3, tokens=np.arange(3), prompt=np.arange(4))))
"""A chain with an answer of three tokens."""


def graded(pool: type, *finished) -> dict[Unit, dict]:
    """The records of chains that have ended, with signals of a draft of seven tokens."""
    model = SimpleNamespace(decode=str, tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "a question"))
    engine = SimpleNamespace(steps=lambda chains: iter(finished), model=model)
    problems = {name: SimpleNamespace(level=2, answer="7", question="") for name in "ab"}
    config = SimpleNamespace(grader=SimpleNamespace(start=pool), model=SimpleNamespace(thinking=None))
    return dict(difficulty._graded(config, engine, problems, iter(()), lambda answer: difficulty._signals(
        None, SimpleNamespace(num_drafted=7), answer)))


def test_what_a_stop_ends_is_no_verdict(monkeypatch):
    """A signal to every process of a job ends the grading processes too. The next start measures the answer again."""
    assert len(graded(EndedPool, SHORT)) == 1
    monkeypatch.setattr(stopping, "requested", lambda: True)
    assert not graded(EndedPool, SHORT)


def test_short_answers_and_those_not_drawn_are_skipped_with_their_verdict():
    assert graded(LatePool, SimpleNamespace(tag=Unit("a"), result=None, failure="no memory"), None, SHORT) == {
        Unit("a"): {"level": 2, "verdict": "not_drawn", "num_tokens": 0, "skipped": "no memory"},
        Unit("b"): {"level": 2, "verdict": "wrong", "num_tokens": 3, "skipped": "shorter than 8 tokens"}}


# Signals compared with float64 loops and numbers by hand; each place has its own distributions.

TOKENS = np.random.default_rng(3).integers(0, 58, 33)
PROMPT_LENGTH = 7
NAMES = {*difficulty.SIGNALS["draft"], *difficulty.SIGNALS["target"]}


def by_loops(target: np.ndarray, draft: np.ndarray, token: int) -> dict[str, float]:
    """The signals of one token from float64 logits (vocabulary,), by definition."""
    p, q = (np.exp(logits - logits.max()) for logits in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    pairs = [(float(a), float(b)) for a, b in zip(p, q, strict=True) if a > 0 or b > 0]
    return {
        "kl_target_draft": sum(a * math.log(a / b) for a, b in pairs),
        "kl_draft_target": sum(b * math.log(b / a) for a, b in pairs),
        "total_variation": sum(abs(a - b) for a, b in pairs) / 2,
        "minus_log_acceptance": -math.log(sum(min(a, b) for a, b in pairs)),
        "draft_entropy": -sum(b * math.log(b) for _, b in pairs),
        "draft_surprisal": -math.log(q[token]),
        "top1_disagreement": float(p.argmax() != q.argmax()),
        "target_entropy": -sum(a * math.log(a) for a, _ in pairs),
        "target_surprisal": -math.log(p[token]),
        "least_confidence": 1 - max(a for a, _ in pairs),
    }


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 3])
def test_signals_along_an_answer_equal_those_of_single_blocks(block_size):
    model = random_target()
    draft = random_draft(model)
    found = difficulty.along(model, DFlashDrafter(draft, model, block_size), TOKENS[:PROMPT_LENGTH], TOKENS[PROMPT_LENGTH:])
    anchors = range(PROMPT_LENGTH, len(TOKENS) - block_size + 1, block_size)
    places = [anchor + slot - PROMPT_LENGTH for anchor in anchors for slot in range(1, block_size)]
    assert all(len(values) == len(places) for values in found.values())
    with torch.no_grad():
        target = model.logits(model.decoder(input_ids=torch.from_numpy(TOKENS)[None]).last_hidden_state[0])
        for number, place in enumerate(places):
            position = place + PROMPT_LENGTH
            anchor = PROMPT_LENGTH + place // block_size * block_size
            alone = shorter(draft, block_size, model, anchor)[position - anchor - 1]
            expected = by_loops(target[position - 1].double().numpy(), alone.double().numpy(), int(TOKENS[position]))
            assert {name: values[number] for name, values in found.items()} == pytest.approx(expected, abs=2e-4)


def shorter(draft, block_size, model, anchor):
    """Logits of a block of this size, drafted alone."""
    whole = draft.shape
    draft.shape = replace(whole, block_size=block_size)
    try:
        return block_alone(draft, model, torch.from_numpy(TOKENS), anchor)
    finally:
        draft.shape = whole


# AUROC equals a count of pairs; resamples are of whole problems; differences are paired.

def random_answers(seed: int, size: int = 60, problems: int = 17) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Problems, whether answers are wrong, an informative score and an uninformative one, both with ties."""
    numbers = np.random.default_rng(seed)
    wrong = numbers.random(size) < 0.4
    scores = numbers.integers(0, 9, size) + 2.0 * wrong
    return [f"p{n}" for n in numbers.integers(0, problems, size)], wrong, scores, numbers.integers(0, 3, size) * 1.0


def by_pairs(wrong: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """Weighted AUROC, pair by pair."""
    total = won = 0.0
    for i, j in itertools.product(np.flatnonzero(wrong), np.flatnonzero(~wrong)):
        total += weights[i] * weights[j]
        won += weights[i] * weights[j] * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return won / total if total else np.nan


def test_auroc_by_hand():
    answers = Answers({"problem": list("abcd"), "wrong": [True, False, True, False], "some": [3.0, 1.0, 1.0, 2.0],
                       "all": [4.0, 1.0, 3.0, 2.0], "none": np.zeros(4)})
    assert answers.auroc("some").value == 0.625  # pairs: 1, 1, 0 and 1/2, of 4
    assert answers.auroc("all").value == 1.0
    assert answers.auroc("none").value == 0.5


@pytest.mark.slow
def test_intervals_equal_those_of_weighted_answers():
    """For a signal and for a difference, equal to `Clusters.statistic` with weights of single answers."""
    problems, wrong, scores, other = random_answers(1, size=25, problems=9)
    answers = Answers({"problem": problems, "wrong": wrong, "one": scores, "other": other})
    single = Clusters(problems)
    weighted = single.statistic(lambda weights: np.array([by_pairs(wrong, scores, row) for row in weights]))
    assert answers.auroc("one") == pytest.approx(weighted)
    paired = single.statistic(lambda weights: np.array([by_pairs(wrong, scores, row)
                                                        - by_pairs(wrong, other, row) for row in weights]))
    assert answers.auroc("one", "other") == pytest.approx(paired)


# Tables of synthetic records, which work without AUROCs.

def answer(problem: int, wrong: bool, level: int | None = 1, **changed) -> dict:
    """A record whose signals are larger if it is wrong, except those of the draft."""
    numbers = np.random.default_rng(problem)
    values = {name: float(numbers.random()) for name in difficulty.SIGNALS["draft"]}
    values.update({name: float(numbers.random() + 3.0 * wrong) for name in difficulty.SIGNALS["target"]})
    return {"problem": f"p{problem}", "chain": 0, "level": level, "verdict": "wrong" if wrong else "correct", "num_tokens": 40,
            "num_compared": 35, "mean": values, "max": values, **changed}


SKIPPED = {"problem": "p99", "chain": 0, "level": 1, "verdict": "not_drawn", "num_tokens": 0, "skipped": "not numbers"}
CASES = {
    "all right": [answer(n, False) for n in range(5)], "all wrong": [answer(n, True) for n in range(5)],
    "all skipped": [SKIPPED], "one problem": [answer(0, False), {**answer(0, True), "chain": 1}],
    "no levels": [answer(n, n % 2 == 0, level=None) for n in range(12)],
}


@pytest.mark.parametrize("name", CASES)
def test_without_wrong_or_right_answers_values_are_none(name):
    found = Difficulty().summarise(None, CASES[name])
    json.dumps(found._asdict(), allow_nan=False)
    if name.startswith("all"):
        assert found.values["best_draft_auroc"] is None
        assert all(row["auroc"] is None for row in found.tables["answers"])
    else:
        assert found.values["best_baseline_auroc"] == 1.0
    assert found.values["num_skipped"] == (name == "all skipped")
    if name == "one problem":
        assert found.tables["answers"][0]["auroc_low"] is None
    assert ("level" in {row["signal"] for row in found.tables["answers"]}) == (name != "no levels")
