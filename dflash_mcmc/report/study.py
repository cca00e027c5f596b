"""The data that the sections of a report share: runs, votes over their chains, the choice of comparisons, and warnings."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.components import registered, takes_null
from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.ops import CUTS, SamplingParams
from dflash_mcmc.report.parts import listed
from dflash_mcmc.report.reading import Run
from dflash_mcmc.statistics import chains, estimates
from dflash_mcmc.statistics.votes import IN_WORDS, PROGRAM_RULES, PowerVote, Vote, VoteRule, has_examples
from dflash_mcmc.store.records import Record

_MOST_DRAWN = 30


@dataclass(frozen=True, eq=False)
class Entry:
    """A row of the comparison tables: the samples of a run, or one answer per problem combined from all its chains."""

    run: Run
    by: str
    """`sample`; or how chains are combined: `majority`, the name of a weighted vote's rule, `log_p` (highest log p)."""
    shown: str
    records: Sequence[Record] | Sequence[estimates.Combined]
    """One record per sample. For a vote, one record per problem, with the cost of all chains that the vote uses."""

    @cached_property
    def outcomes(self) -> estimates.PairedOutcomes:
        """The outcomes of the records."""
        return estimates.outcomes(self.records)

    @cached_property
    def accuracy(self) -> estimates.IntervalEstimate:
        """The share of correct records."""
        return estimates.accuracy_of(self.outcomes)

    @property
    def voted(self) -> bool:
        """Whether each answer is combined from several chains."""
        return self.by != "sample"


class ProbeRun(NamedTuple):
    """A finished run of a probe."""

    folder: Path
    identity: dict
    summary: dict


class Study(NamedTuple):
    """The runs of a report, all over one dataset."""

    runs: list[Run]
    entries: list[Entry]
    baseline: Run
    pair: tuple[Run, Run] | None
    """The two runs that are compared answer by answer."""
    warnings: list[str]
    alphas: Sequence[float] = ()
    """Exponents of the power votes in the table of vote rules; empty for that of each run."""
    dataset: str = ""
    """Name of the dataset; it is part of the figures' names."""
    probes: Sequence[ProbeRun] = ()
    """Finished runs of probes that were named with the runs."""

    @property
    def drawn(self) -> list[Entry]:
        """The entries that figures show: all of them, or only the entries of samples if a figure has no room for all."""
        return self.entries if len(self.entries) <= _MOST_DRAWN else [entry for entry in self.entries if not entry.voted]

    def entry(self, run: Run) -> Entry:
        """The entry of a run's samples."""
        return next(entry for entry in self.entries if entry.run is run and not entry.voted)

    def role(self, sampler: str, blend: str) -> list[Run]:
        """The runs with this sampler and this blend."""
        return [run for run in self.runs if (run.component("sampler"), run.component("blend")) == (sampler, blend)]


def study_of(runs: Sequence[Run], baseline: str | None = None, pair: Sequence[str] | None = None,
             alphas: Sequence[float] = (), name: str = "") -> Study:
    """Chooses the baseline and the pair of runs over one dataset, and finds what a reader must know before comparing them.

    Args:
        baseline: a run by label, condition or identity; None means plain greedy decoding; else a run without a blend or
            with beta 0, of which a run with a blend differs in nothing else; else the first run, with a warning.
        pair: two runs. None means the first two runs that are not greedy and differ only in the blend. If there are none, it
            means the baseline and the next run.
        alphas: exponents of the power votes in the table of vote rules. Empty means `vote.power.alpha` of each run.
        name: name of the dataset in titles and file names; empty for that of the runs' component.

    Raises a one-line UserError.
    """
    runs = list(runs)
    if not all(0.0 < alpha < math.inf for alpha in alphas):
        raise UserError(f"--alpha: given {' '.join(f'{alpha:g}' for alpha in alphas)}; allowed: numbers > 0")

    def plain(run: Run) -> bool:
        return run.component("blend") == "none" or run.identity.get("blend.beta") == 0

    greedy = (run for run in runs if run.component("sampler") == "greedy" and plain(run))
    alone = (run for run in runs if plain(run) and any(
        not plain(other) and same_but(run, other, "blend", "draft", "seed") for other in runs))
    chosen = _pick(runs, baseline, "--baseline") if baseline else next(greedy, None) or next(alone, None)
    base, warnings = chosen or runs[0], _warnings(runs)
    if chosen is None and len(runs) > 1:
        warnings.insert(0, "no plain greedy decoding is here, and no run without a blend or with beta 0 that differs in "
                        f"nothing else: all runs are compared with the first one, {base.label}. --baseline names another")
    return Study(runs, [entry for run in runs for entry in _entries(run, runs)], base, _pair(runs, base, pair), warnings,
                 list(dict.fromkeys(alphas)), name or runs[0].component("dataset"))


def same_but(run: Run, other: Run, *groups: str) -> bool:
    """Whether two runs differ only in these groups.

    Fields that one of them does not have, or that have no effect there (null where null is no value), are ignored. The seed is
    also ignored if one of them is greedy, because greedy decoding draws nothing at random.
    """
    ignored = {*groups, *(["seed"] if "greedy" in (run.component("sampler"), other.component("sampler")) else [])}

    def has_no_effect(of: Run, key: str) -> bool:
        group, _, name = key.partition(".")
        option = registered(group).get(of.component(group)) if name else None
        return of.identity[key] is None and not (option and takes_null(option.cls, name))

    return all(key.partition(".")[0] in ignored or run.identity[key] == other.identity[key]
               or has_no_effect(run, key) or has_no_effect(other, key) for key in run.identity.keys() & other.identity.keys())


def votes(run: Run) -> bool:
    """Whether a majority vote is possible. It needs a problem with several chains, and answers that can be the same."""
    grader = registered("grader").get(run.component("grader"))
    unlike = grader is not None and (grader.cls.runs_answers or grader.cls.judges)
    return run.num_chains > 1 and not unlike and bool(run.full)


def weighted_rules(run: Run, alphas: Sequence[float] = ()) -> list[VoteRule]:
    """The rules of weighted votes that the chains of a run have weights for, with the run's parameters.

    A run that is older than the rules has the default parameters.

    Args:
        alphas: exponents of the power vote instead of the run's.
    """
    vote = Vote.of(run.config.get("vote") or {})
    powers = [PowerVote(alpha=alpha) for alpha in alphas] or [vote.power]
    rules = [*powers, *(rule for rule in vote.rules.values() if rule is not vote.power)]
    # Chains have weights if they are independent draws with a known log q, from a law that can draw every sequence.
    sampler, fields = registered("sampler").get(run.component("sampler")), run.config.get("sampler") or {}
    cuts = {name: fields[name] for name in CUTS if fields.get(name) is not None}
    has_weights = (sampler is not None and sampler.cls.draws_once and not SamplingParams(**cuts).truncates
                   and all(record.get("log_q") is not None for record in run.records))
    return [rule for rule in rules if votes(run) and (has_weights or not rule.needs_log_q)]


def rules_asked_for(run: Run) -> list[VoteRule]:
    """The weighted votes that the run's `aggregate` names: those with rows in the tables of all runs."""
    names = run.config.get("aggregate") or []
    return [rule for rule in weighted_rules(run) if rule.name in ([names] if isinstance(names, str) else names)]


def _entries(run: Run, runs: Sequence[Run]) -> list[Entry]:
    """The entries of a run: its samples, its chains combined in each possible way, and votes at the cost of other runs."""
    records, size = run.full, run.num_chains
    ways: list[tuple[str, str, Sequence[estimates.Combined]]] = []
    if not records:  # no problem has all chains
        return [Entry(run, "sample", run.shown, run.records)]
    if votes(run):
        independent = run.component("sampler") == "temperature"  # they vote at the cost of a sample of other runs, too
        sizes = sorted({k for other in runs if independent and other.component("sampler") not in ("temperature", "greedy")
                        if 1 < (k := chains.affordable(records, cost_of(other.records, "token_forwards"))) < size})
        ways += [("majority", f"majority of {k}", chains.aggregated(records, chains=k)) for k in (*sizes, size)]
    ways += [(rule.name, f"{rule.shown} of {size}", chains.aggregated(records, rule)) for rule in rules_asked_for(run)]
    if size > 1:
        if has_examples(records):
            ways += [(rule, f"{IN_WORDS[rule]} of {size}", chains.aggregated(records, rule)) for rule in PROGRAM_RULES]
        ways.append(("log_p", f"best by log p of {size}", chains.aggregated(records, "log_p")))
    return [Entry(run, "sample", run.shown, run.records),
            *(Entry(run, by, f"{run.shown}, {words}", combined) for by, words, combined in ways)]


def cost_of(records: Sequence[estimates.Outcome], cost: estimates.CostField) -> float:
    """Mean of a cost over records."""
    return sum(record[cost] for record in records) / len(records)


def named(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs with this label; without one, those with this condition; without one, those with this identity."""
    for matches in (lambda run: run.label == name, lambda run: run.condition == name,
                    lambda run: len(name) >= 6 and run.digest.startswith(name)):
        if chosen := [run for run in runs if matches(run)]:
            return chosen
    return []


def _pick(runs: Sequence[Run], name: str, option: str) -> Run:
    """The run with this label, condition or identity. Raises UserError if no run or several runs match."""
    matches = named(runs, name)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{option}: given {name!r}, which matches {len(matches)} runs; allowed: "
                        + ", ".join(repr(run.label) for run in matches[:8]))
    labels = [run.label for run in runs]
    raise UserError(f"{option}: given {name!r}{did_you_mean(name, labels)}; allowed: {', '.join(map(repr, labels[:20]))}")


def _pair(runs: Sequence[Run], baseline: Run, names: Sequence[str] | None) -> tuple[Run, Run] | None:
    if names:
        first, second = (_pick(runs, name, "--pair") for name in names)
        if first is second:
            raise UserError(f"--pair: given {first.label!r} twice; allowed: two runs")
        return first, second
    drawn = [run for run in runs if run.component("sampler") != "greedy"]
    for without in drawn:
        for blended in drawn:
            blends = without.component("blend") == "none" != blended.component("blend")
            if blends and same_but(without, blended, "blend", "draft"):
                return without, blended
    others = [run for run in runs if run is not baseline]
    return (baseline, others[0]) if others else None


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Sentences, each with a reason why differences between these runs may not come from their samplers alone."""
    partial = [run.shown for run in runs if not run.complete]
    warnings = [f"statistics use the samples recorded so far of {listed(partial)}"] if partial else []
    problems = {run.label: set(run.problems) for run in runs}
    shared, every = set.intersection(*problems.values()), set.union(*problems.values())
    if shared != every:
        warnings.append(f"the runs cover different problems: {len(shared):,} of {len(every):,} problems are in all runs. "
                        "Paired differences, overlap, interaction and improvements use the problems that their runs share; "
                        "all other tables and figures use each run's own problems")
    uneven = [f"{left:,} of {len(run.problems):,} problems of {run.label}" for run in runs
              if (left := len(run.problems) - len({record["problem"] for record in run.full}))]
    if uneven:
        warnings.append(f"votes omit problems that have fewer chains than others: {listed(uneven)}")
    remote = [run for run in runs if (engine := registered("engine").get(run.component("engine"))) and engine.cls.is_remote]
    if 0 < len(remote) < len(runs):  # their digests are of a tokenizer alone, and differ from those of weights
        named = listed(list(dict.fromkeys(str(run.identity.get("engine.content")) for run in remote)))
        warnings.append(f"the weights of {listed([run.label for run in remote])} are a server's, which names its model "
                        f"{named}; that the other runs have the same weights is not checked")
    alone = "differences do not come from the samplers alone"
    for what, of, why in (
        ("devices", lambda run: [session.get("device") for session in run.sessions], "seconds are not comparable"),
        ("dtypes", lambda run: [run.identity.get("model.dtype")], "log-probabilities also depend on the dtype"),
        ("models", lambda run: [] if run in remote else [run.identity.get("model.content")], alone),
        ("models", lambda run: [run.identity.get("engine.content")] if run in remote else [], alone),
        ("prompts", lambda run: [run.identity.get("dataset.prompt")], alone),
        ("limits of the answer length", lambda run: [run.identity.get("dataset.max_new_tokens")], alone),
        ("versions of torch or transformers", lambda run: [
            " ".join(f"{name} {session['packages'].get(name)}" for name in ("torch", "transformers"))
            for session in run.sessions if isinstance(session.get("packages"), dict)],
         "the same seed may give different tokens"),
    ):
        values = list(dict.fromkeys(json.dumps(value) for run in runs for value in of(run) if value is not None))
        if len(values) > 1:
            texts = [text if len(text := str(json.loads(value))) <= 48 else text[:45] + "..." for value in values[:4]]
            mixed = "; ".join([*texts, *([f"and {len(values) - 4} more"] if len(values) > 4 else [])])
            warnings.append(f"the runs differ in {what} ({mixed}): {why}")
    return warnings
