"""Gold answers of datasets: each equals itself and its solution's box, and equals no other one."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.string_rule import same_string
from tests.bench.graders import main, read_pairs
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def math500(shared_data) -> list[dict]:
    rows = [json.loads(line) for line in (shared_data / "math500/test.jsonl").read_text().splitlines()]
    assert len(rows) == 500
    return rows


def test_all_500_equal_themselves_and_the_box_of_their_solution(math500, math_pool):
    """Spaces and braces are added, so that the strings differ and the whole grader is tested."""
    for number, row in enumerate(math500):
        math_pool.submit_answer((number, "itself"), f"{{ {row['answer']} }}", row["answer"])
        math_pool.submit((number, "solution"), row["solution"], row["answer"])
    found = dict(math_pool.finished(wait=True))
    assert len(found) == 1000
    assert {tag: grade for tag, grade in found.items() if grade.verdict != "correct"} == {}


def test_the_self_test_has_all_gold_answers(math500):
    stored = (ROOT / "dflash_mcmc/grading/math/golds.txt").read_text(encoding="utf-8").splitlines()
    assert stored == [row["answer"] for row in math500]


EQUAL = [
    ("(-2,1)", "-2,1"), ("-2,1", "1,-2"), (r"10,\!080", "10080"), ("120", r"120^\circ"), ("15", r"15\mbox{ cm}^2"),
    (r"2 \sqrt{5}", r"2\sqrt{5}"), ("30", r"30^\circ"), ("36", r"36^\circ"), ("36", r"\$36"), ("5", "x=5"),
    ("90", r"90^\circ"), (r"\frac14", r"\frac{1}{4}"),
]
"""All pairs of different gold answers that are equal, verified by hand."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_only_the_listed_pairs_of_gold_answers_are_equal(math500, every):
    """All 45,150 pairs of different gold answers, or 4 random ones of each."""
    golds = sorted({row["answer"] for row in math500})
    generator, listed = np.random.default_rng(0), {tuple(sorted(pair)) for pair in EQUAL}
    chosen = [(gold, str(other)) for gold in golds for other in generator.choice(golds, 4, replace=False) if other != gold]
    found = {tuple(sorted(pair)) for pair in (itertools.combinations(golds, 2) if every else chosen)
             if decide(*pair).verdict == "correct"}
    assert found == listed if every else found <= listed


@pytest.mark.slow
def test_a_changed_digit_or_sign_is_not_correct(math500):
    generator = np.random.default_rng(1)
    for row in math500:
        gold = row["answer"]
        places = [place for place, sign in enumerate(gold) if sign.isdigit() or sign in "+-"]
        if not places:
            continue
        place = int(generator.choice(places))
        sign = {"+": "-", "-": "+"}.get(gold[place]) or str((int(gold[place]) + int(generator.integers(1, 10))) % 10)
        changed = gold[:place] + sign + gold[place + 1:]
        assert decide(gold, changed).verdict != "correct", (gold, changed)


# 886 hand-written pairs of answers: equal ones, and ones that differ in a sign, an order, an end point or a base.

FILE = ROOT / "tests/grading/pairs.jsonl"
PAIRS = read_pairs(FILE)


def test_the_file_has_equal_and_different_pairs_of_each_family():
    assert len({(pair.gold, pair.answer) for pair in PAIRS}) == len(PAIRS) >= 200
    for family, count in Counter(pair.family for pair in PAIRS).items():
        kinds = {pair.equal for pair in PAIRS if pair.family == family}
        assert kinds == {True, False}, family
        assert count >= 14, family


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_all_pairs_are_decided_correctly(swapped):
    wrong = []
    for pair in PAIRS:
        gold, answer = (pair.answer, pair.gold) if swapped else (pair.gold, pair.answer)
        decision = decide(gold, answer)
        if (decision.verdict == "correct") != pair.equal:
            wrong.append((gold, answer, pair.equal, decision))
    assert wrong == []


def test_each_answer_equals_itself():
    """A command without effect is added, so that the strings differ and the answers are parsed."""
    answers = {side for pair in PAIRS for side in (pair.gold, pair.answer)} - {r"\text{}", "**18**"}
    assert [side for side in answers if decide(rf"\displaystyle {side}", side).verdict != "correct"] == []


ASKED = [
    (r"\frac{3}{4}", r"\frac{6}{8}", r"Write $\frac{6}{8}$ in lowest terms.", False),
    (r"\frac{57}{160}", ".35625", "What is the probability, as a common fraction?", False),
    (r"\frac{57}{160}", "57/160", "What is the probability, as a common fraction?", True),
    (r"\frac{57}{160}", ".35625", "What is the probability?", True),
    (r"\frac{3}{2}", r"1\frac{1}{2}", "Express the sum as a common fraction.", True),
    (".35625", r"\frac{57}{160}", r"Express $\frac{57}{160}$ as a decimal.", False),
    (r"-\sqrt{3}", r"\sin 100^\circ \left( \frac{1 + 4 \cos 100^\circ}{\cos 100^\circ} \right)",
     r"Simplify $\tan 100^\circ + 4 \sin 100^\circ.$", False),
    (r"-\sqrt{3}", r"-\frac{3}{\sqrt{3}}", r"Simplify $\tan 100^\circ + 4 \sin 100^\circ.$", True),
    ("x^2 + 2x + 1", "(x + 1)^2", "Expand $(x+1)^2$, that is, compute the product.", False),
    ("x^2 + 2x + 1", "1 + 2x + x^2", "Expand $(x+1)^2$, that is, compute the product.", True),
    ("6", "2 + 4", "Compute $2 + 4$.", False), ("6", "x = 6", "Find x with $x = 2 + 4$.", True),
]


@pytest.mark.parametrize(("gold", "answer", "question", "right"), ASKED)
def test_an_answer_has_the_form_that_the_question_asks_for(gold, answer, question, right):
    assert decide(gold, answer).verdict == "correct"
    decision = decide(gold, answer, question)
    assert decision.verdict == ("correct" if right else "wrong")
    assert (decision.rule == "form") != right


def test_command_reports_a_mistake_in_one_line(tmp_path, capsys):
    for text in ("", "[]\n", '{"gold": "1", "answer": "1"}\n', '{"gold": 1, "answer": "1", "equal": true}\n'):
        (tmp_path / "pairs.jsonl").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / "pairs.jsonl")])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "nothing.jsonl")])
    assert ended.value.code == 2


@pytest.mark.slow
def test_command_prints_the_comparison(command):
    done = command("tests.bench.graders", str(FILE))
    assert done.returncode == 0, done.stderr
    rows = {row.split("|")[1].strip(): row.split("|")[2:] for row in done.stdout.splitlines() if row.startswith("|")}
    assert [cell.strip() for cell in rows["grader=math"][:4]] == ["100.0 %", "0", "0", "0"]
    assert float(rows["math-verify, $...$"][0].strip(" %")) < 90
    assert "grader=math is wrong" not in done.stdout


# The string rule of published results: pairs that it accepts and rejects, as in its source.

SAME_STRINGS = [
    ("42", "42"), ("0.5", r"\frac{1}{2}"), (r"\frac12", r"\frac{1}{2}"), (r"\frac1{72}", r"\frac{1}{72}"), ("1/2",
    r"\frac{1}{2}"),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}"), (r"\sqrt2", r"\sqrt{2}"), (r"90^\circ", "90"), (r"\$36", "36"), (r"50\%", "50"),
    ("x=5", "5"),
    (r"\left(1,2\right)", "(1,2)"), ("58,500", "58500"), (r"10,\!080", "10080"), (r"\text{Evelyn}", "evelyn"), ("5.0", "5"),
    (".5", "0.5"), (r"5 \text{ cents}", "5"), ("(1, 2)", "(1,2.0)"), ("12 cm", "12"),
]
DIFFERENT = [
    ("42", "24"), (r"\frac{1}{2}", r"\frac{2}{4}"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"), (r"2\sqrt{3}", r"\sqrt{12}"),
    ("1,2", "2,1"),
    (r"\text{even}", r"\text{odd}"), ("5", ""), ("x^2", "x^3"), (r"\pi", "3.14"), ("y=5", "x+y=5"),
]


@pytest.mark.parametrize(("gold", "answer", "same"), [*((*pair, True) for pair in SAME_STRINGS),
                                                      *((*pair, False) for pair in DIFFERENT)])
def test_same_string(gold, answer, same):
    assert same_string(gold, answer) == same
