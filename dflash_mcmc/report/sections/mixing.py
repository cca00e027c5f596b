"""How chains mix, step by step: R-hat, effective samples and autocorrelation of log p, from the traces of the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.report.figure import MARKERS, PALETTE
from dflash_mcmc.report.parts import Drawing, ReportTable, Section, counted, named, numbered, paragraphs, shared
from dflash_mcmc.report.study import Study
from dflash_mcmc.statistics import mixing
from dflash_mcmc.statistics.intervals import Clusters
from dflash_mcmc.statistics.outcomes import by_problem, forwards_together

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.report.reading import Run
    from dflash_mcmc.statistics.mixing import StepChain, Window

_LIMIT = 1.1
_MOST_LAGS = 20
_SHOWN = "last half"
_TEXT = f"""
Log p of the state after each step is what these numbers are of. R-hat compares the chains of a problem (rank-normalised,
split; Vehtari et al. 2021); chains that are all stuck at one value have none. *of independent draws* is the share of
problems that independent draws in equally few chains and steps put above {_LIMIT}. A stuck chain never changes its state
after the first step of the window. The effective sample size (ESS) needs {mixing.LEAST_STEPS_OF_ESS} steps in the window; it
is at most the number of states that are visited, and a stuck chain adds none. The windows are all steps, the last half of
them, and the steps of the last stage, in which alone the target is always the same. Accepted and moved are shares of the
steps in the window. Intervals come from a bootstrap over problems.
"""


class _Of(NamedTuple):
    """The steps of a run in a window, by problem."""

    run: Run
    window: str
    steps: dict[str, Window]
    spent: dict[str, float]
    """Token-forwards of all chains of a problem together."""


def section(study: Study) -> Section | None:
    """Tables of convergence and autocorrelation, and the figure of the latter. None without traces of steps."""
    found: list[_Of] = []
    for run in study.runs:
        if chains := _chains(run):
            spent = {problem: forwards_together(own) for problem, own in by_problem(run.records).items()}
            found += [_Of(run, name, {problem: mixing.window(own, name) for problem, own in chains.items()}, spent)
                      for name in mixing.WINDOWS]
    if not found:
        return None
    lags = [row for of in found for row in _lags(of)]
    tables = [ReportTable("mixing", "Convergence of parallel chains", _columns(), [_row(of) for of in found])]
    drawings = []
    if shown := [row for row in lags if row["window"] == _SHOWN]:
        tables.append(ReportTable("autocorrelation", f"Autocorrelation of log p, {_SHOWN} of the steps", _lag_columns(),
                                  [row for row in shown if row["lag"] in (1, 2, 4, 8, 16)], lags))
        drawings.append(Drawing(f"fig_{study.dataset}_autocorrelation", "Autocorrelation of log p over steps, and of "
                                "independent draws in chains of the same length (dotted).", lambda: _figure(shown)))
    return Section("mixing", "Mixing", paragraphs(_TEXT), tables, drawings)


def _chains(run: Run) -> dict[str, list[StepChain]]:
    chains: dict[str, list[StepChain]] = {}
    for record in run.records:
        if chain := mixing.chain_of(record):
            chains.setdefault(chain.problem, []).append(chain)
    return chains


def _row(of: _Of) -> dict[str, Any]:
    windows, every = of.steps, Clusters(list(of.steps))
    shapes = [window.log_p.shape for window in windows.values()]
    num_chains, steps = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
    rhats = {problem: value for problem, window in windows.items() if (value := mixing.rhat(window)) is not None}
    expected = [np.mean(mixing.independent_rhats(*windows[problem].log_p.shape) > _LIMIT) for problem in rhats]
    effective = {problem: value for problem, window in windows.items() if (value := mixing.ess(window)) is not None}
    long = Clusters(list(effective))
    above = Clusters(list(rhats)).mean([value > _LIMIT for value in rhats.values()])
    per_step = long.ratio(list(effective.values()), [windows[problem].log_p.size for problem in effective])
    per_cost = long.ratio([1000.0 * value for value in effective.values()], [of.spent[problem] for problem in effective])
    sizes = [window.log_p.size for window in windows.values()]
    moved = every.ratio([window.moved.sum() for window in windows.values()], sizes)
    accepted = every.ratio([window.accepted.sum() for window in windows.values()], sizes)
    stuck = every.ratio([window.stuck.sum() for window in windows.values()], num_chains)
    return {"run": of.run.shown, "window": of.window, "problems": len(windows), "chains": min(num_chains), "steps": min(steps),
            **accepted.columns("accepted"), **moved.columns("moved"), **stuck.columns("stuck"), "rhat_problems": len(rhats),
            "rhat": float(np.median(list(rhats.values()))) if rhats else None, **above.columns("above"),
            "independent": float(np.mean(expected)) if expected else None, "ess_problems": len(effective),
            **per_step.columns("ess"), **per_cost.columns("ess_per_1000")}


def _columns() -> list:
    return [named("run", "run"), named("window", "window"), counted("problems", "problems"), counted("chains", "chains"),
            counted("steps", "steps"), shared("accepted", "accepted"), shared("moved", "moved"),
            shared("stuck chains", "stuck"),
            numbered("median R-hat", "rhat", ".3f"), shared(f"R-hat above {_LIMIT}", "above"),
            shared("of independent draws", "independent"), shared("ESS a step", "ess"),
            numbered("ESS for 1,000 token-forwards", "ess_per_1000", ".2f")]


def _lags(of: _Of) -> list[dict[str, Any]]:
    curves = [(problem, mixing.autocorrelation(row)) for problem, window in of.steps.items()
              if window.log_p.shape[1] >= mixing.LEAST_STEPS for row in window.log_p[~window.stuck]]
    rows = []
    for lag in range(1, 1 + _MOST_LAGS):
        pairs = [(problem, curve) for problem, curve in curves if lag < len(curve)]
        if pairs:
            value = Clusters([problem for problem, _ in pairs]).mean([curve[lag] for _, curve in pairs])
            independent = np.mean([mixing.independent_autocorrelation(len(curve), lag) for _, curve in pairs])
            rows.append({"run": of.run.shown, "window": of.window, "lag": lag, "chains": len(pairs),
                         **value.columns("autocorrelation"), "independent": float(independent)})
    return rows


def _lag_columns() -> list:
    return [named("run", "run"), counted("lag", "lag"), counted("moving chains", "chains"),
            numbered("autocorrelation", "autocorrelation", ".2f"), numbered("of independent draws", "independent", ".2f")]


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = drawn.subplots()
    for index, run in enumerate(dict.fromkeys(row["run"] for row in rows)):
        own = [row for row in rows if row["run"] == run]
        colour = PALETTE[index % len(PALETTE)]
        axes.plot([row["lag"] for row in own], [row["autocorrelation"] for row in own], color=colour,
                  marker=MARKERS[index % len(MARKERS)], markersize=4, label=run)
        axes.plot([row["lag"] for row in own], [row["independent"] for row in own], color=colour, linestyle=":")
    axes.axhline(0.0, color="0.8", linewidth=0.8)
    axes.set_xticks(range(1, 1 + max(row["lag"] for row in rows), 2))
    axes.set_xlabel("steps apart")
    axes.set_ylabel("autocorrelation of log p")
    axes.legend()
    return drawn
