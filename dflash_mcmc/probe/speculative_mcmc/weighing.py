"""Importance weights of proposed blocks, of two kinds: `reference` and `joint`.

A block x of n tokens drawn from q has log w = alpha · sum log p(x_k) - sum log q(x_k). The kinds differ in the tokens that
p(x_k) is conditioned on. `reference` is the kind in the probe's source document: p(x_k) given the tokens of the measured
answer before position k. `joint` is p(x_k) given the block's own tokens before position k. Only then is w the ratio of two
distributions over blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing.sequences import PREFIX, Reading, Tree, checked, positions_at_once, predictors
from dflash_mcmc.probe.speculative_mcmc import independence


class Proposed(NamedTuple):
    """Proposed blocks with the log-probabilities of their tokens in nats, each (blocks, samples, n)."""

    tokens: np.ndarray
    """int64."""
    log_p: np.ndarray
    log_q: np.ndarray


def joint_log_p(model: LanguageModel, reading: Reading, anchor: int, tokens: np.ndarray, share: bool = True) -> np.ndarray:
    """log p, float64 (samples, n), of continuations after position `anchor`, int64 (samples, n), given their own tokens.

    Raises NotNumbers.

    Args:
        share: whether common prefixes of continuations are evaluated only once.
    """
    hidden, which = predictors(model, reading.kept_cache(), reading.hidden[0, anchor], anchor + 1, tokens, share)
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
                     uniforms: torch.Tensor, share: bool = True) -> Proposed:
    """Continuations drawn token by token from the target at a temperature. Raises NotNumbers.

    Args:
        uniforms: float64 (samples, n).
        share: whether common prefixes of continuations are evaluated only once.
    """
    samples, n = uniforms.shape
    tree, drawn = Tree(model, reading.kept_cache(), anchor + 1), []
    hidden, which = reading.hidden[0, anchor][None], np.zeros(samples, dtype=np.int64)
    parents = np.full(samples, PREFIX)
    step = positions_at_once(model.vocab_size)
    for place in range(n):
        states = hidden[torch.from_numpy(which).to(hidden.device)]
        parts = [_draw(checked(model.logits(part)), temperature, uniform)
                 for part, uniform in zip(states.split(step), uniforms[:, place].split(step), strict=True)]
        drawn.append([torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)])
        if place + 1 < n:
            tokens = drawn[-1][0]
            apart = which * model.vocab_size + tokens if share else np.arange(samples)
            _, first, after = np.unique(apart, return_index=True, return_inverse=True)
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
    simulated = independence.simulate(log_w, uniforms, proposed.tokens)
    return {"acceptance": simulated.acceptance, "moved": simulated.moved,
            "equilibrium": independence.in_equilibrium(log_w), "log_w": log_w.mean(axis=1),
            "log_w_std": log_w.std(axis=1, ddof=1), "effective": independence.effective_samples(log_w)}
