"""Self-test of a grading process at its start: checks that known pairs are decided correctly with the installed libraries.

`golds.txt` contains the gold answers of MATH-500, one per line (Hendrycks et al. 2021, arXiv 2103.03874, as split by Lightman
et al. 2023; MIT, (c) 2021 Dan Hendrycks, (c) 2023 OpenAI).
"""

from __future__ import annotations

from pathlib import Path

from dflash_mcmc.grading.math.deciding import decide

EQUAL = (
    (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\sqrt{12}", r"2\sqrt{3}"), ("(a+5)(b+2)", "ab+2a+5b+10"), ("3, 5, 7", "7, 5, 3"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"), (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), ("52_8", "52_{8}"),
    (r"x \in [-2,7]", r"-2 \leq x \leq 7"), ("y = 2x + 3", "2x - y + 3 = 0"), (r"\text{east}", "East"),
    (r"\cot x", r"\frac{1}{\tan x}"), (r"\sin 2x", r"2\sin x\cos x"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\frac{1}{5}\begin{pmatrix} 1 \\ -18 \end{pmatrix}"), ("(1+i)^2", "2i"),
)
DIFFERENT = (
    (r"\frac{1}{2}", r"\frac{1}{3}"), ("(0,1)", "[0,1)"), ("17_8", "17_9"), (r"\text{circle}", r"\text{line}"),
    ("3m+n", "3M+N"), ("3^{-80}", "3^{-81}"), (r"\frac{\pi}{3}+1", r"\frac\pi7+1"), (r"\$8", r"8\%"), ("x_1+x_2", "x_1+x_3"),
    (r"\sqrt{x^2}", "x"),
)


def golds() -> list[str]:
    """The 500 gold answers of MATH-500, in the order of the dataset."""
    return Path(__file__).with_name("golds.txt").read_text(encoding="utf-8").splitlines()


def self_test() -> list[str]:
    """The pairs that are decided wrongly. The list is empty if the test passes.

    Each gold answer is compared with itself in braces, so that the strings differ and the answers are parsed. The test also
    triggers all lazy imports of the libraries, before the time of an answer is measured.
    """
    wrong = [f"{gold} = {gold}" for gold in golds() if decide(gold, f"{{ {gold} }}").verdict != "correct"]
    wrong += [f"{gold} = {answer}" for gold, answer in EQUAL if decide(gold, answer).verdict != "correct"]
    return wrong + [f"{gold} != {answer}" for gold, answer in DIFFERENT if decide(gold, answer).verdict != "wrong"]
