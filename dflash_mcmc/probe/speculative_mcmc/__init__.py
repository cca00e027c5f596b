"""Tests whether a draft's block can be the proposal of Metropolis-Hastings on p^alpha.

The protocol is from the document "Speculative MCMC Probe: Can a Draft Model Serve as an MCMC Proposal?" (sections 2 to 5),
whose section numbers the tables have. A proposal is a block of the draft, or of the target token by token. A simulated chain
proposes `probe.num_samples` of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dflash_mcmc.chains import cost
from dflash_mcmc.components import Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import ABSENT, PROBLEMS, SKIPPED, Each, ForcedProbe, Observations, Table, check_block, measured, rounded
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.estimates import Clusters, IntervalEstimate
from dflash_mcmc.types import Summary, Unit, UnitCost, Work

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

PROPOSALS = 4
"""Number of proposals of a timed chain. The first one is not counted (`weighing.seconds_of`)."""


@register("probe", "speculative_mcmc")
@dataclass(slots=True, kw_only=True)
class SpeculativeMCMC(ForcedProbe):
    """Distance of the draft's blocks from p^alpha along greedy answers, and the behaviour of chains that propose the blocks.

    An answer is teacher-forced in whole blocks, whose first token is the anchor. For each token the probe measures KL and
    total variation between p_alpha, the sharpened distribution of the target, and the draft's distribution at several
    temperatures. For each block it draws `num_samples` blocks from the draft, computes their importance weights, and
    simulates independence Metropolis-Hastings with them.
    """
    alpha: float = identity(4.0, "power of the target p^alpha", ge=1)
    draft_temperatures: list[float] | None = identity(None, "temperatures of the draft; null uses 1, 0.5 and 1/alpha", gt=0)
    num_samples: int = identity(100, "blocks drawn for each block of the answer; a chain starts at the first one and proposes "
                                "the others", ge=2, le=1_000_000)
    weights: Literal["reference", "joint"] = identity(
        "joint", "reference = p of a drawn token given the reference tokens before it, as published; joint = these weights "
        "and also weights with p given the drawn tokens before it, which are ratios of two distributions of blocks")
    autoregressive: bool = identity(True, "also draw blocks from the target, token by token at temperature 1/alpha, as the "
                                    "proposal for comparison; its weights are joint")
    timed_rows: int = runtime(8, "chains that propose at once while both proposals are timed, for every answer; 0 = no "
                              "timing. Tables use only timings of this number of chains", ge=0, le=65_536)
    position_edges: list[int] = runtime([10, 30], "indices of the first middle block and of the first late block")

    needs_draft = True

    def check(self, config: Settings) -> None:
        super().check(config)
        listed = self.draft_temperatures
        if listed is not None and (not listed or len(set(listed)) < len(listed)):
            raise ConfigError("probe.draft_temperatures", listed, "different numbers > 0, or null for 1, 0.5 and 1/alpha")
        temperatures = self.temperatures()
        if len({f"{each:g}" for each in temperatures}) < len(temperatures):  # equal names would share an entry in a record
            raise ConfigError("probe.draft_temperatures", temperatures, "numbers that differ in their first six digits")
        edges = self.position_edges
        if len(edges) != 2 or not 0 < edges[0] < edges[1]:
            raise ConfigError("probe.position_edges", edges, "two numbers of blocks, the smaller first, such as [10, 30]")

    def check_target(self, target: "plan.TargetShape") -> None:
        """See `Probe.check_target`. Raises UserError for a target with recurrent layers if continuations are read together."""
        from dflash_mcmc.forcing import sequences

        if target.cache_shape.recurrent is not None and (self.weights == "joint" or self.autoregressive):
            sequences.refuse()

    def temperatures(self) -> list[float]:
        """The temperatures of the draft, from the highest to the lowest."""
        temperatures = [1.0, 0.5, 1.0 / self.alpha] if self.draft_temperatures is None else self.draft_temperatures
        return sorted(set(temperatures), reverse=True)

    def canonical(self, config: Settings) -> dict[str, object]:
        """The temperatures, with null replaced by its meaning."""
        return {"draft_temperatures": self.temperatures()}

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost of drawing the greedy answer, reading it once, reading the drawn blocks, and timing the proposals.

        All tokens of a drawn block except the last are read. Common beginnings are read once (`config.assumed.shared`).
        """
        answer = cost.forced(config)
        drafted = answer.block_size - 1
        kinds = (len(self.temperatures()) if self.weights == "joint" else 0) + self.autoregressive
        read = answer.blocks * kinds * self.num_samples * max(0, drafted - 1)
        read *= 1.0 - config.assumed.shared
        timed = 2 * self.timed_rows * (answer.prompt + answer.length / 2 + PROPOSALS * drafted)
        return UnitCost(answer.drawing + answer.prompt + answer.length + read + timed,
                        answer.blocks + self.timed_rows * PROPOSALS)

    def recorder(self, config: Settings, model: "language_model.LanguageModel", draft: "DFlashDrafter | None",
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """Measures a greedy answer, and times proposals at its middle. Raises ConfigError for answers shorter than a block."""
        import torch

        from dflash_mcmc.probe.speculative_mcmc.weighing import seconds_of

        assert draft is not None  # `needs_draft`
        check_block(config, draft.num_drafted + 1)
        sharpened = SamplingParams(temperature=1.0 / self.alpha)

        def record(unit: Unit, answer: Answer) -> dict:
            with torch.inference_mode():
                found = self.record(model, draft, answer, Key(config.seed).fold_in("speculative_mcmc", unit.problem))
            for name, source in (("target", "blended"), ("draft", "draft")) if self.timed_rows else ():
                found[f"seconds_{name}"] = seconds_of(config.hardware.options(), model, draft, answer, source, sharpened,
                                                      self.timed_rows, PROPOSALS)
                found["timed_rows"] = self.timed_rows
            return found

        return record

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The document's tables, and three additions: joint weights, moves, and the floor of a simulated acceptance."""
        return summary_of(records, self.num_samples, self.position_edges, self.timed_rows)

    def record(self, model: "language_model.LanguageModel", drafter: "DFlashDrafter", answer: Answer, key: Key) -> dict:
        """The record of an answer. Its lists have an entry per predicted token or per block. Raises NotNumbers.

        `p` has the distances of the draft from the unsharpened target (`weighing.distances`), and `proposals`, by temperature
        of the draft or `target`, those from p^alpha and, by kind of weights, the chain of each block (`weighing.chains`).
        """
        import torch

        from dflash_mcmc.forcing import sequences
        from dflash_mcmc.probe.speculative_mcmc import weighing

        n, samples, joint = drafter.num_drafted, self.num_samples, self.weights == "joint"
        forced = sequences.forced_blocks(drafter, answer.prompt, answer.tokens, keep_cache=joint or self.autoregressive)
        anchors, count = forced.anchors, len(forced.anchors)
        # Distances for every predicted token, and drawn blocks, both by temperature. Distances of `p`: the plain target
        names = {f"{temperature:g}": temperature for temperature in self.temperatures()}
        # For all blocks at once: the numbers of a block must not depend on how many blocks are read together.
        uniforms = {name: torch.from_numpy(key.fold_in("draft", name).uniforms(0, count * n * samples)).view(-1, samples)
                    for name in names}
        laws: dict[str, dict[str, list[float]]] = {name: {"kl": [], "tvd": []} for name in ("p", *names)}
        drawn: dict[str, list] = {name: [] for name in names}
        step = sequences.positions_at_once(model.vocab_size, n) // n
        for start in range(0, count, step):
            target = sequences.checked(model.logits(forced.target[start : start + step].flatten(0, 1)))
            draft = sequences.checked(drafter.logits(forced.draft[start : start + step].flatten(0, 1)))
            for name, alpha, temperature in (("p", 1.0, 1.0), *((name, self.alpha, names[name]) for name in names)):
                for column, values in zip(("kl", "tvd"), weighing.distances(target, draft, alpha, temperature), strict=True):
                    laws[name][column] += rounded(values)
            for name, temperature in names.items():
                mine = uniforms[name][start * n : (start + step) * n].to(target.device)
                found, log_q = weighing.draw(draft, temperature, mine)
                log_p = target.gather(1, found).double() - torch.logsumexp(target.double(), dim=-1, keepdim=True)
                drawn[name].append((found, log_p, log_q))
        proposed = {name: weighing.Proposed(*(
            torch.cat(pieces).view(count, n, samples).transpose(1, 2).cpu().numpy() for pieces in zip(*parts, strict=True)))
            for name, parts in drawn.items()}
        weighed = {(name, "reference"): blocks for name, blocks in proposed.items()}
        if joint:
            every = np.concatenate([blocks.tokens for blocks in proposed.values()], axis=1)
            along = np.stack([weighing.joint_log_p(model, forced.reading, anchor, tokens)
                              for anchor, tokens in zip(anchors, every, strict=True)])
            for index, (name, blocks) in enumerate(proposed.items()):
                joined = blocks._replace(log_p=along[:, index * samples : (index + 1) * samples])
                weighed[name, "joint"] = weighing.ended(joined, model.stop_ids)
        if self.autoregressive:  # blocks drawn from the target, token by token
            mine = torch.from_numpy(key.fold_in("target").uniforms(0, count * samples * n)).view(count, samples, n)
            places = [weighing.draw_from_target(model, forced.reading, anchor, 1.0 / self.alpha, own)
                      for anchor, own in zip(anchors, mine.to(model.device), strict=True)]
            weighed["target", "joint"] = weighing.ended(
                weighing.Proposed(*map(np.concatenate, zip(*places, strict=True))), model.stop_ids)
        # The chains of all proposals are simulated together. Both kinds of weights use the same uniforms.
        accepting = [key.fold_in("accept", name).uniforms(0, count * (samples - 1)).reshape(count, -1) for name, _ in weighed]
        columns = weighing.chains(weighing.Proposed(*map(np.concatenate, zip(*weighed.values(), strict=True))), self.alpha,
                                  np.concatenate(accepting))
        entries: dict[str, dict[str, Any]] = {name: {**laws.get(name, {})} for name, _ in weighed}
        for index, (name, weights) in enumerate(weighed):
            entries[name][weights] = {field: rounded(column[index * count : (index + 1) * count])
                                      for field, column in columns.items()}
        return {"num_tokens": len(answer.tokens), "blocks": count, "block_size": n + 1, "p": laws["p"], "proposals": entries}


PERCENTILES, _TOKEN_PERCENTILES = (5, 10, 25, 50, 75, 90, 95), (5, 25, 50, 75, 95)
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.7)
EASY, HARD = 0.7, 0.1
"""A block is easy if its acceptance is larger than EASY, and hard if it is smaller than HARD (section 3.2)."""
_CHAIN_STEPS = 10
"""Steps of a chain in the table of convergence, as in the document."""


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


def tokens_of(kept: list[dict], law: str) -> Observations:
    """The distances of the draft at a temperature from p^alpha for every token, or with the law `p` from the plain target."""
    own = [record["p"] if law == "p" else record["proposals"][law] for record in kept]
    kl, tvd = (np.concatenate([each[name] for each in own]) for name in ("kl", "tvd"))
    problems = [record["problem"] for record, each in zip(kept, own, strict=True) for _ in each["tvd"]]
    return Observations({"problem": problems, "kl": kl, "tvd": tvd, "token_acceptance": 1.0 - tvd},
                        against="p" if law == "p" else "p^alpha", temperature=1.0 if law == "p" else float(law))


def blocks_of(kept: list[dict], name: str, weights: str) -> Observations:
    """The simulated chains of a proposal, a temperature of the draft or `target`, with one kind of weights.

    The column `record` is the index of each block's record, and `number` that of the block in the answer.
    """
    chains, drafted = [record["proposals"][name][weights] for record in kept], kept[0]["block_size"] - 1
    places = [(record["problem"], index, number) for index, record in enumerate(kept) for number in range(record["blocks"])]
    columns = {column: np.concatenate([chain[column] for chain in chains]) for column in chains[0]}
    columns |= dict(zip(("problem", "record", "number"), map(np.array, zip(*places, strict=True)), strict=True))
    columns["log_w_per_token"], tokens = columns["log_w"] / drafted, None
    if name != "target":
        tokens = tokens_of(kept, name)
        columns["kl"] = tokens.values["kl"].reshape(-1, drafted).mean(axis=1)
        columns["block_product"] = np.prod(tokens.values["token_acceptance"].reshape(-1, drafted), axis=1)
    return Observations(columns, proposal="draft" if tokens else "target", temperature=float(name) if tokens else None,
                        weights=weights, of_tokens=tokens, drafted=drafted, name=name)


class Speed:
    """Proposals per second, and accepted proposals per second. Intervals come from one joint bootstrap over problems.

    A timed problem counts once, whatever its length. Acceptance is the mean over all blocks, timed or not.

    Args:
        rows: number of chains that proposed at once; timings of other batch sizes are left out.
    """

    def __init__(self, kept: list[dict], rows: int):
        timed = [record if rows and record.get("timed_rows") == rows else {} for record in kept]
        self._problems, self.rows = Clusters([record["problem"] for record in kept]), rows
        self._timed = np.array([bool(record) for record in timed], float)
        self._seconds = {kind: np.array([record.get(f"seconds_{kind}", 0.0) for record in timed])
                         for kind in ("target", "draft")}
        self.num_timed = int(self._timed.sum())

    def proposals(self, kind: str) -> IntervalEstimate:
        """Proposals per second of `draft` or `target`."""
        return self._with_ends(self._problems.ratio(self._timed, self._seconds[kind]))

    def against_target(self, kind: str) -> IntervalEstimate:
        """Speed relative to the target's proposals."""
        return self._with_ends(self._problems.ratio(self._seconds["target"], self._seconds[kind]))

    def bought(self, blocks: Observations, column: str) -> IntervalEstimate:
        """Mean of a column over blocks, times the proposals per second."""
        values, seconds = blocks.values[column], self._seconds[blocks["proposal"]]
        sums, counts = (np.bincount(blocks.values["record"], part, len(self._timed))
                        for part in (values * blocks.among, blocks.among))

        def of(weights: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have no timed problems or no selected blocks
                return (weights @ sums) / (weights @ counts) * (weights @ self._timed) / (weights @ seconds)

        return self._with_ends(self._problems.statistic(of))

    def _with_ends(self, speed: IntervalEstimate) -> IntervalEstimate:
        """The estimate, without an interval if only one problem was timed: its seconds would be the same in all resamples."""
        return speed if self.num_timed > 1 else speed._replace(low=None, high=None)


def _median(of: Observations) -> IntervalEstimate:
    """Median of the simulated acceptance. Like all quantiles here it is an observation."""
    return of.quantiles("acceptance", [0.5])[0]


def _percentiles(of: Observations, column: str, percents: Sequence[int]) -> dict[str, IntervalEstimate]:
    return dict(zip(map(str, percents), of.quantiles(column, [percent / 100 for percent in percents]), strict=True))


def _token_mean(name: str) -> Any:
    """The mean over all tokens. The target has no distance to itself."""
    return lambda of: of["of_tokens"].mean(name) if of["of_tokens"] else ABSENT


def _drafts(name: str) -> Any:
    """The mean over blocks of what the draft's blocks alone have."""
    return lambda of: of.mean(name) if of["of_tokens"] else ABSENT


_PROPOSAL = (
    ("proposal", "`draft` or `target`"),
    ("temperature", "temperature of the draft; empty for the target, which draws from p^alpha token by token"),
    ("weights", "target's probabilities in log w: `joint` given the drawn tokens, `reference` given the measured answer's"),
)
_BLOCKS = ("blocks", "blocks of the row", lambda of: of.n)
_TOKENS = ("tokens", "predicted tokens of the row; empty for the target, which has no distance to itself",
           lambda of: of.n * of["drafted"] if of["of_tokens"] else ABSENT)
_TVD = "total variation distance of the draft from the sharpened target p^alpha"
_MOVED = ("moved", "mean share of proposals that are accepted and differ from the state")
_OF_BLOCKS = (
    ("acceptance", "mean share of a simulated chain's proposals that are accepted"),
    ("acceptance_median", "median of this share over blocks", _median),
)

AGGREGATE = Table("aggregate", (  # section 3.1
    *_PROPOSAL,
    ("kl", "mean KL divergence of p^alpha from the draft's law of a token, KL(p^alpha || q), nats", _token_mean("kl")),
    ("tvd", f"mean {_TVD}, for a token", _token_mean("tvd")),
    ("token_acceptance", "mean of 1 - `tvd`", _token_mean("token_acceptance")),
    ("block_product", "mean over blocks of the product of their tokens' acceptances", _drafts("block_product")),
    *_OF_BLOCKS,
    ("equilibrium", "acceptance of a chain in equilibrium, from all pairs of samples"),
    _MOVED,
    ("log_w", "mean log importance weight of a proposal, nats"),
    ("log_w_std", "standard deviation of the log weights of a block, nats"),
    ("effective", "Kong's effective number of samples of a block"),
    ("log_w_per_token", "`log_w` divided by the tokens of a proposal, nats"),
    _BLOCKS, _TOKENS,
))
BASELINE = Table("baseline", (  # section 2.4: the draft at temperature 1 against p itself, its training objective
    ("kl", "mean KL(p || q) of a token for the target p and the draft q, both at temperature 1, nats"),
    ("tvd", "mean total variation distance of the two"),
    ("token_acceptance", "mean of 1 - `tvd`"),
    ("tokens", "predicted tokens", lambda of: of.n),
))
PERCENTILES_OF_BLOCKS = Table("percentiles", (  # section 3.2
    *_PROPOSAL,
    Each(lambda of: _percentiles(of, "acceptance", PERCENTILES), (
        ("p{level}", "percentile of the blocks' simulated acceptance", lambda _, estimate: estimate),)),
    _BLOCKS,
))
SHARES = Table("thresholds", (  # section 3.2
    *_PROPOSAL,
    Each(lambda of: {f"{round(100 * threshold)}": threshold for threshold in THRESHOLDS}, (
        ("above_{percent}_percent", "share of blocks with a larger simulated acceptance",
         lambda of, threshold: of.mean(of.values["acceptance"] > threshold)),)),
    _BLOCKS,
))
POSITIONS = Table("positions", (  # section 3.3
    *_PROPOSAL,
    ("position", "`early`, `mid` or `late` blocks of an answer, by `probe.position_edges`"),
    ("from", "number of the first of these blocks in the answer, from 0"),
    ("to_below", "end of their numbers, exclusive; empty for late blocks"),
    *_OF_BLOCKS,
    ("kl", "mean KL(p^alpha || q) of a token, nats", _drafts("kl")),
    _BLOCKS, _TOKENS,
))
# The document uses the median acceptance in a binomial distribution. The probability increases with the rate, so it maps the
# ends of the rate's interval to the ends of its own. Blocks differ, and not every accepted proposal is a move.
CONVERGENCE = Table("convergence", (  # section 4.3
    *_PROPOSAL,
    ("steps", "steps of a chain", lambda of: _CHAIN_STEPS),
    Each(lambda of: {"once": 1, "three_times": 3}, (
        ("median_{count}", "probability of one move, or of three, if every step moves with the median acceptance",
         lambda of, least: _median(of).mapped(partial(chance_of_moves, steps=_CHAIN_STEPS, least=least))),
        ("blocks_{count}", "the same with each block's own rate of moves, mean over blocks",
         lambda of, least: of.mean([chance_of_moves(rate, _CHAIN_STEPS, least) for rate in of.values["moved"]])),
    )),
    _BLOCKS,
))
# Rows of a law that the draft is compared with: the unsharpened target `p` at temperature 1, or p^alpha for a temperature.
_AGAINST = (
    ("against", "law that the draft is compared with: the sharpened `p^alpha`, or `p`"),
    ("temperature", "temperature of the draft"),
)
TOKENS = Table("tokens", (  # section 3.4
    *_AGAINST,
    Each(lambda of: _percentiles(of, "token_acceptance", _TOKEN_PERCENTILES), (
        ("p{level}", "percentile of the tokens' acceptance, 1 - total variation distance", lambda _, estimate: estimate),)),
    ("tokens", "predicted tokens", lambda of: of.n),
))
_DIFFERENCES, _SHOWN = ("log_w", "log_w_std", "acceptance", "moved"), ("number", "acceptance", "moved")
WEIGHTS = Table("weights", (  # of joint minus reference weights of the draft's blocks at a temperature
    ("temperature", "temperature of the draft"),
    ("log_w_difference", "mean of log w with joint weights minus log w with reference weights, nats",
     lambda of: of.mean("log_w")),
    ("log_w_std_difference", "this difference for the standard deviation of log w, nats", lambda of: of.mean("log_w_std")),
    ("acceptance_difference", "this difference for the simulated acceptance", lambda of: of.mean("acceptance")),
    ("acceptance_apart_difference", "mean absolute value of the difference in acceptance",
     lambda of: of.mean(np.abs(of.values["acceptance"]))),
    ("moved_difference", "this difference for the share of proposals that move", lambda of: of.mean("moved")),
    _BLOCKS,
))
_COUNTS = (
    ("timed_problems", "problems whose proposals were timed", lambda of: of["speed"].num_timed or ABSENT),
    ("timed_rows", "chains that proposed at once", lambda of: of["speed"].rows if of["speed"].num_timed else ABSENT),
)
THROUGHPUT = Table("throughput", (  # section 5.1: the document assumed a speed of 8 and an acceptance for the target
    *_PROPOSAL,
    ("proposals_per_second", "proposals for each second", lambda of: of["speed"].proposals(of["proposal"])),
    ("speed", "this rate divided by that of the target's proposals", lambda of: of["speed"].against_target(of["proposal"])),
    ("acceptance", "mean simulated acceptance of blocks"),
    ("accepts_per_second", "accepted proposals for each second", lambda of: of["speed"].bought(of, "acceptance")),
    _MOVED,
    ("moves_per_second", "such proposals for each second", lambda of: of["speed"].bought(of, "moved")),
    _BLOCKS, *_COUNTS,
))


def _of(column: str) -> Any:
    """The mean of a column over the blocks of a row, by another proposal."""
    return lambda of, blocks: blocks.row(of.among).mean(column)


def _per_second(column: str) -> Any:
    """The same for each second, if proposals were timed."""
    return lambda of, blocks: of["speed"].bought(blocks.row(of.among), column) if of["speed"].num_timed and of.n else ABSENT


STRATA = Table("strata", (  # section 5.2
    ("difficulty", "`easy` (acceptance of the draft's block above 0.7), `middle`, or `hard` (below 0.1)"),
    ("temperature", "the draft's lowest temperature"),
    ("weights", "as in `aggregate`: `joint` if they were measured"),
    ("share", "share of blocks", lambda of: of["every"].mean(of.among)),
    Each(lambda of: of["proposers"], (
        ("{proposal}_acceptance", "mean simulated acceptance of these blocks", _of("acceptance")),
        ("{proposal}_acceptance_per_second", "accepted proposals for each second on these blocks", _per_second("acceptance")),
        ("{proposal}_moved", "share of proposals on these blocks that are accepted and differ from the state", _of("moved")),
        ("{proposal}_moved_per_second", "such proposals for each second on these blocks", _per_second("moved")),
    )),
    _BLOCKS, *_COUNTS,
))
BLOCKS = Table("blocks", (
    *_PROPOSAL,
    ("number", "number of the block in its answer, from 0"),
    ("acceptance", "its simulated acceptance"),
    ("moved", "share of its proposals that are accepted and differ from the state"),
))
VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_blocks", "measured blocks", lambda of: sum(record["blocks"] for record in measured(of["records"]))),
    ("num_predicted_tokens", "predicted tokens: all of a block but the known one",
     lambda of: sum(record["blocks"] * (record["block_size"] - 1) for record in measured(of["records"]))),
    ("acceptance_floor", "mean simulated acceptance of useless proposals, with so many samples",
     lambda of: acceptance_floor(of["num_samples"])),
))
SHARPEST = Table("values", (  # of the blocks of the draft at its lowest temperature, where an answer was measured
    ("token_acceptance", "mean of 1 - total variation distance over tokens, at the draft's lowest temperature",
     lambda of: 1.0 - float(of["of_tokens"].values["tvd"].mean())),
    ("block_acceptance", "mean simulated acceptance of its blocks", lambda of: float(of.values["acceptance"].mean())),
    ("block_acceptance_median", "median simulated acceptance of its blocks", lambda of: _median(of).value),
    ("block_moved", "mean share of its proposals that are accepted and differ from the state",
     lambda of: float(of.values["moved"].mean())),
    ("kl", "mean KL(p^alpha || q) of a token at this temperature, nats",
     lambda of: float(of["of_tokens"].values["kl"].mean())),
))
ALL = (VALUES, SHARPEST, AGGREGATE, BASELINE, PERCENTILES_OF_BLOCKS, SHARES, POSITIONS, TOKENS, CONVERGENCE, WEIGHTS,
       THROUGHPUT, STRATA, BLOCKS)


def summary_of(records: list[dict], num_samples: int, position_edges: Sequence[int], timed_rows: int) -> Summary:
    """All tables, and as data a row for each block.

    Args:
        timed_rows: number of chains that propose at once in the reported timings; timings of other batches are left out.
    """
    values, kept = VALUES.row({"records": records, "num_samples": num_samples}), measured(records)
    if not kept:
        return Summary(values, {}, {})
    speed, first = Speed(kept, timed_rows), kept[0]["proposals"]
    every = [blocks_of(kept, name, weights).row(speed=speed)
             for name, entry in first.items() for weights in ("reference", "joint") if weights in entry]
    laws = {law: tokens_of(kept, law) for law in ("p", *(name for name in first if name != "target"))}
    sharpest = [blocks for blocks in every if blocks["proposal"] == "draft"][-1]  # the lowest temperature, joint if measured
    acceptance, edges = sharpest.values["acceptance"], (0, *position_edges, None)
    strata = {"easy": acceptance > EASY, "middle": (acceptance <= EASY) & (acceptance >= HARD), "hard": acceptance < HARD}
    proposers = {blocks["proposal"]: blocks for blocks in (sharpest, *every) if blocks is sharpest or not blocks["of_tokens"]}
    positions = [Observations({column: values[here] for column, values in blocks.values.items()},
                              **blocks.names | {"position": name, "from": low, "to_below": high})
                 for blocks in every for name, low, high in zip(("early", "mid", "late"), edges, edges[1:], strict=False)
                 if (here := (blocks.values["number"] >= low) & (blocks.values["number"] < (high or np.inf))).any()]
    both = [(one, other) for one, other in pairwise(every) if one["name"] == other["name"]]
    tables = {
        "aggregate": AGGREGATE.rows(every),
        "baseline": BASELINE.rows([laws["p"]]),
        "percentiles": PERCENTILES_OF_BLOCKS.rows(every),
        "thresholds": SHARES.rows(every),
        "positions": POSITIONS.rows(positions),
        "tokens": TOKENS.rows(laws.values()),
        "convergence": CONVERGENCE.rows(every),
        "weights": WEIGHTS.rows(Observations(
            {column: values - reference.values[column] if column in _DIFFERENCES else values
             for column, values in joint.values.items()}, temperature=joint["temperature"]) for reference, joint in both),
        "throughput": THROUGHPUT.rows(every) if speed.num_timed else [],
        "strata": STRATA.rows(sharpest.row(here, difficulty=name, proposers=proposers, every=sharpest)
                              for name, here in strata.items()),
    }
    data = {"blocks": BLOCKS.rows({**blocks.names, **dict(zip(_SHOWN, block, strict=True))} for blocks in every
                                  for block in zip(*(blocks.values[name].tolist() for name in _SHOWN), strict=True))}
    return Summary({**values, **SHARPEST.row(sharpest)}, {name: rows for name, rows in tables.items() if rows}, data)
