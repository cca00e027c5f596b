"""The tables of the speculative MCMC probe, computed from its records. Section numbers are those of the document.

A proposal is a block of the draft, or of the target token by token. A simulated chain proposes `probe.num_samples` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import ABSENT, PROBLEMS, SKIPPED, Each, Table
from dflash_mcmc.probe.speculative_mcmc.weighing import Columns, ProposalKind, ProposedBlocks, Speed, acceptance_floor
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.intervals import IntervalEstimate

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.model.files import CheckpointSize

PERCENTILES = (5, 10, 25, 50, 75, 90, 95)
_TOKEN_PERCENTILES = (5, 25, 50, 75, 95)
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.7)
EASY, HARD = 0.7, 0.1
"""A block is easy if its acceptance is larger than EASY, and hard if it is smaller than HARD (section 3.2)."""

_PROPOSAL = (
    ("proposal", "`draft` or `target`", lambda row: "target" if row.proposal.is_target else "draft"),
    ("temperature", "temperature of the draft; empty for the target, which draws from p^alpha token by token",
     lambda row: None if row.proposal.is_target else float(row.proposal.name)),
    ("weights", "target's probabilities in log w: `joint` given the drawn tokens, `reference` given the measured answer's",
     lambda row: row.proposal.weights),
)
_BLOCKS = ("blocks", "blocks of the row", lambda row: row.n)
_TOKENS = ("tokens", "predicted tokens of the row; empty for the target, which has no distance to itself",
           lambda row: row.num_tokens)
_TVD = "total variation distance of the draft from the sharpened target p^alpha"
_OF_BLOCKS = (
    ("acceptance", "mean share of a simulated chain's proposals that are accepted", lambda row: row.mean("acceptance")),
    ("acceptance_median", "median of this share over blocks", lambda row: row.median),
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
    Each(lambda row: row.quantiles(PERCENTILES), (
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
    ("position", "`early`, `mid` or `late` blocks of an answer, by `probe.position_edges`", lambda row: row.label[0]),
    ("from", "number of the first of these blocks in the answer, from 0", lambda row: row.label[1]),
    ("to_below", "end of their numbers, exclusive; empty for late blocks", lambda row: row.label[2]),
    *_OF_BLOCKS,
    ("kl", "mean KL(p^alpha || q) of a token, nats", lambda row: row.kl),
    _BLOCKS, _TOKENS,
))
_CHAIN_STEPS = 10
"""Steps of a chain in the table of convergence, as in the document."""
# The document uses the median acceptance in a binomial distribution.
CONVERGENCE = Table("convergence", (  # section 4.3
    *_PROPOSAL,
    ("steps", "steps of a chain", lambda row: _CHAIN_STEPS),
    Each(lambda row: {"once": 1, "three_times": 3}, (
        ("median_{count}", "probability of one move, or of three, if every step moves with the median acceptance",
         lambda row, least: row.moves_at_median(_CHAIN_STEPS, least)),
        ("blocks_{count}", "the same with each block's own rate of moves, mean over blocks",
         lambda row, least: row.moves_of_blocks(_CHAIN_STEPS, least)),
    )),
    _BLOCKS,
))


class Law:
    """A law that the draft is compared with: the unsharpened target `p` at temperature 1, or p^alpha for a temperature."""

    def __init__(self, columns: Columns, name: str):
        self.columns, self.name = columns, name
        self.acceptance = 1.0 - columns.of_tokens(name, "tvd")

    def quantiles(self) -> dict[str, IntervalEstimate]:
        """Percentiles of the tokens' acceptance 1 - TVD."""
        estimates = self.columns.tokens.quantiles(self.acceptance, [level / 100 for level in _TOKEN_PERCENTILES])
        return {f"{level}": estimate for level, estimate in zip(_TOKEN_PERCENTILES, estimates, strict=True)}

    @cached_property
    def ordered(self) -> np.ndarray:
        """The acceptances in order."""
        return np.sort(self.acceptance)


def _temperature(law: Law) -> float:
    return 1.0 if law.name == "p" else float(law.name)


TOKENS = Table("tokens", (  # section 3.4
    ("against", "law that the draft is compared with: the sharpened `p^alpha`, or `p`",
     lambda law: "p" if law.name == "p" else "p^alpha"),
    ("temperature", "temperature of the draft", _temperature),
    Each(lambda law: law.quantiles(), (
        ("p{level}", "percentile of the tokens' acceptance, 1 - total variation distance", lambda _, estimate: estimate),)),
    ("tokens", "predicted tokens", lambda law: law.columns.tokens.size),
))


class BlockWeights(NamedTuple):
    """Both kinds of weights of the draft's blocks at a temperature: joint (given the drawn tokens), and reference."""

    columns: Columns
    name: str

    def difference(self, column: str) -> np.ndarray:
        """Joint minus reference, for each block."""
        reference, joint = (self.columns.of_blocks(ProposalKind(self.name, weights), column)
                            for weights in ("reference", "joint"))
        return joint - reference

    def mean(self, column: str) -> IntervalEstimate:
        """The mean difference."""
        return self.columns.blocks.mean(self.difference(column))


WEIGHTS = Table("weights", (
    ("temperature", "temperature of the draft", lambda row: float(row.name)),
    ("log_w_difference", "mean of log w with joint weights minus log w with reference weights, nats",
     lambda row: row.mean("log_w")),
    ("log_w_std_difference", "this difference for the standard deviation of log w, nats", lambda row: row.mean("log_w_std")),
    ("acceptance_difference", "this difference for the simulated acceptance", lambda row: row.mean("acceptance")),
    ("acceptance_apart_difference", "mean absolute value of the difference in acceptance",
     lambda row: row.columns.blocks.mean(np.abs(row.difference("acceptance")))),
    ("moved_difference", "this difference for the share of proposals that move", lambda row: row.mean("moved")),
    ("blocks", "blocks of the row", lambda row: row.columns.blocks.size),
))


class Timed(NamedTuple):
    """A proposal with its measured speed. The document assumed a speed of 8 and an acceptance for the target."""

    blocks: ProposedBlocks
    speed: Speed

    @property
    def proposal(self) -> ProposalKind:
        """The proposal."""
        return self.blocks.proposal

    def bought(self, column: str) -> IntervalEstimate:
        """A rate for each second."""
        return self.speed.bought(self.proposal, self.blocks.values(column))


_COUNTS = (
    ("timed_problems", "problems whose proposals were timed",
     lambda row: row.speed.num_timed if row.speed.num_timed else ABSENT),
    ("timed_rows", "chains that proposed at once", lambda row: row.speed.rows if row.speed.num_timed else ABSENT),
)
THROUGHPUT = Table("throughput", (  # section 5.1
    *_PROPOSAL,
    ("proposals_per_second", "proposals for each second", lambda row: row.speed.proposals(row.proposal)),
    ("speed", "this rate divided by that of the target's proposals", lambda row: row.speed.against_target(row.proposal)),
    ("acceptance", "mean simulated acceptance of blocks", lambda row: row.blocks.mean("acceptance")),
    ("accepts_per_second", "accepted proposals for each second", lambda row: row.bought("acceptance")),
    ("moved", "mean share of proposals that are accepted and differ from the state", lambda row: row.blocks.mean("moved")),
    ("moves_per_second", "such proposals for each second", lambda row: row.bought("moved")),
    ("blocks", "blocks of the row", lambda row: row.blocks.n),
    *_COUNTS,
))


class Stratum(NamedTuple):
    """Blocks of one difficulty, by the acceptance of the draft at its lowest temperature."""

    columns: Columns
    speed: Speed
    difficulty: str
    here: np.ndarray

    def proposals(self) -> dict[str, ProposalKind]:
        """The draft at its lowest temperature, and the target if it proposes, too."""
        target = ProposalKind("target", "joint")
        return {"draft": _sharpest(self.columns), **({"target": target} if target in self.columns.proposals else {})}

    def mean(self, proposal: ProposalKind, column: str) -> IntervalEstimate:
        """Mean over these blocks."""
        return self.columns.blocks.mean(self.columns.of_blocks(proposal, column), self.here)

    def bought(self, proposal: ProposalKind, column: str) -> object:
        """This rate for each second, if proposals were timed."""
        if not self.speed.num_timed or not self.here.any():
            return ABSENT
        return self.speed.bought(proposal, self.columns.of_blocks(proposal, column), self.here)


STRATA = Table("strata", (  # section 5.2
    ("difficulty", "`easy` (acceptance of the draft's block above 0.7), `middle`, or `hard` (below 0.1)",
     lambda row: row.difficulty),
    ("temperature", "the draft's lowest temperature", lambda row: float(_sharpest(row.columns).name)),
    ("weights", "as in `aggregate`: `joint` if they were measured", lambda row: _sharpest(row.columns).weights),
    ("share", "share of blocks", lambda row: row.columns.blocks.mean(row.here)),
    Each(lambda row: row.proposals(), (
        ("{proposal}_acceptance", "mean simulated acceptance of these blocks",
         lambda row, proposal: row.mean(proposal, "acceptance")),
        ("{proposal}_acceptance_per_second", "accepted proposals for each second on these blocks",
         lambda row, proposal: row.bought(proposal, "acceptance")),
        ("{proposal}_moved", "share of proposals on these blocks that are accepted and differ from the state",
         lambda row, proposal: row.mean(proposal, "moved")),
        ("{proposal}_moved_per_second", "such proposals for each second on these blocks",
         lambda row, proposal: row.bought(proposal, "moved")),
    )),
    ("blocks", "blocks of the row", lambda row: int(row.here.sum())),
    *_COUNTS,
))


class ModelSize(NamedTuple):
    """The checkpoint of the target or of the draft."""

    role: str
    size: CheckpointSize
    block_size: int | None


MODELS = Table("models", (
    ("role", "`target` or `draft`", lambda row: row.role),
    ("name", "folder or name of the checkpoint", lambda row: row.size.name),
    ("parameters", "number of parameters; a draft's are without the target's embedding and head",
     lambda row: row.size.parameters),
    ("hidden_size", "width", lambda row: row.size.hidden_size),
    ("layers", "number of layers", lambda row: row.size.num_layers),
    ("reads_layers", "layers of the target that the draft reads, from 0",
     lambda row: ", ".join(map(str, row.size.reads_layers)) or None),
    ("block_size", "tokens of a block, with the known one", lambda row: row.block_size),
))


class RunExtent(NamedTuple):
    """The setting and the extent of a run."""

    config: Config
    temperatures: Sequence[float]
    records: list[dict]
    columns: Columns


CONFIGURATION = Table("configuration", (
    ("dataset", "name of the dataset", lambda run: name_of(run.config.dataset)),
    ("problems", "measured answers", lambda run: len(run.columns.records)),
    ("skipped", "answers that were left out", lambda run: len(run.records) - len(run.columns.records)),
    ("blocks", "measured blocks", lambda run: run.columns.blocks.size),
    ("tokens", "predicted tokens", lambda run: run.columns.tokens.size),
    ("max_new_tokens", "`dataset.max_new_tokens`", lambda run: run.config.dataset.max_new_tokens),
    ("alpha", "power of the target", lambda run: run.config.probe.alpha),
    ("draft_temperatures", "temperatures of the draft",
     lambda run: ", ".join(f"{temperature:g}" for temperature in run.temperatures)),
    ("samples", "samples of a simulated chain", lambda run: run.config.probe.num_samples),
    ("elapsed_seconds", "seconds in which the problems were drawn and measured, without loading the models, summed over "
                        "processes and starts", lambda run: round(sum(record["seconds"] for record in run.records), 3)),
))


class MeasuredBlock(NamedTuple):
    """One block of a proposal."""

    proposal: ProposalKind
    number: int
    acceptance: float
    moved: float


BLOCKS = Table("blocks", (
    *_PROPOSAL,
    ("number", "number of the block in its answer, from 0", lambda block: int(block.number)),
    ("acceptance", "its simulated acceptance", lambda block: float(block.acceptance)),
    ("moved", "share of its proposals that are accepted and differ from the state", lambda block: float(block.moved)),
))


class LawUpTo(NamedTuple):
    """A law, and a value of the tokens' acceptance."""

    law: Law
    acceptance: float


TOKEN_ACCEPTANCE = Table("token_acceptance", (
    ("against", "as in `tokens`", lambda row: "p" if row.law.name == "p" else "p^alpha"),
    ("temperature", "temperature of the draft", lambda row: _temperature(row.law)),
    ("acceptance", "a value of 1 - total variation distance", lambda row: float(row.acceptance)),
    ("share", "share of tokens with at most this acceptance",
     lambda row: float(np.searchsorted(row.law.ordered, row.acceptance + 1e-9, side="right") / len(row.law.ordered))),
))


class SpeculativeMcmcResult(NamedTuple):
    """All records, and the blocks of the draft at its lowest temperature; None without a measured answer."""

    records: list[dict]
    columns: Columns
    num_samples: int
    sharpest: ProposedBlocks | None

    def mean(self, column: str) -> object:
        """Mean over the blocks."""
        return ABSENT if self.sharpest is None else float(self.sharpest.values(column).mean())

    def token_mean(self, column: str) -> Any:
        """Mean over the tokens."""
        return ABSENT if self.sharpest is None else float(self.sharpest.of_tokens(column).mean())


VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_blocks", "measured blocks", lambda result: result.columns.blocks.size),
    ("num_predicted_tokens", "predicted tokens: all of a block but the known one", lambda result: result.columns.tokens.size),
    ("acceptance_floor", "mean simulated acceptance of useless proposals, with so many samples",
     lambda result: acceptance_floor(result.num_samples)),
    ("token_acceptance", "mean of 1 - total variation distance over tokens, at the draft's lowest temperature",
     lambda result: ABSENT if result.sharpest is None else 1.0 - result.token_mean("tvd")),
    ("block_acceptance", "mean simulated acceptance of its blocks", lambda result: result.mean("acceptance")),
    ("block_acceptance_median", "median simulated acceptance of its blocks",
     lambda result: result.sharpest.median.value if result.sharpest else ABSENT),
    ("block_moved", "mean share of its proposals that are accepted and differ from the state",
     lambda result: result.mean("moved")),
    ("kl", "mean KL(p^alpha || q) of a token at this temperature, nats", lambda result: result.token_mean("kl")),
))
ALL = (VALUES, AGGREGATE, BASELINE, PERCENTILES_OF_BLOCKS, SHARES, POSITIONS, TOKENS, CONVERGENCE, WEIGHTS, THROUGHPUT, STRATA,
       MODELS, CONFIGURATION, BLOCKS, TOKEN_ACCEPTANCE)


def summary(records: list[dict], num_samples: int, position_edges: Sequence[int], timed_rows: int) -> Summary:
    """All tables but those of the run, and the data of the figures.

    Args:
        timed_rows: number of chains that propose at once in the reported timings; timings of other batches are left out.
    """
    columns = Columns(records)
    if not columns.records:
        return Summary(VALUES.row(SpeculativeMcmcResult(records, columns, num_samples, None)), {}, {})
    every = [ProposedBlocks(columns, proposal) for proposal in columns.proposals]
    speed = Speed(columns, timed_rows)
    laws = [Law(columns, name) for name in ("p", *columns.temperatures)]
    tables = {
        "aggregate": AGGREGATE.rows(every),
        "baseline": BASELINE.rows([columns]),
        "percentiles": PERCENTILES_OF_BLOCKS.rows(every),
        "thresholds": SHARES.rows(every),
        "positions": POSITIONS.rows(_by_position(columns, position_edges)),
        "tokens": TOKENS.rows(laws),
        "convergence": CONVERGENCE.rows(every),
        "weights": WEIGHTS.rows(BlockWeights(columns, name) for name in columns.temperatures
                                if ProposalKind(name, "joint") in columns.proposals),
        "throughput": THROUGHPUT.rows(Timed(blocks, speed) for blocks in every if speed.num_timed),
        "strata": STRATA.rows(_strata(columns, speed)),
    }
    data = {"blocks": BLOCKS.rows(_blocks(columns)),
            "token_acceptance": TOKEN_ACCEPTANCE.rows(LawUpTo(law, upto) for law in laws
                                                      for upto in np.linspace(0.0, 1.0, 101))}
    sharpest = ProposedBlocks(columns, _sharpest(columns))
    return Summary(VALUES.row(SpeculativeMcmcResult(records, columns, num_samples, sharpest)),
                   {name: rows for name, rows in tables.items() if rows}, data)


def of_run(config: Config, temperatures: Sequence[float], records: list[dict]) -> dict[str, list[dict]]:
    """The tables of the document's appendix, for at least one measured answer: both models, and the run's setting."""
    columns = Columns(records)
    return {"models": MODELS.rows([ModelSize("target", config.model.checkpoint_size(), None),
                                   ModelSize("draft", config.draft.checkpoint_size(), columns.drafted + 1)]),
            "configuration": CONFIGURATION.rows([RunExtent(config, temperatures, records, columns)])}


def _sharpest(columns: Columns) -> ProposalKind:
    """The draft at its lowest temperature, with joint weights if there are any."""
    joint = ProposalKind(columns.temperatures[-1], "joint")
    return joint if joint in columns.proposals else joint._replace(weights="reference")


def _by_position(columns: Columns, edges: Sequence[int]) -> Iterator[ProposedBlocks]:
    """Early, middle and late blocks of each proposal."""
    for proposal in columns.proposals:
        for label in zip(("early", "mid", "late"), (0, *edges), (*edges, None), strict=True):
            here = (columns.number >= label[1]) & (columns.number < (label[2] or np.inf))
            if here.any():
                yield ProposedBlocks(columns, proposal, label, here)


def _strata(columns: Columns, speed: Speed) -> Iterator[Stratum]:
    acceptance = columns.of_blocks(_sharpest(columns), "acceptance")
    for name, here in (("easy", acceptance > EASY), ("middle", (acceptance <= EASY) & (acceptance >= HARD)),
                       ("hard", acceptance < HARD)):
        yield Stratum(columns, speed, name, here)


def _blocks(columns: Columns) -> Iterator[MeasuredBlock]:
    for proposal in columns.proposals:
        acceptance, moved = (columns.of_blocks(proposal, name) for name in ("acceptance", "moved"))
        yield from (MeasuredBlock(proposal, *values) for values in zip(columns.number, acceptance, moved, strict=True))
