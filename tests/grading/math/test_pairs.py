"""878 hand-written pairs of answers: equal ones, and ones that differ in a sign, an order, an end point or a base."""

from __future__ import annotations

from collections import Counter

import pytest

from dflash_mcmc.grading.__main__ import main, read_pairs, run_grader, table
from dflash_mcmc.grading.math.comparing import decide
from tests.conftest import ROOT

FILE = ROOT / "tests/grading/pairs.jsonl"
PAIRS = read_pairs(FILE)


def test_the_file_has_equal_and_different_pairs_of_each_family():
    assert len({(pair.gold, pair.answer) for pair in PAIRS}) == len(PAIRS) >= 200
    for family, count in Counter(pair.family for pair in PAIRS).items():
        kinds = {pair.equal for pair in PAIRS if pair.family == family}
        assert kinds == {True, False}, family
        assert count >= 14, family


def test_all_pairs_are_decided_correctly_in_both_directions():
    wrong = []
    for pair in PAIRS:
        for gold, answer in ((pair.gold, pair.answer), (pair.answer, pair.gold)):
            decision = decide(gold, answer)
            if (decision.verdict == "correct") != pair.equal:
                wrong.append((gold, answer, pair.equal, decision))
    assert wrong == []


def test_each_answer_equals_itself():
    """A command without effect is added, so that the strings differ and the answers are parsed."""
    answers = {side for pair in PAIRS for side in (pair.gold, pair.answer)} - {r"\text{}", "**18**"}
    assert [side for side in answers if decide(rf"\displaystyle {side}", side).verdict != "correct"] == []


def test_math_verify_makes_its_known_mistakes():
    """This shows that the table of graders really runs math-verify."""
    pairs = [pair for pair in PAIRS if pair.family in ("bases", "tiny and huge")]
    dollars = run_grader("math-verify, $...$", pairs, 8.0, 1)
    accepted = {(pair.gold, pair.answer) for pair, grade in zip(pairs, dollars.grades, strict=True)
                if grade.verdict == "correct" and not pair.equal}
    assert ("17_8", "17_9") in accepted  # math-verify drops indices
    assert ("10^{-30}", r"5 \cdot 10^{-30}") in accepted  # and accepts numbers that differ by less than 1e-15
    assert "| math-verify, $...$ |" in table(pairs, {"math-verify, $...$": dollars})


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
    done = command("dflash_mcmc.grading", str(FILE))
    assert done.returncode == 0, done.stderr
    rows = {row.split("|")[1].strip(): row.split("|")[2:] for row in done.stdout.splitlines() if row.startswith("|")}
    assert [cell.strip() for cell in rows["grader=math"][:4]] == ["100.0 %", "0", "0", "0"]
    assert float(rows["math-verify, $...$"][0].strip(" %")) < 90
    assert "grader=math is wrong" not in done.stdout
