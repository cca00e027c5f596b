"""Compares every run with majority votes of independent draws at equal cost: is the sampler better than drawing more often?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.report.parts import Column, Section, Table, counted, differing, named, paragraphs, probability, shared
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.sections.paired import VERDICTS
from dflash_mcmc.report.study import Study, cost_of, full, rules_asked_for, votes
from dflash_mcmc.statistics.chains import affordable, aggregated
from dflash_mcmc.statistics.outcomes import aligned, outcomes
from dflash_mcmc.statistics.paired import compare, holm, verdict
from dflash_mcmc.statistics.shares import accuracy_of

if TYPE_CHECKING:
    from dflash_mcmc.statistics.outcomes import Combined, Cost
    from dflash_mcmc.statistics.rules import VoteRule

_COSTS: dict[Cost, str] = {"token_forwards": "token-forwards", "share_seconds": "device seconds"}
_TEXT = """
A sampler that costs as much as k independent draws should beat their vote: the majority vote, and the weighted votes that
`aggregate` names in the run of these draws. Each run is compared with votes over k chains of a run of sampler=temperature. k
is the largest number of chains that cost at most as much as one sample of the compared run. It is at least 1 and at most the
recorded number of chains. One table matches token-forwards, the other device seconds. If the vote costs much less than the
run, a fair vote would need more chains than are recorded. The accuracy of a vote of k is the mean over all ways to choose k of
a problem's chains, or over 1,000 of them for weighted votes with more ways. Differences, intervals and p are those of the
paired table; p (Holm) is adjusted for the rows of each table.
"""


def section(study: Study) -> Section | None:
    """A table for each cost. None unless one run has several independent draws per problem and another run can be compared."""
    drawn = [run for run in study.runs if run.component("sampler") == "temperature" and votes(run)]
    others = [run for run in study.runs if run.component("sampler") not in ("temperature", "greedy")]
    if not drawn or not others:
        return None
    tables = [Table(f"matched_{cost}", f"At equal {name}", _columns(name), _rows(study, drawn, others, cost))
              for cost, name in _COSTS.items()]
    return Section("matched", "Compared with votes of equal cost", paragraphs(_TEXT), tables)


def _rows(study: Study, drawn: list[Run], others: list[Run], cost: Cost) -> list[dict]:
    votes_of = [_MatchedVotes(voting, rule) for voting in drawn for rule in (None, *rules_asked_for(voting))]
    rows = [row for run in others for found in votes_of if (row := _row(study, run, found, cost)) is not None]
    for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"], row["verdict"] = adjusted, VERDICTS[verdict(row["difference"], adjusted)]
    return rows


class _MatchedVotes:
    """The votes of a run over k chains, computed once for each k. Without a rule they are majority votes."""

    def __init__(self, run: Run, rule: VoteRule | None):
        self.run, self.records, self._rule = run, full(run), rule
        self.shown = rule.shown if rule else "majority vote"
        self._of: dict[int, list[Combined]] = {}

    def of(self, k: int) -> list[Combined]:
        """One record per problem: the vote over k of its chains."""
        if k not in self._of:
            self._of[k] = aggregated(self.records, self._rule or "majority", chains=k)
        return self._of[k]


def _row(study: Study, run: Run, votes_of: _MatchedVotes, cost: Cost) -> dict | None:
    """The comparison of a run with the votes of another one; None if the two runs have no problem in common."""
    spent = cost_of(run.records, cost)
    k = affordable(votes_of.records, spent, cost)
    vote = votes_of.of(k)
    own, other, left_out = aligned(study.entry(run).outcomes, outcomes(vote))
    if not own.problems:
        return None
    found = compare(own, other)
    return {"run": run.shown, "cost": spent, **accuracy_of(own).columns("accuracy"), "votes_of": votes_of.run.label,
            "vote": votes_of.shown, "k": k,
            "vote_cost": cost_of(vote, cost), **accuracy_of(other).columns("vote_accuracy"), "problems": len(own.problems),
            "left_out": left_out, **found.difference.columns("difference"), "p_value": found.p_value, "p_holm": None,
            "verdict": "tie"}


def _columns(cost: str) -> list[Column]:
    def costing(header: str, key: str) -> Column:
        return Column(header, lambda row: f"{row[key]:,.0f}" if row[key] >= 100.0 else f"{row[key]:.3g}")

    return [named("run", "run"), costing(cost, "cost"), shared("accuracy", "accuracy"), named("votes of", "votes_of"),
            named("vote", "vote"), counted("k", "k"), costing(f"{cost} of the vote", "vote_cost"),
            shared("accuracy of the vote", "vote_accuracy"), counted("problems", "problems"),
            differing("difference (points)", "difference"), Column("p (Holm)", lambda row: probability(row["p_holm"])),
            named("verdict", "verdict")]
