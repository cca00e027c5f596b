r"""The string rule that published results use: two answers are equal if their normalised strings are equal.

The PRM800K grader (Lightman et al. 2023, arXiv 2305.20050) has this rule, and evaluations of power sampling use it. The rule
accepts answers that are equal after the normalisation of Hendrycks et al. (2021, arXiv 2103.03874), or after a second one,
which handles units and digit groups; tuples are compared element by element. PRM800K's last step, SymPy's `parse_expr`, is
left out because it executes the answer. The rule here is therefore at most as lenient as PRM800K's.

Records store the verdict of this rule next to the grade, for comparison with published results. The rule never changes a
grade.
"""

import re
from functools import lru_cache

_GROUPED = re.compile(r"(\d),(\d{3})(?!\d)")
_UNITS = ("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
          "feet", "inch", "yard")
_UNIT = re.compile(rf"(?:{'|'.join(_UNITS)})(?:es)?(?:s)? *(?:\^[0-9]+)?")
_WHOLE = re.compile(r"([+-]?\d{1,60})(?:\.0*)?")
_BRACKETS = "()[]"


def same_string(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold answer by the string rule."""
    if _hendrycks(gold) == _hendrycks(answer):
        return True
    a, b = _prm800k(gold), _prm800k(answer)
    if a == b:
        return True
    golds, answers = _elements(a), _elements(b)
    if not b or len(golds) < 2 or len(golds) != len(answers) or (a[0], a[-1]) != (b[0], b[-1]):
        return False
    return golds == answers


@lru_cache(maxsize=1 << 14)
def normal_form(text: str) -> str:
    """The normalised string of an answer: both normalisations, one after the other. It does not depend on the gold answer.

    Majority votes count answers with equal normal forms together, as self-consistency (Wang et al. 2022, arXiv 2203.11171)
    usually does for answers that are not plain numbers.
    """
    return _prm800k(_hendrycks(text))


def _hendrycks(text: str) -> str:
    text = _without_text(text.strip()).replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace(r"\left", "").replace(r"\right", "")
    text = text.replace(r"^{\circ}", "").replace(r"^\circ", "").replace(r"\$", "")
    text = text.split(r"\text{ ")[0] if text.count(r"\text{ ") == 1 else text
    text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = re.sub(r"\\sqrt(?=[^{])(.)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac(?!\{)(.)(?:(\{)|(.))", lambda over: rf"\frac{{{over[1]}}}" + (over[2] or f"{{{over[3]}}}"), text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _prm800k(text: str) -> str:
    text = _without_text(text).replace(r"\%", "%").replace(r"\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, zeros in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{zeros}")
    text = re.sub(r"\^ *\\circ", "", _UNIT.sub("", text))
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = _integer(re.sub(r",\\! *", "", text))
    text = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac").replace(r"\frac", r" \frac")
    text = re.sub(r" ?\\frac *\{([^{}]*)\} *\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf) *\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub("- *", "-", text.strip()))
    return _integer(text.replace(" ", "").replace("{", "").replace("}", "").replace("\\", "").lower())


def _elements(text: str) -> list[str]:
    """The elements of a tuple or interval that contains no further brackets; otherwise a list of only the text."""
    text = _ungrouped(text)
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(sign in text[1:-1] for sign in _BRACKETS):
        return [_integer(element) for element in text[1:-1].split(",")]
    return [text]


def _without_text(text: str) -> str:
    match = re.fullmatch(r"\\text\{(.+?)\}", text)
    return match.group(1).strip() if match else text


def _integer(text: str) -> str:
    whole = _WHOLE.fullmatch(_ungrouped(text))
    return str(int(whole.group(1))) if whole else text


def _ungrouped(text: str) -> str:
    shorter = _GROUPED.sub(r"\1\2", text)
    return text if shorter == text else _ungrouped(shorter)
