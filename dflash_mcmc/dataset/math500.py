"""MATH-500: the 500 test problems of OpenAI's PRM800K split of MATH (Hendrycks et al. 2021, Lightman et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.dataset import check_prompt, content_hash, load_rows, unique
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.config import Config


@register("dataset", "math500")
@dataclass(slots=True, kw_only=True)
class Math500:
    """MATH-500, from the hub (HuggingFaceH4/MATH-500) or a JSON Lines file."""

    path: str | None = runtime("JSON Lines file with problem, answer, level, subject, unique_id; null takes the hub")
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
        columns = ("problem", "answer", "level", "subject", "unique_id")
        rows = load_rows("HuggingFaceH4/MATH-500", None, self.path, self.revision, columns)
        return unique([Problem(r["unique_id"], r["problem"], r["answer"], r["level"], r["subject"]) for r in rows])

    def canonical(self, config: Config) -> dict[str, object]:
        """The content is part of the identity, so the revision need not be."""
        return {"revision": None}
