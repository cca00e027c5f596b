"""Distances of target and draft, draws of blocks, their importance weights, and chains that propose them.

Weights are of two kinds. A block x of n tokens drawn from q has log w = alpha · sum log p(x_k) - sum log q(x_k). In the kind
`reference` of the probe's source document p(x_k) is given the tokens of the measured answer before position k. In the kind
`joint` it is given the block's own tokens before k. Only then is w the ratio of two distributions over blocks.

Independence Metropolis-Hastings proposes draws from q. In state x it accepts y with probability min(1, w(y) / w(x)) (Hastings
1970; for the acceptance in equilibrium Liu 1996, "Metropolized independent sampling").

p is the target's distribution of a token, p_alpha = softmax(alpha · logits) the sharpened one, and q = softmax(draft
logits / T) the draft's. Rows of logits are float32 (n, vocabulary), with -inf for ids without a token.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.forcing.sequences import PREFIX, NotNumbers, Reading, Tree, checked, positions_at_once, predictors
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory


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
        logits = checked(model.logits(hidden[start : start + step]))
        row, token = (torch.from_numpy(numbers[mine]).to(logits.device) for numbers in (which - start, tokens))
        log_p[mine] = (logits[row, token].double() - torch.logsumexp(logits.double(), dim=-1)[row]).cpu().numpy()
    return log_p


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
        pieces = []
        for piece, uniform in zip(states.split(step), uniforms[:, position].split(step), strict=True):
            logits = checked(model.logits(piece))
            target, weights = laws.weigh(logits), laws.weigh(logits / temperature)
            chosen, _ = laws.draw(weights, uniform)
            pieces.append((chosen, target.log_probability(chosen), weights.log_probability(chosen)))
        drawn.append([torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)])
        if position + 1 < n:
            tokens = drawn[-1][0]
            _, first, after = np.unique(which * model.vocab_size + tokens, return_index=True, return_inverse=True)
            before = len(tree)
            hidden, which = tree.read(parents[first].tolist(), tokens[first].tolist()), after
            parents = before + which
    return Proposed(*(np.stack(column, axis=1)[None] for column in zip(*drawn, strict=True)))


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
    acceptance, moved = simulate(log_w, uniforms, proposed.tokens)
    return {"acceptance": acceptance, "moved": moved, "equilibrium": in_equilibrium(log_w), "log_w": log_w.mean(axis=1),
            "log_w_std": log_w.std(axis=1, ddof=1), "effective": effective_samples(log_w)}


def simulate(log_weights: np.ndarray, uniforms: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Simulates a chain for each row of samples. It starts at the first sample and proposes the others in order.

    Args:
        log_weights: float64 (rows, samples), nats; samples >= 2. uniforms: float64 (rows, samples - 1).
        tokens: int64 (rows, samples, n), the samples themselves.

    Returns:
        The shares of the proposals that were accepted, and that were accepted and differ from the state, float64 (rows,).
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
    return accepted / (samples - 1), moved / (samples - 1)


def in_equilibrium(log_weights: np.ndarray) -> np.ndarray:
    """The acceptance of a chain in equilibrium, float64 (rows,), estimated from all pairs of a row's samples of q.

    The expectation of min(1, w(y) / w(x)) over x ~ target and y ~ q equals E[min(w(x), w(y))] / E[w] over x, y ~ q.
    """
    samples = log_weights.shape[1]
    ordered = np.sort(np.exp(log_weights - log_weights.max(axis=1, keepdims=True)), axis=1)
    # Weights are sorted, so weight number k (from 0) is the minimum in its pairs with the samples - 1 - k later weights.
    pairs = (ordered * np.arange(samples - 1, -1, -1)).sum(axis=1)
    return 2.0 * pairs / ((samples - 1) * ordered.sum(axis=1))


def effective_samples(log_weights: np.ndarray) -> np.ndarray:
    """Kong's effective sample size (sum w)² / sum w² of each row, float64 (rows,), from 1 to samples."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    return weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)


def distances(target: torch.Tensor, draft: torch.Tensor, alpha: float,
              temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p_alpha || q) in nats and the total variation, each float32 (n,), for logits of target and draft.

    The total variation is half the sum of |p_alpha - q|. One minus it is the probability that rejection sampling accepts a
    token drawn from q.
    """
    log_p, log_q = torch.log_softmax(alpha * target, dim=-1), torch.log_softmax(draft / temperature, dim=-1)
    p = log_p.exp()
    # Tokens of probability 0 in both would give 0 · (-inf + inf). If only q is 0, the KL divergence is rightly infinite.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    return kl.clamp(min=0.0), 0.5 * (p - log_q.exp()).abs().sum(dim=-1)


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from each row by inverse transform, int64 (n, samples), and their log q in nats, float64.

    A token of probability zero is never drawn.

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
    return tokens, weights.gather(1, tokens).log() - total.log()


def seconds_of(options: Options, model: LanguageModel, drafter: DFlashDrafter, answer: Answer, source: str,
               law: SamplingParams, rows: int, num_proposals: int) -> float:
    """Seconds per proposal at the middle anchor of an answer, with drawing and the target's scoring, as in a chain.

    They are the batch's seconds divided by the number of chains. Raises NotNumbers.

    Args:
        options: options of the engine.
        source: `blended` for proposals of the target, `draft` for those of the draft.
        law: of both proposals.
        rows: number of chains that propose at once.
        num_proposals: proposals of each chain. The first one is not counted: it also reads prompt and answer.
    """
    n = drafter.num_drafted
    anchor = len(answer.tokens) // (n + 1) // 2 * (n + 1)
    times: list[list[float]] = []

    def chain(row: int) -> Chain:
        scored = answer.tokens[: anchor + 1]
        path = Trajectory.start(answer.prompt).extended(scored, np.zeros(len(scored)), np.zeros(len(scored)),
                                                        np.zeros((len(scored), 2)), False)
        own: list[float] = []
        for repeat in range(num_proposals):
            drawn = yield Draw(path, anchor + 1 + n, law, Key(row).fold_in(repeat), source)
            own.append(time.perf_counter())
        times.append(own)
        return ChainResult(drawn)

    engine = BatchedEngine(model, None, rows, len(answer.prompt) + anchor + 1 + n, options,
                           drafter=drafter if source == "draft" else None)
    if any(done.result is None for done in list(engine.run((row, chain(row)) for row in range(rows)))):
        raise NotNumbers  # the only reason for which the engine gives up a draw
    return (max(own[-1] for own in times) - max(own[0] for own in times)) / ((num_proposals - 1) * rows)
