"""A statement about a wrong, earlier or hypothetical answer does not replace the stated one."""

import pytest

from dflash_mcmc.grading.choice import final_letter
from dflash_mcmc.grading.extraction import after_thinking, stated_answer


@pytest.mark.parametrize("more", [
    "A common wrong answer is B.", "The wrong answer is B.", "The incorrect option is B.",
    "The most tempting choice is B.",
    "Students often think the answer is B.", "One might say that the answer is B.",
    "If x were negative, the answer would be D.",
    "With friction the answer would be A.", "The answer would be D if x were negative.", "Incorrect answer: B",
    "My first answer: B", "It is tempting to say the answer is B.", "Otherwise, the answer would be D.",
    "Unless the gas is ideal, in which case the answer is A."])
def test_another_choice_is_not_taken(more):
    assert final_letter(f"Answer: C\n\n{more}", "ABCD")[0] == "C"
    assert final_letter(f"The answer is C. {more}", "ABCD")[0] == "C"


@pytest.mark.parametrize("more", [
    "A common wrong answer is 15.", "If the train were late, the answer would be 15.",
    "My first answer was 15, which was wrong.", "The wrong answer is 15.", "Initially the answer was 15.",
    "Many people think the answer is 15."])
def test_another_number_is_not_taken(more):
    assert stated_answer(f"The answer is 12. {more}") == "12"


@pytest.mark.parametrize(("text", "letter"), [
    ("First I thought the answer is B. Final answer: C", "C"), ("The answer is A.\n\nNo: the answer is C.", "C"),
    ("The answer must be C.", "C"), ("The answer would be C.", "C"), ("Option A is wrong, so the answer is C.", "C"),
    ("First, we see that the answer is C.", "C"), ("If x = 2, the answer is C.", "C"), ("I think the answer is C.", "C"),
    ("Answer: D = 5", None), ("Answer: $A + B$", None), ("Answer: C(6,2) = 15, option D", "D"), ("Answer: $A$ + $B$", None),
    ("Answer: D - A", None), ("Answer: A < B", None), ("Answer: B - 12", "B"), ("Answer: (B) 12", "B"), ("Answer: **C**", "C"),
    ("Answer: A or B", None), ("Answer: C. Paris", "C"), ("Answer: $C$", "C")])
def test_what_is_stated_still_counts_and_a_letter_in_other_content_is_no_choice(text, letter):
    assert final_letter(text, "ABCD")[0] == letter


def test_only_its_own_mark_ends_a_thinking():
    assert after_thinking(r"<think>use </reasoning> \boxed{3}") is None
    assert after_thinking(r"<think>use <reasoning> here</think>\boxed{3}") == r"\boxed{3}"
    assert after_thinking(r"so 3</think>\boxed{3}") == r"\boxed{3}"
