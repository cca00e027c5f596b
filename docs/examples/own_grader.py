"""A grader in a package of your own: the answer is right if it names the gold answer's words in any order.

Run this file, or import it. `docs/howto/index.md`, "A package of your own", makes it an option of the command line.
"""

import re
from dataclasses import dataclass

import dflash_mcmc as dm
from dflash_mcmc.components import identity, register
from dflash_mcmc.grading import Grader
from dflash_mcmc.grading.verdicts import CORRECT, NO_ANSWER, WRONG, GradesAtOnce
from dflash_mcmc.types import Grade


@register("grader", "words")
@dataclass(slots=True, kw_only=True)
class WordGrader(Grader):
    """The last sentence has every word of the gold answer."""

    version = 1  # increased with the rule, so that no run mixes two rules
    ignore_case: bool = identity(True, "capital and small letters are equal")

    def start(self):
        """The pool, which needs no process."""
        return GradesAtOnce(self.grade)

    def grade(self, text, gold, question):
        """The verdict, the answer that was read, and the rule that decided."""
        sentences = [part.strip() for part in re.split(r"[.!?\n]", text) if part.strip()]
        if not sentences:
            return Grade(NO_ANSWER, None, "no sentence")
        fold = str.lower if self.ignore_case else str
        has = set(re.findall(r"\w+", fold(gold))) <= set(re.findall(r"\w+", fold(sentences[-1])))
        return Grade(CORRECT if has else WRONG, sentences[-1], "words")


if __name__ == "__main__":
    grader = WordGrader()
    for text in ("I think so. It is Ada Lovelace!", "It is Ada.", ""):
        print(f"{text!r}: {grader.grade(text, 'Lovelace, Ada', '').verdict}")
    print(dm.component("grader", "words"))
