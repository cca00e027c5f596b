"""GSM8K: 1,319 grade-school word problems (Cobbe et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.dataset import check_prompt, content_hash, load_rows, unique
from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.config import Config

_MARK = "#### "


@register("dataset", "gsm8k")
@dataclass(slots=True, kw_only=True)
class Gsm8k:
    """GSM8K's test split, from the hub (openai/gsm8k) or a JSON Lines file."""

    path: str | None = runtime("JSON Lines file with question and answer; null takes the hub")
    revision: str | None = identity("commit or tag on the hub; null takes the newest")
    limit: int | None = runtime("first so many problems; null takes all", ge=1)
    max_new_tokens: int = identity("longest answer in tokens", ge=1)
    prompt: str = identity("what is asked; {question} stands for the problem")

    def check(self, config: Config) -> None:
        """Raises ConfigError."""
        check_prompt(self.prompt)

    def problems(self) -> list[Problem]:
        """The problems up to the limit. Raises UserError where they cannot be had."""
        return self._all()[: self.limit]

    def fingerprint(self) -> str:
        """Hash of all problems, whatever the limit."""
        return content_hash(self._all())

    def _all(self) -> list[Problem]:
        rows = load_rows("openai/gsm8k", "main", self.path, self.revision, ("question", "answer"))
        return unique([Problem(f"gsm8k-{n:04d}", row["question"], _gold(row["answer"], n)) for n, row in enumerate(rows)])

    def canonical(self, config: Config) -> dict[str, object]:
        """The content is part of the identity, so the revision need not be."""
        return {"revision": None}


def _gold(solution: str, number: int) -> str:
    """What follows the mark, without digit separators."""
    if not isinstance(solution, str) or _MARK not in solution:
        raise UserError(f"dataset.path: row {number} has no final answer behind {_MARK!r}")
    return solution.rpartition(_MARK)[2].strip().replace(",", "")
