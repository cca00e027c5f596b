"""Distances of target and draft, draws of blocks, their importance weights, and chains that propose them.

`Timing` measures the speed of the two proposals on the engine: a block of the draft, and as many tokens of the target.

Weights are of two kinds, `reference` and `joint`. A block x of n tokens drawn from q has log w = alpha · sum log p(x_k) -
sum log q(x_k). The kinds differ in the tokens that p(x_k) is conditioned on. `reference` is the kind in the probe's source
document: p(x_k) given the tokens of the measured answer before position k. `joint` is p(x_k) given the block's own tokens
before position k. Only then is w the ratio of two distributions over blocks.

Independence Metropolis-Hastings proposes draws from q. In state x it accepts y with probability min(1, w(y) / w(x)) (Hastings
1970; for the acceptance in equilibrium Liu 1996, "Metropolized independent sampling").

p is the target's distribution of a token, p_alpha = softmax(alpha · logits) the sharpened one, and q = softmax(draft
logits / T) the draft's. Rows of logits are float32 (n, vocabulary), with -inf for ids without a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing.sequences import PREFIX, NotNumbers, Reading, Tree, checked, positions_at_once, predictors
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.probe.columns import ABSENT
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer


class Proposed(NamedTuple):
    """Proposed blocks with the log-probabilities of their tokens in nats, each (blocks, samples, n)."""

    tokens: np.ndarray
    """int64."""
    log_p: np.ndarray
    log_q: np.ndarray


def joint_log_p(model: LanguageModel, reading: Reading, anchor: int, tokens: np.ndarray) -> np.ndarray:
    """log p, float64 (samples, n), of continuations after position `anchor`, int64 (samples, n), given their own tokens.

    Raises NotNumbers.
    """
    hidden, which = predictors(model, reading.kept_cache(), reading.hidden[0, anchor], anchor + 1, tokens)
    log_p, step = np.empty(tokens.shape), positions_at_once(model.vocab_size)
    for start in range(0, len(hidden), step):
        mine = (which >= start) & (which < start + step)
        log_p[mine] = _of_rows(checked(model.logits(hidden[start : start + step])), which[mine] - start, tokens[mine])
    return log_p


def _of_rows(logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log softmax in nats, float64 (n,), of `tokens` in the given `rows` of logits, both int64 (n,)."""
    row, token = (torch.from_numpy(numbers).to(logits.device) for numbers in (rows, tokens))
    return (logits[row, token].double() - torch.logsumexp(logits.double(), dim=-1)[row]).cpu().numpy()


def draw_from_target(model: LanguageModel, reading: Reading, anchor: int, temperature: float,
                     uniforms: torch.Tensor) -> Proposed:
    """Continuations drawn token by token from the target at a temperature. Raises NotNumbers.

    Args:
        uniforms: float64 (samples, n).
    """
    samples, n = uniforms.shape
    tree, drawn = Tree(model, reading.kept_cache(), anchor + 1), []
    hidden, which = reading.hidden[0, anchor][None], np.zeros(samples, dtype=np.int64)
    parents = np.full(samples, PREFIX)
    step = positions_at_once(model.vocab_size)
    for position in range(n):
        states = hidden[torch.from_numpy(which).to(hidden.device)]
        pieces = [_draw(checked(model.logits(piece)), temperature, uniform)
                  for piece, uniform in zip(states.split(step), uniforms[:, position].split(step), strict=True)]
        drawn.append([torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)])
        if position + 1 < n:
            tokens = drawn[-1][0]
            _, first, after = np.unique(which * model.vocab_size + tokens, return_index=True, return_inverse=True)
            before = len(tree)
            hidden, which = tree.read(parents[first].tolist(), tokens[first].tolist()), after
            parents = before + which
    return Proposed(*(np.stack(column, axis=1)[None] for column in zip(*drawn, strict=True)))


def _draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The drawn token of each row, its log p and its log q."""
    target, weights = laws.weigh(logits), laws.weigh(logits / temperature)
    tokens, _ = laws.draw(weights, uniforms)
    return tokens, target.log_probability(tokens), weights.log_probability(tokens)


def ended(proposed: Proposed, stop_ids: tuple[int, ...]) -> Proposed:
    """The same blocks, cut after their first stop id. Later tokens get log-probabilities of 0 and do not count."""
    stops = np.isin(proposed.tokens, stop_ids)
    later = (np.cumsum(stops, axis=-1) - stops) > 0
    return Proposed(np.where(later, -1, proposed.tokens), np.where(later, 0.0, proposed.log_p),
                    np.where(later, 0.0, proposed.log_q))


def chains(proposed: Proposed, alpha: float, uniforms: np.ndarray) -> dict[str, np.ndarray]:
    """Results of independence Metropolis-Hastings on each block's samples. Each named result is a float64 (blocks,).

    `acceptance` and `moved` are shares in a simulated chain. `equilibrium` is the acceptance of a chain in equilibrium.
    `log_w` and `log_w_std` are mean and standard deviation over the samples. `effective` is Kong's effective sample size.

    Args:
        uniforms: float64 (blocks, samples - 1).
    """
    log_w = alpha * proposed.log_p.sum(axis=-1) - proposed.log_q.sum(axis=-1)
    simulated = simulate(log_w, uniforms, proposed.tokens)
    return {"acceptance": simulated.acceptance, "moved": simulated.moved,
            "equilibrium": in_equilibrium(log_w), "log_w": log_w.mean(axis=1),
            "log_w_std": log_w.std(axis=1, ddof=1), "effective": effective_samples(log_w)}


class Simulated(NamedTuple):
    """Rates of each row of samples, float64 (rows,)."""

    acceptance: np.ndarray
    """Share of the proposals that were accepted."""
    moved: np.ndarray
    """Share of the proposals that were accepted and differ from the state."""


def simulate(log_weights: np.ndarray, uniforms: np.ndarray, tokens: np.ndarray) -> Simulated:
    """Simulates a chain for each row of samples. It starts at the first sample and proposes the others in order.

    Args:
        log_weights: float64 (rows, samples), nats; samples >= 2.
        uniforms: float64 (rows, samples - 1).
        tokens: int64 (rows, samples, n), the samples themselves.
    """
    rows, samples = log_weights.shape
    log_uniforms, weight, state = np.log(uniforms), log_weights[:, 0], tokens[:, 0]
    accepted, moved = np.zeros(rows), np.zeros(rows)
    for step in range(1, samples):
        proposal = tokens[:, step]
        taken = log_uniforms[:, step - 1] < log_weights[:, step] - weight
        accepted += taken
        moved += taken & (state != proposal).any(axis=1)
        weight, state = np.where(taken, log_weights[:, step], weight), np.where(taken[:, None], proposal, state)
    return Simulated(accepted / (samples - 1), moved / (samples - 1))


def in_equilibrium(log_weights: np.ndarray) -> np.ndarray:
    """The acceptance of a chain in equilibrium, float64 (rows,), estimated from samples of q.

    The expectation of min(1, w(y) / w(x)) over x ~ target and y ~ q equals E[min(w(x), w(y))] / E[w] over x, y ~ q. The
    estimate uses all pairs of samples of a row. It simulates no chain, so it has no simulation noise.
    """
    samples = log_weights.shape[1]
    ordered = np.sort(np.exp(log_weights - log_weights.max(axis=1, keepdims=True)), axis=1)
    # Weights are sorted, so weight number k (from 0) is the minimum in its pairs with the samples - 1 - k later weights.
    pairs = (ordered * np.arange(samples - 1, -1, -1)).sum(axis=1)
    return 2.0 * pairs / ((samples - 1) * ordered.sum(axis=1))


def acceptance_floor(samples: int) -> float:
    """Mean result of `simulate` if the weights are so uneven that a chain only moves to a new maximum.

    The k-th sample is a new maximum with probability 1/k, whatever the weights: (1/2 + ... + 1/samples) / (samples - 1). A
    simulated acceptance of this size therefore means that the chain is stuck.
    """
    return sum(1.0 / k for k in range(2, samples + 1)) / (samples - 1)


def effective_samples(log_weights: np.ndarray) -> np.ndarray:
    """Kong's effective sample size (sum w)² / sum w² of each row, float64 (rows,), from 1 to samples."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    return weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)


def chance_of_moves(rate: float, steps: int, least: int) -> float:
    """Probability of at least `least` moves in `steps` independent steps that each move with probability `rate`."""
    fewer = (math.comb(steps, k) * rate**k * (1.0 - rate) ** (steps - k) for k in range(least))
    return 1.0 - sum(fewer) if least <= steps else 0.0


class Distances(NamedTuple):
    """Distances for each row, float32 (n,)."""

    kl: torch.Tensor
    """KL(p_alpha || q) in nats."""
    total_variation: torch.Tensor
    """Half the sum of |p_alpha - q|. One minus it is the probability that rejection sampling accepts a token drawn from q."""


class DrawnBlocks(NamedTuple):
    """Tokens drawn from q, (n, samples)."""

    tokens: torch.Tensor
    """int64."""
    log_q: torch.Tensor
    """float64, nats."""


def distances(target: torch.Tensor, draft: torch.Tensor, alpha: float, temperature: float) -> Distances:
    """The distances between p_alpha of the target's logits and q of the draft's logits."""
    log_p, log_q = torch.log_softmax(alpha * target, dim=-1), torch.log_softmax(draft / temperature, dim=-1)
    p = log_p.exp()
    # Tokens of probability 0 in both would give 0 · (-inf + inf). If only q is 0, the KL divergence is rightly infinite.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    return Distances(kl.clamp(min=0.0), 0.5 * (p - log_q.exp()).abs().sum(dim=-1))


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> DrawnBlocks:
    """Draws from each row by inverse transform. A token of probability zero is never drawn.

    Args:
        uniforms: float64 (n, samples), inside (0, 1).
    """
    logits = logits / temperature
    weights = (logits - logits.amax(dim=-1, keepdim=True)).double().exp()
    upto = weights.cumsum(dim=-1)
    total = upto[:, -1:]
    # Rounding could move the point to the total. It is kept below, so that the search finds a token of positive weight.
    point = torch.minimum(uniforms * total, total * (1.0 - 2.0**-52))
    tokens = torch.searchsorted(upto, point, right=True)
    return DrawnBlocks(tokens, weights.gather(1, tokens).log() - total.log())


def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log softmax of tokens int64 (n, samples), as float64 of the same shape, in nats."""
    return logits.gather(1, tokens).double() - torch.logsumexp(logits.double(), dim=-1, keepdim=True)


class Timing:
    """Times proposals at the middle anchor of an answer. The time includes drawing and the target's scoring, as in a chain.

    Args:
        options: options of the engine.
        rows: number of chains that propose at once.
        temperature: temperature of both proposals.
        num_proposals: proposals of each chain. The first one is not counted: it also reads prompt and answer.
    """

    def __init__(self, options: Options, model: LanguageModel, drafter: DFlashDrafter, rows: int, temperature: float,
                 num_proposals: int):
        self._options, self._model, self._drafter, self._rows = options, model, drafter, rows
        self._law, self._num_proposals = SamplingParams(temperature=temperature), num_proposals

    def of(self, answer: Answer) -> dict[str, float | int]:
        """Seconds per proposal, `seconds_target` and `seconds_draft`. They are the batch's seconds divided by `timed_rows`.

        Raises NotNumbers.
        """
        return {"seconds_target": self._seconds(answer, "blended", None),
                "seconds_draft": self._seconds(answer, "draft", self._drafter), "timed_rows": self._rows}

    def _seconds(self, answer: Answer, source: str, drafter: DFlashDrafter | None) -> float:
        n = self._drafter.num_drafted
        anchor = len(answer.tokens) // (n + 1) // 2 * (n + 1)
        times: list[list[float]] = []

        def chain(row: int) -> Chain:
            path = Trajectory.start(answer.prompt)
            scored = answer.tokens[: anchor + 1]
            path = path.extended(scored, np.zeros(len(scored)), np.zeros(len(scored)), np.zeros((len(scored), 2)), False)
            own: list[float] = []
            for repeat in range(self._num_proposals):
                drawn = yield Draw(path, anchor + 1 + n, self._law, Key(row).fold_in(repeat), source)
                own.append(time.perf_counter())
            times.append(own)
            return ChainResult(drawn)

        engine = BatchedEngine(self._model, None, self._rows, len(answer.prompt) + anchor + 1 + n, self._options,
                               drafter=drafter)
        ended = list(engine.run((row, chain(row)) for row in range(self._rows)))
        if any(done.result is None for done in ended):
            raise NotNumbers  # the only reason for which the engine gives up a draw
        return (max(own[-1] for own in times) - max(own[0] for own in times)) / ((self._num_proposals - 1) * self._rows)


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
        self.records = [record for record in records if "skipped" not in record]
        sizes = [(record["problem"], record["blocks"], record["block_size"] - 1) for record in self.records]
        self.blocks = Clusters([problem for problem, count, _ in sizes for _ in range(count)])
        self.record = np.repeat(np.arange(len(sizes)), [count for _, count, _ in sizes])
        """The index of each block's record."""
        self.tokens = Clusters([problem for problem, count, n in sizes for _ in range(count * n)])
        self.drafted = self.records[0]["block_size"] - 1 if self.records else 0
        """Proposed tokens per block: all but the anchor."""
        self.number = np.array([number for _, count, _ in sizes for number in range(count)])
        self.temperatures = [name for name in self._names() if name != "target"]
        self.proposals = [ProposalKind(name, weights) for name in self._names() for weights in ("reference", "joint")
                          if weights in self.records[0]["proposals"][name]]

    def _names(self) -> list[str]:
        return list(self.records[0]["proposals"]) if self.records else []

    def of_tokens(self, name: str, column: str) -> np.ndarray:
        """The column `kl` or `tvd` at a draft temperature. The name `p` is for the unsharpened target."""
        return self._joined(lambda record: (record["p"] if name == "p" else record["proposals"][name])[column])

    def of_blocks(self, proposal: ProposalKind, column: str) -> np.ndarray:
        """A column of the simulated chains, one value per block."""
        return self._joined(lambda record: record["proposals"][proposal.name][proposal.weights][column])

    def _joined(self, values: Callable[[dict], list[float]]) -> np.ndarray:
        return np.array([value for record in self.records for value in values(record)])

    def products(self, name: str) -> np.ndarray:
        """The product of the tokens' acceptances 1 - TVD, for each block."""
        of_records = [np.prod(1.0 - np.array(record["proposals"][name]["tvd"]).reshape(record["blocks"], -1), axis=1)
                      for record in self.records]
        return np.concatenate(of_records) if of_records else np.empty(0)


class Speed:
    """Proposals per second, and accepted proposals per second. Intervals come from one joint bootstrap over problems.

    A timed problem counts once, whatever its length. Acceptance is the mean over all blocks, timed or not.

    Args:
        rows: number of chains that proposed at once; timings of other batch sizes are left out.
    """

    def __init__(self, columns: Columns, rows: int):
        timed = [record if rows and record.get("timed_rows") == rows else {} for record in columns.records]
        self._problems, self._record = Clusters([record["problem"] for record in columns.records]), columns.record
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
    """The blocks of a proposal, or those that `here` selects.

    Args:
        label: what the row is named by, besides the proposal.
    """

    def __init__(self, columns: Columns, proposal: ProposalKind, label: Any = "", here: np.ndarray | None = None):
        self.columns, self.proposal, self.label = columns, proposal, label
        self.here = np.ones(columns.blocks.size, bool) if here is None else here
        self.clusters = columns.blocks if here is None else columns.blocks.among(here)

    @property
    def n(self) -> int:
        """Number of the blocks."""
        return int(self.here.sum())

    @property
    def num_tokens(self) -> object:
        """Number of tokens with distances. The target has no distance to itself."""
        return ABSENT if self.proposal.is_target else self.n * self.columns.drafted

    def values(self, column: str) -> np.ndarray:
        """A value of each block."""
        return self.columns.of_blocks(self.proposal, column)[self.here]

    def mean(self, column: str) -> IntervalEstimate:
        """Mean over the blocks."""
        return self.clusters.mean(self.values(column))

    def quantiles(self, percents: Sequence[float]) -> dict[str, IntervalEstimate]:
        """Percentiles of the simulated acceptance. Like all quantiles here they are observations."""
        estimates = self.clusters.quantiles(self.values("acceptance"), [percent / 100 for percent in percents])
        return {f"{percent}": estimate for percent, estimate in zip(percents, estimates, strict=True)}

    @cached_property
    def median(self) -> IntervalEstimate:
        """Median of the simulated acceptance."""
        return self.clusters.quantiles(self.values("acceptance"), [0.5])[0]

    def of_tokens(self, column: str) -> np.ndarray:
        """`kl` or `tvd` of each token."""
        return self.columns.of_tokens(self.proposal.name, column)

    def token_mean(self, column: str, of: Any = lambda values: values) -> object:
        """Mean over all tokens; absent for the target."""
        return ABSENT if self.proposal.is_target else self.columns.tokens.mean(of(self.of_tokens(column)))

    @property
    def kl(self) -> object:
        """Mean KL of a token of these blocks; absent for the target."""
        if self.proposal.is_target:
            return ABSENT
        return self.clusters.mean(self.of_tokens("kl").reshape(self.columns.blocks.size, -1)[self.here].mean(axis=1))

    def moves_at_median(self, steps: int, least: int) -> IntervalEstimate:
        """The document's probability of moves, from the median acceptance.

        The probability increases with the rate, so it maps the ends of the rate's interval to the ends of its own.
        """
        return self.median.mapped(partial(chance_of_moves, steps=steps, least=least))

    def moves_of_blocks(self, steps: int, least: int) -> IntervalEstimate:
        """The mean of the blocks' probabilities. Blocks differ, and not every accepted proposal is a move."""
        return self.clusters.mean(np.array([chance_of_moves(rate, steps, least) for rate in self.values("moved")]))
