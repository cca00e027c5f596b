"""Multiple choice: compares the letter that the text chooses with the letter of the gold answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.grading import VERSION, AnswerGrader
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.grading.choice.letters import LetterPool
    from dflash_mcmc.settings import Settings


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
        """Checks the letters and how the answer is found. Raises ConfigError."""
        AnswerGrader.check(self, config)
        if not re.fullmatch("[A-Z]{2,}", self.letters) or len(set(self.letters)) < len(self.letters):
            raise ConfigError("grader.letters", self.letters, "two or more capital letters, each once")

    def check_gold(self, gold: str) -> None:
        """Raises UserError for a gold answer that names no letter, or several."""
        from dflash_mcmc.grading.choice.letters import gold_letter

        gold_letter(gold, self.letters)

    def start(self) -> LetterPool:
        """The pool, which needs no processes."""
        from dflash_mcmc.grading.choice.letters import LetterPool

        return LetterPool(self.letters, self.extraction())
