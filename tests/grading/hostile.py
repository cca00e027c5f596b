"""Answers that try to hang, crash or take over the grading process, or to fill its memory."""

from __future__ import annotations

import numpy as np

CODE = [
    "__import__('os').system('touch hostile')", "__import__(chr(111)+chr(115)).system(chr(116))",
    "().__class__.__bases__[0].__subclasses__()", "exec(open('hostile','w'))", r"\input{/etc/passwd}",
    r"\write18{touch hostile}",
    r"\newcommand{\a}{\a\a}\a", r"\def\x{\x\x}\x", r"\href{http://127.0.0.1}{1}",
]
HUGE = [
    r"9^{9^{9^{9}}}", "9**9**9**9", r"{9^{9}}^{9^{9}}", "(9^9)^9^9", "7**1000000000", "99999999!", "(10^8)!", "99!!!!",
    r"\binom{99999999}{49999999}", "1e999999999", "1.5E+99999999", "2.5E-99999999", "9999^{9999}" * 30, "999!" * 90,
    r"\cos(9999^{9999})", r"x^{9999^{9999}}", r"\sqrt[100]{7^{9999}}", r"\lfloor 9999^{9999}\pi \rfloor", r"e^{e^{e^{9}}}",
]
LONG = [
    "7" * 200_000, "7" * 61, ",".join("1" * 20_000), "1," * 190, "{" * 20_000, "x" * 400, "1/" * 199 + "1", "1,000" * 70,
    "\n" * 1_000_000, "a" * 1_000_000, r"\frac" * 50_000, "=".join("x" * 190), "+".join("abcdefghijklmnopqrstuvwxyz" * 7),
]
NESTED = [
    "(" * 3000 + ")" * 3000, "{" * 3000 + "}" * 3000, r"\sqrt{" * 24 + "2" + "}" * 24, r"\left(" * 100, "|" * 390,
    "-" * 390 + "1", r"\begin{pmatrix}" * 25, r"\text{" * 60, r"\sqrt" * 80, r"\sin" * 90 + "x", "^" * 390, "_" * 390,
    "x!" * 190, r"\pm 1" * 70,
]
SLOW = [
    r"1 - \frac{1}{(1+\omega)^{1997}}", r"\frac{1}{3}+(x+y)^{999}-(y+z)^{999}", r"\sum_{n=1}^{10^9} n",
    r"\prod_{i=1}^{99999} i",
    r"\int_0^\infty e^{x^{x^x}} dx", r"\lim_{x\to 0} x^{x^{x^x}}", "+".join(f"{name}^{{99}}" for name in "abcdfghjklmnopqrst"),
]
STRANGE = [
    "\x00", "1\x002", "\ud800", "\udfff" * 100, "\u202e" * 100, "🎉" * 300, "1/0", "0/0", "0^0", "0^{-1}", r"\tan 90^\circ",
    r"\ln 0", r"\log_1 5", r"\arcsin 5", "", " ", "$" * 390, "**" * 190, r"\\" * 190, "&" * 390, "%" * 390, r"\degree" * 50,
    "million " * 48, r"\color{red}" * 30 + "1", "NaN", "inf", "-inf", "None", "nan", "True",
]
ANSWERS = [*CODE, *HUGE, *LONG, *NESTED, *SLOW, *STRANGE]

_PIECES = [
    *"0123456789abcxyzABCXYZ(){}[]|^_+-*/=<>,.;:!%$&\\'\"~ \n\t", *"0123456789" * 3, r"\frac", r"\frac{", r"\sqrt",
    r"\sqrt[3]",
    r"\pi", r"\left(", r"\right)", r"\text{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "}{", "^{", "_{", r"\infty",
    r"\cup",
    r"\in", r"\pm", r"\sin", r"\log", r"\ln", r"\binom", r"\cdot", r"\leq", r"\approx", r"\circ", r"\boxed{", r"\sum", r"\int",
    r"\overline{", "!!", "**", "e+9", "10^", "999", "1,000", " or ", " and ", "sqrt", "sin", "inf", "base 8", "million",
    "\x00",
    "\ud83d", "π", "√", "½", "²", "₈", "−", "∞", "\u202e", "import os", "lambda", "eval(", "9**9", "x'", r"\mathbb{R}", r"\{",
    r"\}", "<think>", "```", "(A)",
]


_JOINTS = ["+", "-", r"\cdot ", "/", "^", ",", "=", "(", ")^{", "!", r"\cup ", "<", " ", "", r"\frac", "_"]
_SHORT = [text for text in ANSWERS if 0 < len(text) <= 120] + [
    r"\frac{9}{14}", r"\sqrt{7927}+p", "(3,4)", r"\begin{pmatrix}1\\2\end{pmatrix}", "43_6", "x^{99}", r"\sin(x)", "2^{999}",
    r"\binom{900}{450}", "999!", r"\sqrt[99]{x+y}", r"|x-y|", r"e^{i\pi}", r"\log_{7}(x)", "y=2x", r"[0,\infty)",
    "(a+b+c)^{60}",
]


def random_answers(count: int, seed: int) -> list[str]:
    """Random hostile answers, each of one of two kinds with equal probability.

    The first kind is a sequence of pieces of LaTeX, code and noise. Most are short, and one in fifty repeats a few pieces. The
    second kind joins formulas and hostile answers by operators; half of them have a random piece inserted.
    """
    generator = np.random.default_rng(seed)
    return [_noise(generator) if generator.random() < 0.5 else _joined(generator) for _ in range(count)]


def _noise(generator: np.random.Generator) -> str:
    length = int(generator.geometric(0.08)) if generator.random() < 0.95 else int(generator.integers(100, 400))
    size = min(length, 3) if generator.random() < 0.02 else length
    text = "".join(_PIECES[piece] for piece in generator.integers(len(_PIECES), size=size))
    return text if size == length else text * (1 + length // 3)


def _joined(generator: np.random.Generator) -> str:
    parts = [_SHORT[place] for place in generator.integers(len(_SHORT), size=int(generator.integers(1, 5)))]
    text = parts[0]
    for part in parts[1:]:
        text += _JOINTS[int(generator.integers(len(_JOINTS)))] + part
    if generator.random() < 0.5:
        place = int(generator.integers(len(text) + 1))
        text = text[:place] + _PIECES[int(generator.integers(len(_PIECES)))] + text[place:]
    return text
