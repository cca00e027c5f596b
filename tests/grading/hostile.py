"""Answers that try to hang, crash or take over the grading process, or to fill its memory."""

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
