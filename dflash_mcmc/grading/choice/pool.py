"""The pool for multiple-choice answers. It has the interface of the other pools but no processes: `submit` grades at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from dflash_mcmc.grading.choice.letters import AUTO, final_letter, gold_letter
from dflash_mcmc.grading.extraction import Extraction
from dflash_mcmc.grading.timing import timed
from dflash_mcmc.grading.verdicts import CORRECT, NO_ANSWER, UNSUPPORTED, WRONG
from dflash_mcmc.types import Grade


class LetterPool:
    """Grades texts by the letter that they choose. Call `submit`, then `finished`, as with the other pools."""

    def __init__(self, letters: str, extraction: Extraction = AUTO):
        self._letters, self._extraction = letters, extraction
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Grades a text. Raises UserError if the gold answer names no letter or several."""
        graded, seconds = timed(self._graded, text, gold)
        self._decided.append((tag, graded._replace(grade_seconds=seconds)))

    def _graded(self, text: str, gold: str) -> Grade:
        right = gold_letter(gold, self._letters)
        letter, rule = final_letter(text, self._letters, self._extraction)
        missing = UNSUPPORTED if rule == "length" else NO_ANSWER
        return Grade(missing if letter is None else CORRECT if letter == right else WRONG, letter, rule)

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) for every submitted text that was not yielded yet."""
        while self._decided:
            yield self._decided.pop(0)

    def close(self) -> None:
        """Does nothing: there are no processes to stop."""
