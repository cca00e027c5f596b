"""`grader=choice`: the letter that a text chooses, and no answer if it chooses none or several."""

import time

import pytest

from dflash_mcmc.config import command
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.choice import final_letter
from tests.cases import quick
from tests.grading.golds import graded

TEXTS = {
    r"\boxed{C}": "C", r"\boxed{\text{(C)}}": "C", r"\boxed{C) Paris}": "C", r"\boxed{\textbf{(E)}\ 12}": "E",
    r"\boxed{c}": "C", r"first \boxed{A}, no: \boxed{B}": "B", "The answer is (B).": "B",
    "the correct answer is **D**.": "D", "Answer: C": "C",
    "Answer: c": "C", "The final answer is: option E": "E", "The answer is A because it fits": "A", "Final answer\n\nB": "B",
    "B": "B", "(b)": "B", "B. Paris": "B", "**Answer: B**": "B", "answer choice: (D) 12": "D", "The answer is\n\n(C)": "C",
    "Therefore, the correct option is C.": "C", "The answer is A. No, wait. The answer is B.": "B",
    "<think>The answer is A.</think>The answer is D.": "D", "Option A is wrong, so the answer is J.": "J",
    r"\boxed{A or B}": None, r"\boxed{42}": None, "The answer is A or B": None, "Answer: A, B": None, "I do not know": None,
    "": None, "<think>The answer is A.": None, "Let A and B be sets.\nSo C = D": None, "The answer is 7.": None,
    r"\boxed{": None, r"\boxed{B. A and C}": "B", r"\boxed{(B) Both A and C}": "B", r"\boxed{D: none of A, B or C}": "D",
    r"\boxed{\text{D. Neither A nor B}}": "D", r"\boxed{A and C}": None, r"\boxed{D = 5}. Answer: A": "A",
    r"\boxed{42}. Answer: A": "A", r"\boxed{x_B}. The answer is C": "C", r"\boxed{\text{Option B}}": "B",
    r"\boxed{A or B}. Answer: A": None, r"\boxed{(A) = 3}. Answer: C": "C", "Answer: B. A and C": "B",
    "Therefore, option D is correct.": "D", "Choice A is wrong, choice (B) is right.": "B", "Option A is not correct": None,
    "It is not true that option A is correct": None,
    "The answer is B because A is wrong.": "B", "The answer is B, since C fails": "B", "The correct option is B, not C.": "B",
    "The answer is (C) 12 A": "C", "The best answer is E: vitamin A": "E", "The answer is $\\text{(C)}$.": "C",
    "**Answer**: C": "C", "The answer is the letter C": "C", "The answer is (b) seven": "B", "The answer is \\(B\\)": "B",
    "The answer is Vitamin C": None, "It cannot be that the answer is A.": None, "I don't think the answer is A": None,
    "It cannot be A, so the answer is B.": "B", "The answer is not B but C.": None, "The answer isn't A": None,
    "The answer is A, B, or C": None, "The answer is A.\nThe answer is B or C": None, "The answer is A and (B)": None,
    "The answer is A. However, the correct answer should be D.": "D", "The answer is therefore D.": "D",
    "First the answer is A, it seems. But B is the correct answer.": "B", "Statement B is the best. The answer is C": "C",
    "The answer is A. In general, the answer to the question is C.": "C", "Statement B is correct": None,
    "The answer is A good idea": None, "The answer is A mix of B and gold": None, "The answer is K": None,
}


@pytest.mark.parametrize(("text", "letter"), TEXTS.items(), ids=range(len(TEXTS)))
def test_the_chosen_letter(text, letter):
    assert final_letter(text, "ABCDEFGHIJ")[0] == letter


def test_grades(make_config):
    pool = make_config("grader=choice", "grader.letters=ABCDE").grader.start()
    submitted = [(r"\boxed{C}", r"\text{(C)}"), ("The answer is B", "C"), ("A or B", "A"), ("Answer: F", "A")]
    found = graded(pool, submitted)
    assert [grade.verdict for grade in found] == ["correct", "wrong", "no_answer", "no_answer"]
    assert found[1].answer == "B"
    boxed = graded(pool, [(rf"\boxed{{{'A'.ljust(length, '?')}}}", "A") for length in (400, 401)])  # as with other graders
    assert (boxed[0].verdict, boxed[1].verdict, boxed[1].rule) == ("correct", "unsupported", "length")
    with pytest.raises(UserError, match="gold answer '42'; allowed: one of the letters"):
        pool.submit(0, "A", "42")
    pool.close()


LOOPS = {
    "The answer is A.\n": "A", "So the answer is \\boxed{A}.\n": "A", "Option A is correct. ": "A", "answer is A ": "A",
    "Option A is not correct. ": None, "It cannot be the answer is A ": None, "not be answer is A ": None,
    "The answer is that.\n": None, "answer": None, "answer ": None, " ": None, "\\text{": None, "\\text ": None,
    "\\boxed{": None, "not be ": None, "A. ": "A", "(": None, "option A ": None,
    "A**": None, "the answer to ": None, "A is the ": None, "A is the best answer ": "A",
}


@pytest.mark.parametrize(("loop", "letter"), quick(LOOPS.items(), "("),
                         ids=range(len(LOOPS)))
def test_a_long_looping_text_is_graded_in_seconds(loop, letter):
    """The run itself grades it. It takes a fraction of a second; with quadratic time it would take minutes."""
    text = loop * (300_000 // len(loop))
    started = time.process_time()
    assert final_letter(text, "ABCD")[0] == letter
    final_letter(f"The answer is{text}", "ABCD")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("letters", ["A", "abc", "AAB", "A B"])
def test_letters_must_be_capital_and_unique(letters):
    command.prepare()
    with pytest.raises(UserError, match=r"grader\.letters"):
        command.check_command(["grader=choice", f"grader.letters={letters}"])
