"""The tables of the speculative MCMC probe, computed from its records. Section numbers are those of the document.

A proposal is a block of the draft, or of the target token by token. A simulated chain proposes `probe.num_samples` of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import ABSENT, PROBLEMS, SKIPPED, Each, Table
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

if TYPE_CHECKING:
    from dflash_mcmc.settings import Settings

PERCENTILES = (5, 10, 25, 50, 75, 90, 95)
_TOKEN_PERCENTILES = (5, 25, 50, 75, 95)
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.7)
EASY, HARD = 0.7, 0.1
"""A block is easy if its acceptance is larger than EASY, and hard if it is smaller than HARD (section 3.2)."""



def acceptance_floor(samples: int) -> float:
    """Mean result of `simulate` if the weights are so uneven that a chain only moves to a new maximum.

    The k-th sample is a new maximum with probability 1/k, whatever the weights: (1/2 + ... + 1/samples) / (samples - 1). A
    simulated acceptance of this size therefore means that the chain is stuck.
    """
    return sum(1.0 / k for k in range(2, samples + 1)) / (samples - 1)


def chance_of_moves(rate: float, steps: int, least: int) -> float:
    """Probability of at least `least` moves in `steps` independent steps that each move with probability `rate`."""
    fewer = (math.comb(steps, k) * rate**k * (1.0 - rate) ** (steps - k) for k in range(least))
    return 1.0 - sum(fewer) if least <= steps else 0.0


class ProposalKind(NamedTuple):
    """A proposal and its kind of weights, which identify the rows of the tables."""

    name: str
    """A temperature of the draft, or `target`."""
    weights: str

    @property
    def is_target(self) -> bool:
        """Whether the target proposes, token by token."""
        return self.name == "target"


class Columns:
    """The measured records as columns over tokens and over blocks, with the problem of each token and block."""

    def __init__(self, records: list[dict]):
        self.records, self.measured = records, [record for record in records if "skipped" not in record]
        sizes = [(record["problem"], record["blocks"], record["block_size"] - 1) for record in self.measured]
        self.blocks = Clusters([problem for problem, count, _ in sizes for _ in range(count)])
        self.record = np.repeat(np.arange(len(sizes)), [count for _, count, _ in sizes])
        """The index of each block's record."""
        self.tokens = Clusters([problem for problem, count, n in sizes for _ in range(count * n)])
        self.drafted = self.measured[0]["block_size"] - 1 if self.measured else 0
        """Proposed tokens per block: all but the anchor."""
        self.number = np.array([number for _, count, _ in sizes for number in range(count)])
        first = self.measured[0]["proposals"] if self.measured else {}
        self.temperatures = [name for name in first if name != "target"]
        self.proposals = [ProposalKind(name, weights) for name in first for weights in ("reference", "joint")
                          if weights in first[name]]

    def of_tokens(self, name: str, column: str) -> np.ndarray:
        """The column `kl` or `tvd` at a draft temperature. The name `p` is for the unsharpened target."""
        return self._joined(lambda record: (record["p"] if name == "p" else record["proposals"][name])[column])

    def of_blocks(self, proposal: ProposalKind, column: str) -> np.ndarray:
        """A column of the simulated chains, one value per block."""
        return self._joined(lambda record: record["proposals"][proposal.name][proposal.weights][column])

    def _joined(self, values: Callable[[dict], list[float]]) -> np.ndarray:
        return np.array([value for record in self.measured for value in values(record)])

    def products(self, name: str) -> np.ndarray:
        """The product of the tokens' acceptances 1 - TVD, for each block."""
        of_records = [np.prod(1.0 - np.array(record["proposals"][name]["tvd"]).reshape(record["blocks"], -1), axis=1)
                      for record in self.measured]
        return np.concatenate(of_records) if of_records else np.empty(0)

    @property
    def sharpest(self) -> ProposalKind:
        """The draft at its lowest temperature, with joint weights if there are any."""
        joint = ProposalKind(self.temperatures[-1], "joint")
        return joint if joint in self.proposals else joint._replace(weights="reference")


class Speed:
    """Proposals per second, and accepted proposals per second. Intervals come from one joint bootstrap over problems.

    A timed problem counts once, whatever its length. Acceptance is the mean over all blocks, timed or not.

    Args:
        rows: number of chains that proposed at once; timings of other batch sizes are left out.
    """

    def __init__(self, columns: Columns, rows: int):
        timed = [record if rows and record.get("timed_rows") == rows else {} for record in columns.measured]
        self._problems, self._record = Clusters([record["problem"] for record in columns.measured]), columns.record
        self._timed = np.array([bool(record) for record in timed], float)
        self._seconds = {kind: np.array([record.get(f"seconds_{kind}", 0.0) for record in timed])
                         for kind in ("target", "draft")}
        self.rows, self.num_timed = rows, int(self._timed.sum())

    def proposals(self, proposal: ProposalKind) -> IntervalEstimate:
        """Proposals per second."""
        return self._with_ends(self._problems.ratio(self._timed, self._of(proposal)))

    def against_target(self, proposal: ProposalKind) -> IntervalEstimate:
        """Speed relative to the target's proposals."""
        return self._with_ends(self._problems.ratio(self._seconds["target"], self._of(proposal)))

    def bought(self, proposal: ProposalKind, values: np.ndarray, here: np.ndarray | None = None) -> IntervalEstimate:
        """Mean of `values`, float64 (blocks,), over the blocks that `here` selects, times the proposals per second."""
        here = np.ones(len(values), bool) if here is None else here
        sums, counts = (np.bincount(self._record, column, len(self._timed)) for column in (values * here, here))

        def of(weights: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have no timed problems or no selected blocks
                return (weights @ sums) / (weights @ counts) * (weights @ self._timed) / (weights @ self._of(proposal))

        return self._with_ends(self._problems.statistic(of))

    def _with_ends(self, speed: IntervalEstimate) -> IntervalEstimate:
        """The estimate, without an interval if only one problem was timed: its seconds would be the same in all resamples."""
        return speed if self.num_timed > 1 else speed._replace(low=None, high=None)

    def _of(self, proposal: ProposalKind) -> np.ndarray:
        return self._seconds["target" if proposal.name == "target" else "draft"]


class ProposedBlocks:
    """The blocks of a proposal, or those that `here` selects."""

    def __init__(self, columns: Columns, proposal: ProposalKind, here: np.ndarray | None = None):
        self.columns, self.proposal = columns, proposal
        self.here = np.ones(columns.blocks.size, bool) if here is None else here
        self.clusters = columns.blocks if here is None else columns.blocks.among(here)

    def values(self, column: str) -> np.ndarray:
        """A value of each block."""
        return self.columns.of_blocks(self.proposal, column)[self.here]

    def mean(self, column: str) -> IntervalEstimate:
        """Mean over the blocks."""
        return self.clusters.mean(self.values(column))

    @cached_property
    def median(self) -> IntervalEstimate:
        """Median of the simulated acceptance. Like all quantiles here it is an observation."""
        return self.clusters.quantiles(self.values("acceptance"), [0.5])[0]

    def of_tokens(self, column: str) -> np.ndarray:
        """`kl` or `tvd` of each token."""
        return self.columns.of_tokens(self.proposal.name, column)

    def token_mean(self, column: str, of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> object:
        """Mean over all tokens. The target has no distance to itself."""
        return ABSENT if self.proposal.is_target else self.columns.tokens.mean(of(self.of_tokens(column)))


def _percentiles(clusters: Clusters, values: np.ndarray, percents: Sequence[int]) -> dict[str, IntervalEstimate]:
    estimates = clusters.quantiles(values, [percent / 100 for percent in percents])
    return {f"{percent}": estimate for percent, estimate in zip(percents, estimates, strict=True)}


_PROPOSAL = (
    ("proposal", "`draft` or `target`", lambda row, *_: "target" if row.proposal.is_target else "draft"),
    ("temperature", "temperature of the draft; empty for the target, which draws from p^alpha token by token",
     lambda row, *_: None if row.proposal.is_target else float(row.proposal.name)),
    ("weights", "target's probabilities in log w: `joint` given the drawn tokens, `reference` given the measured answer's",
     lambda row, *_: row.proposal.weights),
)
_BLOCKS = ("blocks", "blocks of the row", lambda row, *_: int(row.here.sum()))
_TOKENS = ("tokens", "predicted tokens of the row; empty for the target, which has no distance to itself",
           lambda row, *_: ABSENT if row.proposal.is_target else int(row.here.sum()) * row.columns.drafted)
_TVD = "total variation distance of the draft from the sharpened target p^alpha"
_OF_BLOCKS = (
    ("acceptance", "mean share of a simulated chain's proposals that are accepted", lambda row, *_: row.mean("acceptance")),
    ("acceptance_median", "median of this share over blocks", lambda row, *_: row.median),
)

AGGREGATE = Table("aggregate", (  # section 3.1
    *_PROPOSAL,
    ("kl", "mean KL divergence of p^alpha from the draft's law of a token, KL(p^alpha || q), nats",
     lambda row: row.token_mean("kl")),
    ("tvd", f"mean {_TVD}, for a token", lambda row: row.token_mean("tvd")),
    ("token_acceptance", "mean of 1 - `tvd`", lambda row: row.token_mean("tvd", lambda tvd: 1.0 - tvd)),
    ("block_product", "mean over blocks of the product of their tokens' acceptances",
     lambda row: ABSENT if row.proposal.is_target else row.clusters.mean(row.columns.products(row.proposal.name))),
    *_OF_BLOCKS,
    ("equilibrium", "acceptance of a chain in equilibrium, from all pairs of samples", lambda row: row.mean("equilibrium")),
    ("moved", "mean share of proposals that are accepted and differ from the state", lambda row: row.mean("moved")),
    ("log_w", "mean log importance weight of a proposal, nats", lambda row: row.mean("log_w")),
    ("log_w_std", "standard deviation of the log weights of a block, nats", lambda row: row.mean("log_w_std")),
    ("effective", "Kong's effective number of samples of a block", lambda row: row.mean("effective")),
    ("log_w_per_token", "`log_w` divided by the tokens of a proposal, nats",
     lambda row: row.clusters.mean(row.values("log_w") / row.columns.drafted)),
    _BLOCKS, _TOKENS,
))
BASELINE = Table("baseline", (  # section 2.4: the draft at temperature 1 against p itself, its training objective
    ("kl", "mean KL(p || q) of a token for the target p and the draft q, both at temperature 1, nats",
     lambda columns: columns.tokens.mean(columns.of_tokens("p", "kl"))),
    ("tvd", "mean total variation distance of the two", lambda columns: columns.tokens.mean(columns.of_tokens("p", "tvd"))),
    ("token_acceptance", "mean of 1 - `tvd`", lambda columns: columns.tokens.mean(1.0 - columns.of_tokens("p", "tvd"))),
    ("tokens", "predicted tokens", lambda columns: columns.tokens.size),
))
PERCENTILES_OF_BLOCKS = Table("percentiles", (  # section 3.2
    *_PROPOSAL,
    Each(lambda row: _percentiles(row.clusters, row.values("acceptance"), PERCENTILES), (
        ("p{level}", "percentile of the blocks' simulated acceptance", lambda _, estimate: estimate),)),
    _BLOCKS,
))
SHARES = Table("thresholds", (  # section 3.2
    *_PROPOSAL,
    Each(lambda row: {f"{round(100 * threshold)}": threshold for threshold in THRESHOLDS}, (
        ("above_{percent}_percent", "share of blocks with a larger simulated acceptance",
         lambda row, threshold: row.clusters.mean(row.values("acceptance") > threshold)),)),
    _BLOCKS,
))
POSITIONS = Table("positions", (  # section 3.3
    *_PROPOSAL,
    ("position", "`early`, `mid` or `late` blocks of an answer, by `probe.position_edges`",
     lambda row, position, first, end: position),
    ("from", "number of the first of these blocks in the answer, from 0", lambda row, position, first, end: first),
    ("to_below", "end of their numbers, exclusive; empty for late blocks", lambda row, position, first, end: end),
    *_OF_BLOCKS,
    ("kl", "mean KL(p^alpha || q) of a token, nats",
     lambda row, *_: ABSENT if row.proposal.is_target else row.clusters.mean(
         row.of_tokens("kl").reshape(row.columns.blocks.size, -1)[row.here].mean(axis=1))),
    _BLOCKS, _TOKENS,
))
_CHAIN_STEPS = 10
"""Steps of a chain in the table of convergence, as in the document."""
# The document uses the median acceptance in a binomial distribution. The probability increases with the rate, so it maps the
# ends of the rate's interval to the ends of its own. Blocks differ, and not every accepted proposal is a move.
CONVERGENCE = Table("convergence", (  # section 4.3
    *_PROPOSAL,
    ("steps", "steps of a chain", lambda row: _CHAIN_STEPS),
    Each(lambda row: {"once": 1, "three_times": 3}, (
        ("median_{count}", "probability of one move, or of three, if every step moves with the median acceptance",
         lambda row, least: row.median.mapped(partial(chance_of_moves, steps=_CHAIN_STEPS, least=least))),
        ("blocks_{count}", "the same with each block's own rate of moves, mean over blocks",
         lambda row, least: row.clusters.mean(
             np.array([chance_of_moves(rate, _CHAIN_STEPS, least) for rate in row.values("moved")]))),
    )),
    _BLOCKS,
))


def _temperature(name: str) -> float:
    return 1.0 if name == "p" else float(name)


# Rows of a law that the draft is compared with: the unsharpened target `p` at temperature 1, or p^alpha for a temperature.
TOKENS = Table("tokens", (  # section 3.4
    ("against", "law that the draft is compared with: the sharpened `p^alpha`, or `p`",
     lambda columns, law: "p" if law == "p" else "p^alpha"),
    ("temperature", "temperature of the draft", lambda columns, law: _temperature(law)),
    Each(lambda columns, law: _percentiles(columns.tokens, 1.0 - columns.of_tokens(law, "tvd"), _TOKEN_PERCENTILES), (
        ("p{level}", "percentile of the tokens' acceptance, 1 - total variation distance", lambda *case: case[-1]),)),
    ("tokens", "predicted tokens", lambda columns, law: columns.tokens.size),
))
TOKEN_ACCEPTANCE = Table("token_acceptance", (
    ("against", "as in `tokens`", lambda law, *_: "p" if law == "p" else "p^alpha"),
    ("temperature", "temperature of the draft", lambda law, *_: _temperature(law)),
    ("acceptance", "a value of 1 - total variation distance", lambda law, acceptance, _: float(acceptance)),
    ("share", "share of tokens with at most this acceptance",
     lambda law, acceptance, ordered: float(np.searchsorted(ordered, acceptance + 1e-9, side="right") / len(ordered))),
))


def _difference(columns: Columns, name: str, column: str) -> np.ndarray:
    """Joint minus reference weights of the draft's blocks at a temperature, for each block."""
    reference, joint = (columns.of_blocks(ProposalKind(name, weights), column) for weights in ("reference", "joint"))
    return joint - reference


WEIGHTS = Table("weights", (
    ("temperature", "temperature of the draft", lambda columns, name: float(name)),
    ("log_w_difference", "mean of log w with joint weights minus log w with reference weights, nats",
     lambda columns, name: columns.blocks.mean(_difference(columns, name, "log_w"))),
    ("log_w_std_difference", "this difference for the standard deviation of log w, nats",
     lambda columns, name: columns.blocks.mean(_difference(columns, name, "log_w_std"))),
    ("acceptance_difference", "this difference for the simulated acceptance",
     lambda columns, name: columns.blocks.mean(_difference(columns, name, "acceptance"))),
    ("acceptance_apart_difference", "mean absolute value of the difference in acceptance",
     lambda columns, name: columns.blocks.mean(np.abs(_difference(columns, name, "acceptance")))),
    ("moved_difference", "this difference for the share of proposals that move",
     lambda columns, name: columns.blocks.mean(_difference(columns, name, "moved"))),
    ("blocks", "blocks of the row", lambda columns, _: columns.blocks.size),
))
_COUNTS = (
    ("timed_problems", "problems whose proposals were timed",
     lambda _, speed, *__: speed.num_timed if speed.num_timed else ABSENT),
    ("timed_rows", "chains that proposed at once", lambda _, speed, *__: speed.rows if speed.num_timed else ABSENT),
)
THROUGHPUT = Table("throughput", (  # section 5.1: the document assumed a speed of 8 and an acceptance for the target
    *_PROPOSAL,
    ("proposals_per_second", "proposals for each second", lambda row, speed: speed.proposals(row.proposal)),
    ("speed", "this rate divided by that of the target's proposals", lambda row, speed: speed.against_target(row.proposal)),
    ("acceptance", "mean simulated acceptance of blocks", lambda row, _: row.mean("acceptance")),
    ("accepts_per_second", "accepted proposals for each second",
     lambda row, speed: speed.bought(row.proposal, row.values("acceptance"))),
    ("moved", "mean share of proposals that are accepted and differ from the state", lambda row, _: row.mean("moved")),
    ("moves_per_second", "such proposals for each second", lambda row, speed: speed.bought(row.proposal, row.values("moved"))),
    _BLOCKS, *_COUNTS,
))


def _per_second(columns: Columns, speed: Speed, here: np.ndarray, proposal: ProposalKind, column: str) -> object:
    """A rate for each second on the blocks that `here` selects, if proposals were timed."""
    if not speed.num_timed or not here.any():
        return ABSENT
    return speed.bought(proposal, columns.of_blocks(proposal, column), here)


STRATA = Table("strata", (  # section 5.2
    ("difficulty", "`easy` (acceptance of the draft's block above 0.7), `middle`, or `hard` (below 0.1)",
     lambda columns, speed, difficulty, here: difficulty),
    ("temperature", "the draft's lowest temperature", lambda columns, *_: float(columns.sharpest.name)),
    ("weights", "as in `aggregate`: `joint` if they were measured", lambda columns, *_: columns.sharpest.weights),
    ("share", "share of blocks", lambda columns, speed, difficulty, here: columns.blocks.mean(here)),
    Each(lambda columns, *_: {"target" if proposal.is_target else "draft": proposal
                              for proposal in (columns.sharpest, *columns.proposals)
                              if proposal.is_target or proposal == columns.sharpest}, (
        ("{proposal}_acceptance", "mean simulated acceptance of these blocks",
         lambda columns, speed, _, here, proposal: columns.blocks.mean(columns.of_blocks(proposal, "acceptance"), here)),
        ("{proposal}_acceptance_per_second", "accepted proposals for each second on these blocks",
         lambda columns, speed, _, here, proposal: _per_second(columns, speed, here, proposal, "acceptance")),
        ("{proposal}_moved", "share of proposals on these blocks that are accepted and differ from the state",
         lambda columns, speed, _, here, proposal: columns.blocks.mean(columns.of_blocks(proposal, "moved"), here)),
        ("{proposal}_moved_per_second", "such proposals for each second on these blocks",
         lambda columns, speed, _, here, proposal: _per_second(columns, speed, here, proposal, "moved")),
    )),
    ("blocks", "blocks of the row", lambda columns, speed, difficulty, here: int(here.sum())),
    *_COUNTS,
))
MODELS = Table("models", (
    ("role", "`target` or `draft`", lambda role, size, block_size: role),
    ("name", "folder or name of the checkpoint", lambda role, size, _: size.name),
    ("parameters", "number of parameters; a draft's are without the target's embedding and head",
     lambda role, size, _: size.parameters),
    ("hidden_size", "width", lambda role, size, _: size.hidden_size),
    ("layers", "number of layers", lambda role, size, _: size.num_layers),
    ("reads_layers", "layers of the target that the draft reads, from 0",
     lambda role, size, _: ", ".join(map(str, size.reads_layers)) or None),
    ("block_size", "tokens of a block, with the known one", lambda role, size, block_size: block_size),
))
CONFIGURATION = Table("configuration", (
    ("dataset", "name of the dataset", lambda config, columns: name_of(config.dataset)),
    ("problems", "measured answers", lambda config, columns: len(columns.measured)),
    ("skipped", "answers that were left out", lambda config, columns: len(columns.records) - len(columns.measured)),
    ("blocks", "measured blocks", lambda config, columns: columns.blocks.size),
    ("tokens", "predicted tokens", lambda config, columns: columns.tokens.size),
    ("max_new_tokens", "`dataset.max_new_tokens`", lambda config, columns: config.dataset.max_new_tokens),
    ("alpha", "power of the target", lambda config, columns: config.probe.alpha),
    ("draft_temperatures", "temperatures of the draft",
     lambda config, columns: ", ".join(f"{temperature:g}" for temperature in config.probe.temperatures())),
    ("samples", "samples of a simulated chain", lambda config, columns: config.probe.num_samples),
    ("elapsed_seconds", "seconds in which the problems were drawn and measured, without loading the models, summed over "
                        "processes and starts",
     lambda config, columns: round(sum(record["seconds"] for record in columns.records), 3)),
))
BLOCKS = Table("blocks", (
    *_PROPOSAL,
    ("number", "number of the block in its answer, from 0", lambda row, number, *_: int(number)),
    ("acceptance", "its simulated acceptance", lambda row, number, acceptance, moved: float(acceptance)),
    ("moved", "share of its proposals that are accepted and differ from the state",
     lambda row, number, acceptance, moved: float(moved)),
))
VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_blocks", "measured blocks", lambda _, columns, num_samples: columns.blocks.size),
    ("num_predicted_tokens", "predicted tokens: all of a block but the known one",
     lambda _, columns, num_samples: columns.tokens.size),
    ("acceptance_floor", "mean simulated acceptance of useless proposals, with so many samples",
     lambda _, columns, num_samples: acceptance_floor(num_samples)),
))
SHARPEST = Table("values", (  # of the blocks of the draft at its lowest temperature, where an answer was measured
    ("token_acceptance", "mean of 1 - total variation distance over tokens, at the draft's lowest temperature",
     lambda blocks: 1.0 - float(blocks.of_tokens("tvd").mean())),
    ("block_acceptance", "mean simulated acceptance of its blocks", lambda blocks: float(blocks.values("acceptance").mean())),
    ("block_acceptance_median", "median simulated acceptance of its blocks", lambda blocks: blocks.median.value),
    ("block_moved", "mean share of its proposals that are accepted and differ from the state",
     lambda blocks: float(blocks.values("moved").mean())),
    ("kl", "mean KL(p^alpha || q) of a token at this temperature, nats", lambda blocks: float(blocks.of_tokens("kl").mean())),
))
ALL = (VALUES, SHARPEST, AGGREGATE, BASELINE, PERCENTILES_OF_BLOCKS, SHARES, POSITIONS, TOKENS, CONVERGENCE, WEIGHTS,
       THROUGHPUT, STRATA, MODELS, CONFIGURATION, BLOCKS, TOKEN_ACCEPTANCE)


def summary(records: list[dict], num_samples: int, position_edges: Sequence[int], timed_rows: int) -> Summary:
    """All tables but those of the run, and the data of the figures.

    Args:
        timed_rows: number of chains that propose at once in the reported timings; timings of other batches are left out.
    """
    columns = Columns(records)
    values = VALUES.row(records, columns, num_samples)
    if not columns.measured:
        return Summary(values, {}, {})
    every = [ProposedBlocks(columns, proposal) for proposal in columns.proposals]
    speed, laws = Speed(columns, timed_rows), ("p", *columns.temperatures)
    positions = [(name, first, end, (columns.number >= first) & (columns.number < (end or np.inf))) for name, first, end
                 in zip(("early", "mid", "late"), (0, *position_edges), (*position_edges, None), strict=True)]
    acceptance = columns.of_blocks(columns.sharpest, "acceptance")
    easy, hard = acceptance > EASY, acceptance < HARD
    tables = {
        "aggregate": AGGREGATE.rows(every),
        "baseline": BASELINE.rows([columns]),
        "percentiles": PERCENTILES_OF_BLOCKS.rows(every),
        "thresholds": SHARES.rows(every),
        "positions": POSITIONS.rows((ProposedBlocks(columns, proposal, here), *position) for proposal in columns.proposals
                                    for *position, here in positions if here.any()),
        "tokens": TOKENS.rows((columns, law) for law in laws),
        "convergence": CONVERGENCE.rows(every),
        "weights": WEIGHTS.rows((columns, name) for name in columns.temperatures
                                if ProposalKind(name, "joint") in columns.proposals),
        "throughput": THROUGHPUT.rows((blocks, speed) for blocks in every if speed.num_timed),
        "strata": STRATA.rows((columns, speed, *stratum) for stratum in (
            ("easy", easy), ("middle", ~easy & ~hard), ("hard", hard))),
    }
    ordered = {law: np.sort(1.0 - columns.of_tokens(law, "tvd")) for law in laws}
    data = {"blocks": BLOCKS.rows((blocks, *block) for blocks in every for block in zip(
                columns.number, blocks.values("acceptance"), blocks.values("moved"), strict=True)),
            "token_acceptance": TOKEN_ACCEPTANCE.rows((law, upto, ordered[law]) for law in laws
                                                      for upto in np.linspace(0.0, 1.0, 101))}
    return Summary({**values, **SHARPEST.row(ProposedBlocks(columns, columns.sharpest))},
                   {name: rows for name, rows in tables.items() if rows}, data)


def of_run(config: Settings, records: list[dict]) -> dict[str, list[dict]]:
    """The tables of the document's appendix, for at least one measured answer: both models, and the run's setting."""
    columns = Columns(records)
    return {"models": MODELS.rows([("target", config.model.checkpoint_size(), None),
                                   ("draft", config.draft.checkpoint_size(), columns.drafted + 1)]),
            "configuration": CONFIGURATION.rows([(config, columns)])}
