"""One program of several draws, by what the draws do on the examples of the question. It reads records and runs nothing.

Records have what programs do with `grader.examples=true`. No rule reads a verdict.

- `examples`: draws come one after another, until one passes every example. If none does, or the question has none, it is the
  program that passes most, of equal ones the likeliest by log p.
- `behaviour`: the likeliest program of the largest class that returns the same. Of equal classes that with the likeliest.
- `examples_vote`: the same among the programs that pass most examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import UNDRAWN

if TYPE_CHECKING:
    from dflash_mcmc.store.records import Record

Rule = Literal["examples", "behaviour", "examples_vote"]
RULES: tuple[Rule, ...] = get_args(Rule)
IN_WORDS = {"examples": "first that passes its examples", "behaviour": "vote by behaviour",
            "examples_vote": "most examples, then vote by behaviour"}


class KeptProgram(NamedTuple):
    """The program that a rule keeps."""

    record: Record
    used: int
    """Draws that the rule needs."""


def has_examples(records: Sequence[Record]) -> bool:
    """Whether programs were run on examples: a question without examples has neither field."""
    return any("behaviour" in record or "passed" in record for record in records)


def chosen(draws: Sequence[Record], rule: Rule) -> KeptProgram:
    """The program of a problem's draws, which are in their order. Draws that were not made are never kept."""
    made = [record for record in draws if record["verdict"] not in UNDRAWN]
    if not made:
        return KeptProgram(draws[0], len(draws))
    if rule == "examples":
        for used, record in enumerate(draws, start=1):
            if record.get("passed") == 1.0 and record["verdict"] not in UNDRAWN:
                return KeptProgram(record, used)
    if rule != "behaviour":
        most = max(map(_passed, made))
        made = [record for record in made if _passed(record) == most]
    sizes = Counter(record.get("behaviour") for record in made) if rule != "examples" else Counter[str | None]()
    sizes.pop(None, None)
    kept = max(made, key=lambda record: (sizes[record.get("behaviour")], record["log_p"]))
    return KeptProgram(kept, len(draws))


def rule_named(name: str, records: Sequence[Record]) -> Rule:
    """The rule with this name. Raises UserError for records of programs that were not run on examples."""
    if records and not has_examples(records):
        raise UserError(f"aggregate={name}: given records without what programs do on examples; allowed: those of a run with "
                        "grader.examples=true, or of dflash_mcmc.regrade with it")
    return cast("Rule", name)


def _passed(record: Record) -> float:
    return record.get("passed", 0.0)
