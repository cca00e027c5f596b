"""Unicode characters rewritten as LaTeX: the signs that models write for `-`, `\\pi`, `\\sqrt` or `^2`."""

from __future__ import annotations

import re

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "＋": "+", "×": r"\times ", "⋅": r"\cdot ",
    "·": r"\cdot ", "∙": r"\cdot ", "•": r"\cdot ", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\leq ", "≦": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "≧": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ",
    "≡": r"\equiv ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∖": r"\setminus ", "∞": r"\infty ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "√": r"\sqrt ",
    "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "∘": r"\circ ", "′": "'", "’": "'",
    "‘": "'", "″": "''", "“": '"', "”": '"', "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ",
    "…": r"\ldots ", "⋯": r"\cdots ", "∠": r"\angle ", "△": r"\triangle ", "⊥": r"\perp ", "∥": r"\parallel ",
    "→": r"\to ", "⇒": r"\Rightarrow ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "％": r"\%", "＄": r"\$",
    "¼": r" \frac{1}{4}", "½": r" \frac{1}{2}", "¾": r" \frac{3}{4}", "⅓": r" \frac{1}{3}", "⅔": r" \frac{2}{3}",
    "⅕": r" \frac{1}{5}", "⅖": r" \frac{2}{5}", "⅗": r" \frac{3}{5}", "⅘": r" \frac{4}{5}", "⅙": r" \frac{1}{6}",
    "⅚": r" \frac{5}{6}", "⅛": r" \frac{1}{8}", "⅜": r" \frac{3}{8}", "⅝": r" \frac{5}{8}", "⅞": r" \frac{7}{8}",
    "（": "(", "）": ")", "［": "[", "］": "]", "｛": r"\{", "｝": r"\}", "，": ",", "；": ";", "：": ":", "＝": "=",
    "．": ".",
    "、": ",", "。": ".", "｜": "|", "＜": "<", "＞": ">", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ",
    "\u2003": " ", "\u3000": " ", "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\u2061": "", "\u2062": "",
    "\ufeff": "", "\t": " ", "\r": " ", "\n": " ",
}
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta", "ι": "iota",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda",
    "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "ϕ": "phi", "ϵ": "epsilon",
}
_TABLE = str.maketrans({**_SIGNS, **{sign: f"\\{name} " for sign, name in _GREEK.items()},
                        **{chr(0xFF10 + digit): str(digit) for digit in range(10)}})
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
_RUN = re.compile(f"([{''.join(_RAISED)}]+)|([{''.join(_LOWERED)}]+)")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])")


_BLANK_END = re.compile(r"(?:\s|(?<=\s)\\(?=(?:\\\\)*(?!\\)))*")
r"""Trailing blanks: white space, and the backslash of a `\ ` (not of a `\\`). The pattern is for reversed texts."""


def matched(pattern: re.Pattern[str], text: str, position: int = 0) -> re.Match[str]:
    """The match of a pattern that is known to match at this position. Raises ValueError if it does not match."""
    match = pattern.match(text, position)
    if match is None:
        raise ValueError(f"no {pattern.pattern} at {position} in {text!r}")
    return match


def trimmed(text: str) -> str:
    r"""The text without surrounding white space. A trailing `\ `, which is a space in LaTeX, is removed with its backslash."""
    return text[:len(text) - matched(_BLANK_END, text[::-1]).end()].lstrip()


def to_latex(text: str) -> str:
    """The text with Unicode signs as LaTeX commands, and superscript and subscript digits as exponents and indices."""
    if text.isascii() and not any(sign in text for sign in "\t\r\n"):
        return text
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _RUN.sub(_raise, text)
    return text.translate(_TABLE)


def _raise(run: re.Match) -> str:
    up, down = run.groups()
    return f"^{{{''.join(_RAISED[sign] for sign in up)}}}" if up else f"_{{{''.join(_LOWERED[sign] for sign in down)}}}"
