"""One of N independent draws: the baseline for power sampling at the same cost."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_mcmc.components import Need, Settings, identity, name_of, register
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import AnswerGrader
from dflash_mcmc.ops import LARGEST, SMALLEST, UNENDED, Chain, Draw, Steps, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import AtTemperature, Truncated
from dflash_mcmc.statistics.votes import AdaptiveVote
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory


@register("sampler", "best_of_n")
@dataclass(slots=True, kw_only=True)
class BestOfN(Truncated, AtTemperature):
    """One of N draws: the likeliest, the likeliest per token, or one resampled by the weights of p^alpha.

    Law: candidates y_1 .. y_N are independent draws, token by token, from q = softmax(logits / temperature), truncated by
    top-k and top-p. p is the (blended) target. `log_p` keeps the candidate with the largest log p, and `mean_log_p` the one
    with the largest mean log p over its tokens. Both keep the first of equal candidates. `power` keeps y_i with probability
    proportional to exp(alpha * log p(y_i) - log q(y_i)). This is sampling importance resampling (Rubin 1987). Its law tends
    to p^alpha on the support of q as N grows.

    `vote` draws one candidate after another, until the leading answer has the posterior of `AdaptiveVote`, or N are drawn. It
    keeps the first candidate with the most frequent answer (of equals, the one that came first), or the first candidate if
    none has an answer. Each candidate has the law q; their number depends on their answers. Its answer estimates the mode of
    the answers under q, as a majority vote over N does with more draws (Aggarwal et al. 2023, arXiv 2305.11860).

    A potential (`potential=examples`) is a factor of the weights of `power`. `log_p` and `mean_log_p` then keep the likeliest
    of the candidates with the largest potential, and with `potential.stop_at_max=true` the first with the largest possible.
    """

    num_candidates: int = identity(8, "number of draws of a chain, with select=vote the largest; one of them is kept", ge=1,
                                   le=65_536)
    select: Literal["log_p", "mean_log_p", "power", "vote"] = identity(
        "power", "the draw that is kept: log_p = largest log p; mean_log_p = largest log p per token; power = drawn with "
        "weights exp(alpha * log p - log q); vote = one with the most frequent answer, where drawing stops at confidence")
    confidence: float = identity(0.95, "posterior probability of the leading answer that ends select=vote", gt=0.5, lt=1)
    alpha: float = identity(4.0, "power of the target p^alpha of select=power; temperature is 1/alpha unless given",
                            ge=SMALLEST, le=LARGEST)

    takes_potential = True
    needs = (Need("potential.is_null", given="select=vote"),)

    def canonical(self, config: Settings) -> dict[str, object]:
        values = super().canonical(config)
        if self.num_candidates == 1:
            values["select"] = None
        if self.num_candidates == 1 or self.select != "power":
            values["alpha"] = None
        if self.num_candidates == 1 or self.select != "vote":
            values["confidence"] = 0.95
        return values

    def check(self, config: Settings) -> None:
        """Raises ConfigError if answers are to be compared and the grader finds none in a text."""
        if self.select == "vote" and not isinstance(config.grader, AnswerGrader):
            raise ConfigError("sampler.select", "vote", f"log_p, mean_log_p or power with grader={name_of(config.grader)}, "
                              "which finds no answer that can be compared")

    def width(self) -> int:
        """All candidates are drawn at once, except in a vote."""
        return 1 if self.select == "vote" else self.num_candidates

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose candidates have `length` tokens; of a vote the largest."""
        return ExpectedCost(self.num_candidates * length, num_draws=self.num_candidates)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """Draws the candidates, each of at most `horizon` tokens, and keeps one. The trace has one entry per candidate.

        A vote compares whole texts here, and what a grader finds in them where `comparing` is called.
        """
        return (yield from self.comparing(prompt, horizon, key, lambda tokens: tuple(tokens.tolist())))

    def comparing(self, prompt: np.ndarray, horizon: int, key: Key, answer_of: Callable[[np.ndarray], Hashable]) -> Chain:
        draws = [Draw(Trajectory.start(prompt), horizon, self.law(), key.fold_in("candidate", index, "token"))
                 for index in range(self.num_candidates)]
        if self.select == "vote":
            candidates, kept = yield from self._voted(draws, answer_of)
        else:
            candidates = yield Together(tuple(draws))
            kept = self.choose(candidates, key.fold_in("select"))
        trace = [{"candidate": index, "length": path.length, "log_p": float(path.log_p.sum()),
                  "log_q": float(path.log_q.sum()), "decision": "keep" if index == kept else "leave"}
                 for index, path in enumerate(candidates)]
        return ChainResult(candidates[kept], trace=tuple(trace))

    def _voted(self, draws: Sequence[Draw],
               answer_of: Callable[[np.ndarray], Hashable]) -> Steps[tuple[list[Trajectory], int]]:
        """The candidates until the vote ends, and the place of the one that is kept. Under `dataset.must_end` one that does
        not end has no vote."""
        rule, candidates, answers = AdaptiveVote(confidence=self.confidence), list[Trajectory](), list[Hashable]()
        for draw in draws:
            candidates.append((yield draw))
            answers.append(answer_of(candidates[-1].tokens) if _may_be_kept(candidates[-1]) else None)
            votes = Counter(answer for answer in answers if answer is not None).most_common(2)
            leader, second = ([number for _, number in votes] + [0, 0])[:2]
            if rule.ends(leader, second):
                break
        return candidates, answers.index(votes[0][0]) if votes else next(
            (index for index, path in enumerate(candidates) if _may_be_kept(path)), 0)

    def choose(self, candidates: Sequence[Trajectory], key: Key) -> int:
        """Index of the candidate that is kept."""
        weights = [self.log_weight(path) for path in candidates]
        if self.select != "power":
            most = max(path.evidence for path in candidates)
            weights = [weight if path.evidence == most else -np.inf
                       for path, weight in zip(candidates, weights, strict=True)]
            return int(np.argmax(weights))
        kept, total = 0, weights[0]
        for index, weight in enumerate(weights[1:], start=1):  # a weighted reservoir of one (Chao 1982)
            total = np.logaddexp(total, weight)
            if key.fold_in(index).log_uniform() < weight - total:
                kept = index
        return kept

    def log_weight(self, path: Trajectory) -> float:
        """Log-weight of a candidate in the choice, in nats."""
        if self.select == "power":
            return path.weight(self.alpha)
        return float(path.log_p.sum() if self.select == "log_p" else path.log_p.mean())


def _may_be_kept(path: Trajectory) -> bool:
    """Whether a candidate has ended, or need not."""
    return bool(path.log_p.sum() > -UNENDED / 2)
