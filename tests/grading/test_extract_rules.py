"""`grader.extract`: the answer of a text without a box, by the rule that is chosen."""

import json
import time
from pathlib import Path

import pytest

import dflash_mcmc
from dflash_mcmc.config.identity import identity_of, settings_of
from dflash_mcmc.grading.choice import final_letter
from dflash_mcmc.grading.extraction import RULES, Extraction, continued, last_box
from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.regrade import grader_config, regrade
from dflash_mcmc.store.records import read_records
from tests.cases import quick
from tests.refusals import refused

AUTO = Extraction(tuple(RULES))
UNBOXED = [json.loads(line) for line in (Path(__file__).parent / "unboxed.jsonl").read_text().splitlines()]
"""Texts without a box, and the value that a careful reader takes. They were written without a look at the rules."""
TEXTS = {  # text: (answer, rule) with extract=auto
    r"\boxed{5} so the answer is 6": ("5", "boxed"), "#### 1,234": ("1234", "hashes"), "####-7.": ("-7", "hashes"),
    "#### $18\nThe answer is 3.": ("18", "hashes"), "#### 4\n#### 5": ("5", "hashes"),
    "#### 1. First step\nThere are 3.": ("3", "last_number"),
    "The answer is $12.": ("12", "answer_is"), "So the answer is: **12**": ("12", "answer_is"),
    "Answer: (B)": ("(B)", "answer_is"), "The answer is 12 apples.": ("12", "answer_is"),
    "The answer is 12 divided by 4.": ("12 divided by 4", "answer_is"), "The answer is 2 squared": ("2 squared", "answer_is"),
    "The answer is 5 more than 7": ("5 more than 7", "answer_is"), "The answer is 50% off": ("50% off", "answer_is"),
    "The answer is 5 hours and 30 minutes.": ("5 hours and 30 minutes", "answer_is"),
    "One might think the answer is 5. But the answer should be 6.": ("6", "answer_is"),
    "the answer is -3.5.": ("-3.5", "answer_is"), "Answer: 50%": (r"50\%", "answer_is"),
    "The answer is 3/4": ("3/4", "answer_is"),
    r"The answer is $\frac{1}{2}$.": (r"\frac{1}{2}", "answer_is"), r"The answer is \(x = 5\).": ("x = 5", "answer_is"),
    "The answer is 5. Wait, the answer is 7.": ("7", "answer_is"), "**Final Answer:**\n\n12": ("12", "answer_is"),
    "### Final Answer\n12": ("12", "answer_is"), "The final answer is $1,234.50 per week.": ("1234.50", "answer_is"),
    r"Final Answer: The final answer is $2\sqrt{3}$. I hope it is correct.": (r"2\sqrt{3}", "answer_is"),
    "The answer to the question is 9!": ("9", "answer_is"), "The answer is $5 and $6 more.": ("$5 and $6 more", "answer_is"),
    "The answer is $12$ dollars": ("12", "answer_is"), "the answer is 12 million": ("12 million", "answer_is"),
    "The answer is circle.": ("circle", "answer_is"), "The answer is 1,000,000.": ("1000000", "answer_is"),
    "The answer is (3, 4).": ("(3, 4)", "answer_is"), "The answer is about 7": ("7", "answer_is"),
    "So, the answer is 100 - 100 = 0 centimeters.": ("0", "answer_is"), "The answer is x = 5.": ("x = 5", "answer_is"),
    "the answer is 144 miles / 12 hours = 14.4 miles per hour.": ("14.4", "answer_is"),
    "The answer is 2x + 1 = 7.": ("2x + 1 = 7", "answer_is"), "The answer is $3 * 4 = 2 * 6 = $12.": ("12", "answer_is"),
    "The answer is 5. The answer is": ("5", "answer_is"), "The answer is not 5.": ("5", "last_number"),
    "So 12-5=7 pens are left.": ("7", "last_number"), "x = -4": ("-4", "last_number"),
    "It is −4 degrees": ("-4", "last_number"),
    "costs -$12": ("-12", "last_number"), r"\(\frac{3}{4}\)": (r"\frac{3}{4}", "last_number"),
    "1 1/2": ("1 1/2", "last_number"),
    r"50 \%": (r"50\%", "last_number"), "1.5e3": ("1.5e3", "last_number"), ".5": (".5", "last_number"),
    "No number": (None, "nothing_extracted"), "": (None, "nothing_extracted"),
    "<think>The answer is 3": (None, "unfinished_thinking"), "<think>#### 3</think> 4": ("4", "last_number"),
}
NUMBERS = {  # rule: {text: answer}
    "answer_is": {
        "The answer is 72, in total.": "72", "The answer is\n$$\n72\n$$": "72", "The answer is:\n\\[\nx = 5\n\\]": "x = 5",
        "The answer is 2^{10}.": "2^{10}", "The answer is 2\\sqrt{3}, as required.": "2\\sqrt{3}",
        "The answer is 1 1/2, in cups": "1 1/2", "The answer is 5, and 6": "5, and 6",
        "The answer is 12 (mod 7)": "12 (mod 7)", "The answer is 2, 3 and 5.": "2, 3 and 5",
        "The answer is 72 because 9*9 = 81": "72", "The answer is 3 or 4": "3 or 4", "The answer is $5$, or $6$.": "5",
        "The answer is 72, which is the total.": "72", "The answer is 72 (eight times nine).": "72",
        "The answer is 72 — eight nines.": "72", "The answer is 72, as required.": "72", "The answer is 72, not 73.": "72",
        "The answer is 72 and we are done.": "72", "The answer is 72; so that is all.": "72",
        "The answer is 72 because 8*9 = 72.": "72", "The answer is 72 clips, altogether.": "72",
        "The answer is 72, 73.": "72, 73"},
    "last_number": {
        "x = 3 \\times 10^{5}": "3 \\times 10^{5}", "so x^2": None, "it is \\frac{\\sqrt{3}}{2}.": "\\frac{\\sqrt{3}}{2}",
        "2\\sqrt{3}": "2\\sqrt{3}", "2√3": "2√3", "12\u202f500": "12500", "12\u2009500": "12500", "12'500": '12500',
        "12’500 francs": "12500", "1½": "1½", "1\\frac12": "1\\frac12", "9,\\!500": "9500", "3{,}14": "3.14", "0.5": "0.5",
        "12\\pi": "12\\pi", "area 5 m^2": "5", "1010_2": "1010_2", "10³": "10³", "5x = 10, x = 2": "2", "by 2024-03-05": "05",
        "1,2,3": "3", "f(2)": "2", "1/2 + 1/3 = 5/6.": "5/6", "1 234": "234", "3/4x": "3/4", "7^{-2} m": "7^{-2}",
        "1 \\frac{1}{2} cups": "1 \\frac{1}{2}", "\\sqrt[3]{5}": "\\sqrt[3]{5}"},
    "hashes": {
        "#### 12. Step\n 5": None, "#### 1{,}234": "1234", "#### 2^{10}": "2^{10}", "#### 72, in total": "72"},
    "boxed": {
        "\\boxed{9{,}500}": "9500", "\\boxed{9,500}": "9,500", "\\boxed{12\\,500}": "12500", "\\boxed{x^2}": "x^2"},
}


@pytest.mark.parametrize(("text", "found"), TEXTS.items(), ids=range(len(TEXTS)))
def test_the_extracted_answer(text, found):
    assert AUTO.find(text) == found


@pytest.mark.parametrize("rule", NUMBERS)
def test_all_extractions_read_numbers_by_one_grammar(rule):
    assert {text: Extraction((rule,)).find(text).answer for text in NUMBERS[rule]} == NUMBERS[rule]


def test_a_text_continues_the_thinking_that_its_prompt_has_begun():
    for prompt, unfinished in (("<|assistant|><think>\n", True), ("<think>\n\n</think>\n\n", False), ("Use <think>.", False)):
        assert (AUTO.find(continued(prompt, r"so \boxed{3}")).rule == "unfinished_thinking") == unfinished
        assert AUTO.find(continued(prompt, r"so \boxed{2}</think>\boxed{3}")).answer == "3"


@pytest.mark.slow
def test_a_run_and_its_regrading_know_how_the_prompt_ended(tmp_path):
    run = dflash_mcmc.run(
        "sampler=temperature", "dataset.max_new_tokens=4", "dataset.limit=2", "model.chat=false", "tracker=none",
        "dataset.prompt='{question} <think>'", f"paths.outputs={tmp_path}")
    assert {record["rule"] for record in read_records(run.folder)} == {"unfinished_thinking"}
    pool = (config := grader_config(["grader.extract=auto"])).grader.start()
    regraded = regrade(run.folder, config, pool)
    pool.close()
    assert {record["rule"] for record in regraded.records} == {"unfinished_thinking"}


def test_the_order_of_the_rules_and_the_end_of_the_answer():
    text = "So 3.\n#### 4\nThe answer is 5.\n\nQuestion: 6?\nThe answer is 7."
    assert [Extraction((rule,)).find(text).answer for rule in RULES] == [None, "4", "7", "7"]
    ended = ("\nQuestion:",)
    assert [Extraction((rule,), ended).find(text).answer for rule in RULES] == [None, "4", "5", "5"]
    assert Extraction(("answer_is", "hashes")).find(text) == ("7", "answer_is")
    assert Extraction().find(text) == (None, "no_box")


def test_choices_are_found_by_the_chosen_rules():
    def letter(text: str, *rules: str) -> tuple[str | None, str]:
        return final_letter(text, "ABCD", Extraction(rules, ("\nQuestion:",)))

    assert letter("It is (A), not (C) hm", "last_letter") == ("C", "last_letter")
    assert letter("(B)\nQuestion: (D)", "boxed", "last_letter") == ("B", "last_letter")
    assert letter("#### B\n#### Notes", "hashes") == ("B", "hashes")
    assert letter("The answer is B.", "boxed") == (None, "nothing_extracted")
    assert letter("<think>(B)", "last_letter") == (None, "unfinished_thinking")


LOOPS = ("1 = ", "1 pen ", "The answer is 5. ", "answer to ", "answer is not ", "answer:\n", "1,", "#### ", "$", "1/", "-",
         " ", r"\frac{1}", "1 1/", "answer is **", "I hope it is correct", "(A",
         r"\boxed{", "9{,}", "1,\\!", r"\frac{", r"\sqrt{", "2^", "72, ", "72 — ", "1’234", "$$", "√(")


@pytest.mark.parametrize("loop", quick(LOOPS, LOOPS[0]), ids=range(len(LOOPS)))
def test_looping_text_is_read_in_linear_time(loop):
    """The run itself reads it. It takes a tenth of a second; with quadratic time it would take minutes."""
    text = loop * (200_000 // len(loop))
    started = time.process_time()
    for rule in RULES:
        Extraction((rule,)).find(f"The answer is{text}")
    final_letter(text, "ABCD", Extraction(("hashes", "last_letter")))
    assert time.process_time() - started < 5


def test_the_identity_names_the_rules_of_extraction(make_config):
    before = identity_of(make_config())
    assert before == identity_of(make_config("grader.extract=[boxed]"))
    assert (before["grader.extract"], before["grader.until"]) == ("boxed", [])
    assert settings_of(make_config("grader.extract=auto"))["grader.extract"] == "auto"
    assert settings_of(make_config(r"grader.until=['\nQuestion:']"))["grader.until"] == [r"\nQuestion:"]
    assert make_config(r"grader.until=['\nQuestion:']").grader.extraction().until == ("\nQuestion:",)


@pytest.mark.parametrize("wrong", ["grader.extract=last", "grader.extract=[]", "grader.extract=[boxed,boxed]",
                                   "grader.until=['']"])
def test_wrong_rules_are_one_line(make_config, wrong):
    with refused(wrong.partition("=")[0]):
        make_config(wrong)


def test_unboxed_answers_are_read_as_a_careful_reader_reads_them():
    assert len(UNBOXED) == 100
    read = {case["text"]: (case["value"], AUTO.find(case["text"]).answer) for case in UNBOXED}
    assert not {text: pair for text, pair in read.items() if pair[1] is None or decide(*pair).verdict != "correct"}


# The final answer of a text: the last balanced box after the thinking, found in linear time.

@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{42}.", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{7}", "7"), (r"\boxed {7}", "7"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"), (r"\boxed{5} and \boxed{6", "5"),
    (r"\boxed{\boxed{5}}", "5"), (r"} \boxed{5}", "5"), (r"<think>\boxed{1}</think> \boxed{2}", "2"),
    (r"\boxed{1}</think>\boxed{2}</think>\boxed{3}", "3"), (r"\boxed{1}</think>\boxed{2}</think> nothing", None),
    (r"<think>\boxed{1}</think> nothing", None), (r"<think>\boxed{1}", None),
    (r"<think>a</think> \boxed{1} <think> again", None), ("no box", None), (r"\boxed{unclosed", None), (r"\boxed 5", None),
    ("", None), (r"\boxed{}", ""), (r"\boxed{" * 3000, None),
])
def test_extraction(text, answer):
    assert last_box(text) == answer


@pytest.mark.parametrize(("said", "answer"), [
    ("2x = 14, so x = 7.", "7"), ("3y = 12, which means that y = 4", "4"), ("1/2 of 8, i.e. 4.", "4"),
    ("x + 2 = 5 ⇒ x = 3", "3"),
    ("minus 7.", "-7"), ("negative 1/2", "-1/2"), ("12 dollars and 50 cents.", "12.50"), ("1 dollar and 5 cents", "1.05"),
    ("7, which is 2 more than 5", "7"), ("12, so 13 is too many", "12"), ("12 minus 7", "12 minus 7")])
def test_the_value_at_the_end_of_a_derivation(said, answer):
    assert RULES["answer_is"]("The answer is " + said) == answer
