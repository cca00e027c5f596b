"""The tables of the probe and its figure: frequencies, deviations, and the largest deviation over the number of draws.

A sampler is a decoder, or a decoder with a fault. A cell is a token, or with `probe.laws=draft` a pair of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import Each, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_EXPECTED = 5.0
"""Smallest expected count of a chi-square cell; rarer tokens share one cell."""
_SHOWN = 24
"""Cells in the table of tokens: those with the largest p."""


class Frequencies:
    """The draws of all samplers.

    Attributes:
        p, q: probabilities of the cells under target and draft, float64 (cells,).
        name: cell -> its name.
        draws: draws of each sampler up to each record.
        error: standard error of the frequency that varies most, after as many draws.
        counts: draws of each cell up to each record, by sampler.
        deviation: frequencies minus p, by sampler.
    """

    def __init__(self, p: np.ndarray, q: np.ndarray, name: Callable[[int], int | str], records: list[dict]):
        self.p, self.q, self.name, self.records = p, q, name, records
        self.draws = np.cumsum([record["draws"] for record in records])
        self.error = np.sqrt(p * (1.0 - p)).max() / np.sqrt(self.draws)
        self.counts = {sampler: np.cumsum([record["counts"][sampler] for record in records], axis=0)
                       for sampler in records[0]["accepted"]}
        self.deviation = {sampler: counts / self.draws[:, None] - p for sampler, counts in self.counts.items()}

    def largest(self, sampler: str, number: int = -1) -> float:
        """The largest distance of a frequency from p after a record."""
        return float(np.abs(self.deviation[sampler][number]).max())

    def accepted(self, sampler: str) -> float:
        """Accepted drafts."""
        return sum(record["accepted"][sampler] for record in self.records)


class SamplerDraws(NamedTuple):
    """All draws of a sampler."""

    of: Frequencies
    sampler: str


SAMPLERS = Table("samplers", (
    ("decoder", "rule that verifies the draft", lambda row: row.sampler.partition(" ")[0]),
    ("fault", "mistake in it; empty for the correct rule", lambda row: row.sampler.partition(" ")[2] or None),
    ("max_deviation", "largest distance of a cell's frequency from its probability p",
     lambda row: row.of.largest(row.sampler)),
    ("standard_error", "standard error of the frequency that varies most", lambda row: float(row.of.error[-1])),
    ("in_standard_errors", "`max_deviation` divided by `standard_error`",
     lambda row: float(row.of.largest(row.sampler) / row.of.error[-1])),
    ("total_variation", "half of the sum of all distances of frequencies from p",
     lambda row: 0.5 * float(np.abs(row.of.deviation[row.sampler][-1]).sum())),
    ("chi_square_p", "p-value of Pearson's test that the draws come from p",
     lambda row: _chi_square_p(row.of.counts[row.sampler][-1], row.of.p)),
    ("acceptance", "share of drafted tokens that are accepted",
     lambda row: row.of.accepted(row.sampler) / int(row.of.draws[-1])),
    ("draws", "draws of the sampler", lambda row: int(row.of.draws[-1])),
))


class NumberedRow(NamedTuple):
    """A cell, or a record, by its number."""

    of: Frequencies
    number: int


def _samplers(row: NumberedRow) -> dict[str, str]:
    return {sampler: sampler for sampler in row.of.counts}


TOKENS = Table("tokens", (
    ("token", "number of a token, or the text of a pair of tokens; the cells with the largest p",
     lambda row: row.of.name(row.number)),
    ("p", "its probability under the target", lambda row: float(row.of.p[row.number])),
    ("q", "its probability under the draft", lambda row: float(row.of.q[row.number])),
    Each(_samplers, (("{sampler}", "frequency among the sampler's draws minus p",
                      lambda row, sampler: float(row.of.deviation[sampler][-1, row.number])),)),
))
COURSE = Table("course", (
    ("draws", "draws up to here", lambda row: int(row.of.draws[row.number])),
    ("standard_error", "as in `samplers`, for so many draws", lambda row: float(row.of.error[row.number])),
    Each(_samplers, (("{sampler}", "`max_deviation` after so many draws",
                      lambda row, sampler: row.of.largest(sampler, row.number)),)),
))
VALUES = Table("values", (
    ("num_draws", "draws of each sampler", lambda of: int(of.draws[-1])),
    ("overlap", "sum of min(p, q): the share of drafts that rejection sampling accepts",
     lambda of: float(np.minimum(of.p, of.q).sum())),
    Each(lambda of: {sampler.replace(" ", "/"): sampler for sampler in of.counts}, (
        ("{sampler}/max_deviation", "see `samplers`", lambda of, sampler: of.largest(sampler)),)),
))


def summary(p: np.ndarray, q: np.ndarray, name: Callable[[int], int | str], records: list[dict]) -> Summary:
    """The summary of records; see `Frequencies`."""
    of = Frequencies(p, q, name, records)
    shown = np.sort(np.argsort(-p, kind="stable")[:_SHOWN])
    return Summary(VALUES.row(of), {"samplers": SAMPLERS.rows(SamplerDraws(of, sampler) for sampler in of.counts)},
                   {"tokens": TOKENS.rows(NumberedRow(of, cell) for cell in shown),
                    "course": COURSE.rows(NumberedRow(of, number) for number in range(len(records)))})


def _chi_square_p(counts: np.ndarray, p: np.ndarray) -> float | None:
    """p-value of Pearson's test that counts (tokens,) come from p; None if there are too few draws for two cells."""
    from scipy import stats

    expected, order = counts.sum() * p, np.argsort(p)
    pooled = int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED)) + 1
    if pooled >= len(p):
        return None
    cells = [np.concatenate([[values[order[:pooled]].sum()], values[order[pooled:]]]) for values in (counts, expected)]
    return float(stats.chisquare(*cells).pvalue)


RIGHT_ONE, WRONG_ONE = "speculative_rejection", "speculative_rejection argmax_proposal"
"""The two samplers of the pull request."""


def draw_frequencies(axes: Axes, tokens: list[dict]) -> None:
    """Share of draws of each token, by the right and the wrong sampler of the pull request."""
    from dflash_mcmc.report.figure import INK, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    axes.bar(places - 0.27, p, 0.27, color=INK, label="target p")
    axes.bar(places, p + [row[RIGHT_ONE] for row in tokens], 0.27, color=RIGHT, label="proposal drawn from q")
    wrong = p + [row[WRONG_ONE] for row in tokens]
    axes.bar(places + 0.27, wrong, 0.27, color=WRONG, label="proposal: most likely token of q")
    axes.bar(places, [row["q"] for row in tokens], 0.9, fill=False, edgecolor=INK, linewidth=0.8, label="draft q")
    axes.set(title="Share of draws of each token", ylabel="share of draws")
    axes.set_xticks([])


def draw_deviations(axes: Axes, tokens: list[dict], draws: int) -> None:
    """Deviation of these shares from p, with a band of two standard errors."""
    from dflash_mcmc.report.figure import OTHER, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    band = 2.0 * np.sqrt(p * (1.0 - p) / draws)
    axes.bar(places, 2.0 * band, 0.9, bottom=-band, color=OTHER, alpha=0.4, label="two standard errors")
    axes.bar(places - 0.2, [row[RIGHT_ONE] for row in tokens], 0.4, color=RIGHT)
    axes.bar(places + 0.2, [row[WRONG_ONE] for row in tokens], 0.4, color=WRONG)
    axes.axhline(0.0, color=OTHER, linewidth=0.6)
    linear = 10.0 ** np.ceil(np.log10(band.max()))
    axes.set_yscale("symlog", linthresh=linear, linscale=1.5)
    axes.set(title="Share of draws minus p", ylabel=f"deviation (linear to {linear:g})", xlabel="token")
    axes.set_xticks(places[:: 1 + len(places) // 25])
    axes.grid(visible=False, axis="x")


def draw_course(figure: Figure, axes: Axes, course: list[dict], names: Sequence[str]) -> None:
    """The largest deviation of any token over the number of draws, a line for each sampler."""
    from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG, label_lines

    draws, labels = [row["draws"] for row in course], []
    for name in names:
        colour = RIGHT if " " not in name else WRONG if name == WRONG_ONE else OTHER
        axes.plot(draws, [row[name] for row in course], color=colour, linewidth=1.2)
        labels.append((name.partition(" ")[2] or name, course[-1][name], colour))
    axes.plot(draws, [row["standard_error"] for row in course], color=INK, linestyle="--", linewidth=1.0)
    labels.append(("standard error", course[-1]["standard_error"], INK))
    axes.set(title="Largest deviation of any token", xlabel="draws", xscale="log", yscale="log")
    label_lines(figure, axes, draws[-1], labels)
