"""How chains mix, step by step: R-hat, effective samples and autocorrelation of log p, from the traces of the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import Drawing, ReportTable, Section, paragraphs
from dflash_mcmc.report.study import Study
from dflash_mcmc.statistics import mixing
from dflash_mcmc.statistics.intervals import Clusters
from dflash_mcmc.statistics.outcomes import by_problem, forwards_together

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def section(study: Study) -> Section | None:
    """Tables of convergence and autocorrelation, and the figure of the latter. None without traces of steps."""
    rows, lags = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in study.runs:
        chains: dict[str, list[StepChain]] = {}
        for record in run.records:
            if chain := mixing.chain_of(record):
                chains.setdefault(chain.problem, []).append(chain)
        spent = {problem: forwards_together(own) for problem, own in by_problem(run.records).items()} if chains else {}
        for name in mixing.WINDOWS if chains else ():
            steps = {problem: mixing.window(own, name) for problem, own in chains.items()}
            rows.append({"run": run.shown, "window": name, **_converged(steps, spent)})
            lags += [{"run": run.shown, "window": name, **row} for row in _lags(steps)]
    if not rows:
        return None
    tables, drawings = [ReportTable("mixing", "Convergence of parallel chains", {
        "run": "run", "window": "window", "problems": ("problems", "count"), "chains": ("chains", "count"),
        "steps": ("steps", "count"), "accepted": ("accepted", "share"), "moved": ("moved", "share"),
        "stuck chains": ("stuck", "share"), "median R-hat": ("rhat", ".3f"), f"R-hat above {_LIMIT}": ("above", "share"),
        "of independent draws": ("independent", "share"), "ESS a step": ("ess", "share"),
        "ESS for 1,000 token-forwards": ("ess_per_1000", ".2f")}, rows)], list[Drawing]()
    if shown := [row for row in lags if row["window"] == _SHOWN]:
        tables.append(ReportTable("autocorrelation", f"Autocorrelation of log p, {_SHOWN} of the steps", {
            "run": "run", "lag": ("lag", "count"), "moving chains": ("chains", "count"),
            "autocorrelation": ("autocorrelation", ".2f"), "of independent draws": ("independent", ".2f")},
            [row for row in shown if row["lag"] in (1, 2, 4, 8, 16)], lags))
        drawings.append(Drawing(f"fig_{study.dataset}_autocorrelation", "Autocorrelation of log p over steps, and of "
                                "independent draws in chains of the same length (dotted).", partial(_figure, shown)))
    return Section("mixing", "Mixing", paragraphs(_TEXT), tables, drawings)


def _converged(steps: dict[str, Window], spent: dict[str, float]) -> dict[str, Any]:
    """The columns of the first table for the steps in a window, by problem.

    Args:
        spent: token-forwards of all chains of a problem together.
    """
    windows, every = list(steps.values()), Clusters(list(steps))
    sizes = [window.log_p.size for window in windows]
    num_chains, lengths = zip(*(window.log_p.shape for window in windows), strict=True)
    rhats = {problem: value for problem, window in steps.items() if (value := mixing.rhat(window)) is not None}
    expected = [np.mean(mixing.independent_rhats(*steps[problem].log_p.shape) > _LIMIT) for problem in rhats]
    effective = {problem: value for problem, window in steps.items() if (value := mixing.ess(window)) is not None}
    long = Clusters(list(effective))
    return {
        "problems": len(windows), "chains": min(num_chains), "steps": min(lengths),
        **every.ratio([window.accepted.sum() for window in windows], sizes).columns("accepted"),
        **every.ratio([window.moved.sum() for window in windows], sizes).columns("moved"),
        **every.ratio([window.stuck.sum() for window in windows], num_chains).columns("stuck"), "rhat_problems": len(rhats),
        "rhat": float(np.median(list(rhats.values()))) if rhats else None,
        **Clusters(list(rhats)).mean([value > _LIMIT for value in rhats.values()]).columns("above"),
        "independent": float(np.mean(expected)) if expected else None, "ess_problems": len(effective),
        **long.ratio(list(effective.values()), [steps[problem].log_p.size for problem in effective]).columns("ess"),
        **long.ratio([1000.0 * value for value in effective.values()],
                     [spent[problem] for problem in effective]).columns("ess_per_1000")}


def _lags(steps: dict[str, Window]) -> list[dict[str, Any]]:
    curves = [(problem, mixing.autocorrelation(row)) for problem, window in steps.items()
              if window.log_p.shape[1] >= mixing.LEAST_STEPS for row in window.log_p[~window.stuck]]
    rows = []
    for lag in range(1, 1 + _MOST_LAGS):
        pairs = [(problem, curve) for problem, curve in curves if lag < len(curve)]
        if pairs:
            value = Clusters([problem for problem, _ in pairs]).mean([curve[lag] for _, curve in pairs])
            independent = np.mean([mixing.independent_autocorrelation(len(curve), lag) for _, curve in pairs])
            rows.append({"lag": lag, "chains": len(pairs), **value.columns("autocorrelation"),
                         "independent": float(independent)})
    return rows


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    drawn, (axes,) = figure.panels((7.2, 3.8))
    for index, run in enumerate(dict.fromkeys(row["run"] for row in rows)):
        own = [row for row in rows if row["run"] == run]
        lags, colour = [row["lag"] for row in own], figure.PALETTE[index % len(figure.PALETTE)]
        axes.plot(lags, [row["autocorrelation"] for row in own], color=colour,
                  marker=figure.MARKERS[index % len(figure.MARKERS)], markersize=4, label=run)
        axes.plot(lags, [row["independent"] for row in own], color=colour, linestyle=":")
    axes.axhline(0.0, color="0.8", linewidth=0.8)
    axes.set_xticks(range(1, 1 + max(row["lag"] for row in rows), 2))
    axes.set_xlabel("steps apart")
    axes.set_ylabel("autocorrelation of log p")
    axes.legend()
    return drawn
