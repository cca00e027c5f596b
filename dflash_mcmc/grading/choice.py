r"""Multiple choice: compares the letter that the text finally chooses with the letter of the gold answer.

With `extract=auto` the first place that exists decides: the last box, else the last statement that names a letter (`answer is
X` or `option X is correct`), else the last line. If that place names no letter or several, the text has no answer. The time
must be linear in the length of the text, because the extraction runs in the run's own process.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.grading import VERSION, AnswerGrader, verdicts
from dflash_mcmc.grading.extraction import Extraction, about_another, after_thinking, cut, last_box
from dflash_mcmc.types import Grade

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|mbox|boldsymbol)\s*\{([^{}]*)\}")
_STATED = re.compile(r"(?:answer|choice|option)[*_]*(?:\s+(?:choice|option))?(?:\s+to\s+[^.\n:=]{1,80}?)?"
                   r"(?:\s+(?:is|(?:will|would|must|should)\s+be|:)|\s*[:=])\s*:?(?:\s*(?:therefore|thus|simply|clearly)\b)?"
                   r"(?:\s*(?:the\s+)?(?:option|choice|letter)\b)?", re.IGNORECASE)
_PREFIX = re.compile(r"(?:the\s+)?(?:(?:final|correct|right|best)\s+)?(?:option|choice|answer|letter)"
                     r"\s*(?:is\b|[:=])?\s*(?=\W*[A-Za-z]\b)", re.IGNORECASE)
_CONFIRMED = (r"(?:(?i:option|choice|answer)\s+[*_(]*([{letters}])[*_)]*\s+(?i:is\s+(?:the\s+)?(?:correct|right|true|best))\b"
              r"|(?<![A-Za-z0-9'’])([{letters}])[*_)]{{0,3}}\s+(?i:is\s+the\s+(?:correct|right|best)\s+(?:answer|option|choice))\b)")
_DENIED = re.compile(r"(?P<denial>(?:\bnot|n['’]t|\bcannot|\bnever)\s+(?:be|think|believe|mean|say|true|the\s+case)\b)"
                     r"|[.,;!?\n]+", re.IGNORECASE)
"""A denial, or punctuation, which ends the scope of a denial."""
_NEXT = r"(?:\s*[,/&]\s*(?:or\s+|and\s+)?|\s+(?:or|and)\s+)"
_LETTER = r"(?<![A-Za-z0-9])([{letters}])(?![A-Za-z0-9'’])"
_ARTICLE = re.compile(r"\b[AI](?=\s+(?!(?:because|since|as|which|with|but|or|and|is|so)\b)[a-z])")
_MARKS = "*_`\"'()[]{}$. \t"
AUTO = Extraction(("boxed", "answer_is", "last_line"))
"""The places of `extract=auto`."""
_Chosen = tuple[str | None, str]


def final_letter(text: str, letters: str, extraction: Extraction = AUTO) -> tuple[str | None, str]:
    """(letter, rule): the choice of a text and the place that decided it; without a single choice, None and the reason."""
    answer = after_thinking(text)
    if answer is None:
        return None, "unfinished_thinking"
    answer = cut(answer, extraction.until)
    for rule in extraction.rules:
        choice = PLACES[rule](answer, letters)
        if choice is not None:
            return choice
    return None, "nothing_extracted" if answer.strip() else "empty"


def _box(answer: str, letters: str) -> _Chosen | None:
    box = last_box(answer)
    if box is not None and len(box) > verdicts.MAX_LENGTH:
        return None, "length"
    chosen = None if box is None else _of_box(box, letters)
    return None if chosen is None else _only(chosen, "box")


def _of_box(box: str, letters: str) -> set[str] | None:
    r"""The letters of a box that is a letter, begins with a labelled one (`B. Paris`), or lists some; None for other content.

    A letter within other content, as in `D = 5`, may be a variable.
    """
    text = _PREFIX.sub("", _WRAPPED.sub(r"\1", box).replace("\\ ", " ").strip(_MARKS.replace("(", "") + "\\"), count=1)
    if len(text.strip(_MARKS)) == 1:
        return _named(text, letters) or None
    label = rf"(?:\(([{letters}{letters.lower()}])\)|([{letters}])(?:[.):]|(?=\W*$)))(?![A-Za-z0-9'’])[*_$]*"
    begins = re.match(rf"[*_$(]*{label}(?!\s*[=<>^+\-−])", text)
    listed = re.match(rf"[*_$(]*[{letters}][*_$)]*[.:]?{_NEXT}[*_$(]*[{letters}](?![A-Za-z0-9'’])", text)
    if listed:
        return set(re.findall(_LETTER.format(letters=letters), text))
    return {(begins.group(1) or begins.group(2)).upper()} if begins else None


def _hashes(answer: str, letters: str) -> _Chosen | None:
    """The letter after the last `####`. A heading without a letter does not count."""
    ends = [mark.end() for mark in re.finditer("####", answer)]
    for end in reversed(ends):
        named = _at_start(_sentence(answer[end:end + verdicts.MAX_LENGTH].partition("\n")[0]), letters)
        if named:
            return _only(named, "hashes")
    return None


def _statement(answer: str, letters: str) -> _Chosen | None:
    return next((_only(named, "statement") for named in _statements(answer, letters) if named), None)


def _last_letter(answer: str, letters: str) -> _Chosen | None:
    """The last letter in parentheses: the filter `flexible-extract` of lm-evaluation-harness."""
    matches = re.findall(rf"\(([{letters}])\)", answer)
    return (matches[-1], "last_letter") if matches else None


def gold_letter(gold: str, letters: str) -> str:
    """The letter of a gold answer. Raises UserError if it names no letter or several."""
    text = _WRAPPED.sub(r"\1", gold)
    named = _of_box(gold, letters) or _named(text, letters)
    letter = named.pop() if len(named) == 1 and len(gold) <= verdicts.MAX_LENGTH else None
    if letter is None:
        raise UserError(f"grader=choice: given the gold answer {gold[:60]!r}; allowed: one of the letters {letters}")
    return letter


def _statements(answer: str, letters: str) -> Iterator[set[str]]:
    """The letters that each statement of the answer names, from the last statement to the first, without denied statements."""
    statements = [*re.finditer(_CONFIRMED.format(letters=letters), answer), *_STATED.finditer(answer)]
    marks = list(_DENIED.finditer(answer))
    ends = [mark.end() for mark in marks]
    for statement in sorted(statements, key=re.Match.start, reverse=True):
        before = bisect_right(ends, statement.start())
        if (before and marks[before - 1]["denial"]) or about_another(answer, statement.start(), statement.end()):
            continue
        confirmed = next(filter(None, statement.groups()), None)
        after = answer[statement.end():statement.end() + verdicts.MAX_LENGTH]
        yield {confirmed} if confirmed else _at_start(_sentence(after), letters)


def _at_start(text: str, letters: str) -> set[str]:
    """The letters at the start of a statement: `B`, `(b) 12`, `A or B`. A reason or `not C` after them is ignored.

    A letter within other content, as in `D = 5` or `C(6,2)`, may be a variable; an `option D` after it counts.
    """
    text = _WRAPPED.sub(r"\1", text).lstrip(_MARKS.replace("(", "") + "\\")
    if _ARTICLE.match(text):
        return set()
    if len(text.strip(_MARKS + "\\")) == 1:
        return _named(text.strip(_MARKS + "\\"), letters)
    choice = rf"[*_$\\]*(?:\(?[{letters}]|\([{letters.lower()}]\))(?![A-Za-z0-9'’(])[*_$\\)]*+"
    begins = re.match(rf"{choice}(?:{_NEXT}{choice})*(?!\s*(?:[=<>^+×÷±≤≥]|[-−]\s?[A-Z]\b))", text)
    if begins:
        return _named(begins.group(), letters)
    option = re.search(rf"\b(?i:option|choice)\s+[*_(]*([{letters}])(?![A-Za-z0-9'’])", text)
    return {option[1]} if option else set()


def _last_line(answer: str, letters: str) -> _Chosen | None:
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if not lines:
        return None
    line = _WRAPPED.sub(r"\1", lines[-1])
    if len(line.strip(_MARKS)) == 1:
        return _only(_named(line, letters), "last_line")
    listed = re.match(rf"[*_(\[ ]*([{letters}])[*_]*[).:\]]", line)
    if listed and len(lines) == 1:  # `B. Paris` is the whole text
        return listed.group(1), "last_line"
    return None, "no_letter"


def _sentence(text: str) -> str:
    """The text up to the end of its first line or sentence."""
    line = text.lstrip().partition("\n")[0]
    return re.split(r"(?<=[A-Za-z)*])\.(?:\s|$)", line)[0]


def _named(text: str, letters: str) -> set[str]:
    """The letters that a text names as choices. A lower-case letter counts only on its own or in parentheses."""
    stripped = text.strip(_MARKS)
    if len(stripped) == 1 and stripped.upper() in letters:
        return {stripped.upper()}
    capitals = set(re.findall(_LETTER.format(letters=letters), _ARTICLE.sub(" ", text)))
    return capitals | {letter.upper() for letter in re.findall(rf"\(([{letters.lower()}])\)", text)}


def _only(named: set[str], rule: str) -> _Chosen:
    return (named.pop(), rule) if len(named) == 1 else (None, "several_letters" if named else "no_letter")


PLACES: dict[str, Callable[[str, str], _Chosen | None]] = {
    "boxed": _box, "hashes": _hashes, "answer_is": _statement, "last_line": _last_line, "last_letter": _last_letter}
"""The places by extraction rule. Each takes an answer and the letters, and returns None if the answer lacks the place."""


@register("grader", "choice")
@dataclass(slots=True, kw_only=True)
class ChoiceGrader(AnswerGrader):
    """The letter of the last box, of the last `answer is ...` or of the last line; several letters are no answer."""

    version = VERSION
    sources = ("boxed", "hashes", "answer_is", "last_line", "last_letter")
    auto = ("boxed", "answer_is", "last_line")

    extract: Any = identity("auto", "where the letter is found: boxed, hashes (#### B), answer_is, last_line, last_letter "
                            "(the last (B)), a list of them, of which the first that exists decides, or auto for boxed, "
                            "answer_is and last_line")
    letters: str = identity("ABCDEFGHIJ", "letters of the choices, such as ABCDE")

    def check(self, config: Settings) -> None:
        super().check(config)
        if not re.fullmatch("[A-Z]{2,}", self.letters) or len(set(self.letters)) < len(self.letters):
            raise ConfigError("grader.letters", self.letters, "two or more capital letters, each once")

    def check_gold(self, gold: str) -> None:
        gold_letter(gold, self.letters)

    def start(self) -> verdicts.GradesAtOnce:
        return verdicts.GradesAtOnce(partial(self._graded, self.extraction()))

    def _graded(self, extraction: Extraction, text: str, gold: str, question: str) -> Grade:
        """Raises UserError if the gold answer names no letter or several."""
        right, (letter, rule) = gold_letter(gold, self.letters), final_letter(text, self.letters, extraction)
        missing = verdicts.UNSUPPORTED if rule == "length" else verdicts.NO_ANSWER
        return Grade(missing if letter is None else verdicts.CORRECT if letter == right else verdicts.WRONG, letter, rule)
