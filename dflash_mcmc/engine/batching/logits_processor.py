"""Applies `SamplingParams` to rows of logits and draws tokens by inverse transform.

The weights exp(logit - max) are computed once for the whole vocabulary, in float32. They are summed over blocks of token
ids. Cumulative sums are in float64, first over the blocks and then inside the one block that contains a token.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.ops import LawFunction, SamplingParams, counted_from

_BLOCK = 512
"""Token ids whose weights are summed together."""
_CACHED = 2**18
"""Weights that a CPU computes at once. They stay in its cache (notebook, "Weights in the cache")."""
_ORDERED = 16
"""Rows whose tokens are ordered at once."""
_LEAST_LOG, _LEAST = -87.0, 2.0**-125
"""A weight that is not above `_LEAST` of the largest one is zero. exp(`_LEAST_LOG`) is below it, and a normal float32.

Subnormal exponentials take 80 times as long on a CPU (notebook), and at temperature 0.25 a third of a vocabulary has them. No
uniform is small enough to draw such a token, and no sum that includes the largest weight changes.
"""


class Weights(NamedTuple):
    """Unnormalised probabilities of rows of logits.

    Attributes:
        logits: float32 (rows, vocabulary).
        maximum: float32 (rows, 1), the largest logit.
        values: float32 (rows, blocks, block length), exp(logit - maximum), padded with zeros. Values that no sum with the
            largest one can hold are zero.
        upto: float64 (rows, blocks), sums of `values` up to the end of each block.
    """

    logits: torch.Tensor
    maximum: torch.Tensor
    values: torch.Tensor
    upto: torch.Tensor

    def log_probability(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities in nats, float64 (rows,), of one token per row, int64 (rows,)."""
        logits = self.logits.gather(1, tokens[:, None])
        return ((logits - self.maximum).double() - self.upto[:, -1:].log())[:, 0]


class History(NamedTuple):
    """The tokens that a law reads. A field may be None where it reads none.

    Attributes:
        seen: bool (rows, vocabulary), the tokens in the prompt or generation, for a repetition penalty.
        counts: float32 (rows, vocabulary), how often each token is in the generation, for frequency and presence penalty.
        tokens: int64 (rows, length), prompt and generation, for a function.
        lengths: int64 (rows,), how many of `tokens` are before the token; 0 for a row that draws nothing.
    """

    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def of_rows(self, rows: torch.Tensor) -> "History":
        """The history of some rows, int64 (n,)."""
        return History(*(None if values is None else values[rows] for values in self))


def counts_of(tokens: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """How often each token of the vocabulary is in `tokens`, int64 (n,), with the shape (vocabulary,) and type of `like`."""
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(like.device)
    return torch.zeros_like(like).index_add_(0, ids, torch.ones_like(ids, dtype=like.dtype))


def history_of(every: Sequence[SamplingParams], before: Sequence[tuple[Sequence[int] | np.ndarray, int]],
               like: torch.Tensor) -> History:
    """What the penalties of these laws read, of rows with the shape and device of `like`, (rows, vocabulary).

    Args:
        before: the tokens before each row's next one, and how many of them are the prompt.
    """
    seen = counts = None
    if any(params.repetition_penalty != 1.0 for params in every):
        seen = torch.zeros_like(like, dtype=torch.bool)
        for row, (tokens, _) in zip(seen, before, strict=True):
            row[torch.as_tensor(tokens, device=like.device)] = True
    if any(params.counts_tokens for params in every):
        counts = torch.stack([counts_of(np.asarray(tokens[counted_from(every, start) :]), like[0])
                              for tokens, start in before])
    return History(seen, counts)


def history_along(every: Sequence[SamplingParams], sequence: np.ndarray, origin: int, start: int,
                  like: torch.Tensor) -> History:
    """What these laws read before each of the places from `start` on of a sequence, int64 (n,).

    Args:
        origin: number of tokens of the sequence's prompt.
        like: see `history_of`; it has a row for each place.
    """
    history = history_of(every, [(sequence[: start + row], origin) for row in range(len(like))], like)
    if not any(params.function for params in every):
        return history
    tokens, lengths = torch.from_numpy(sequence).to(like.device), torch.arange(start, start + len(like), device=like.device)
    return history._replace(tokens=tokens.expand(len(like), -1), lengths=lengths)


NO_HISTORY = History()
"""For laws that read no tokens."""


def weigh(logits: torch.Tensor) -> Weights:
    """Weights of float32 logits (rows, vocabulary). Each row must have a finite logit."""
    at_once = max(_CACHED // logits.shape[-1], 1)
    if logits.device.type == "cpu" and len(logits) > at_once:
        parts = zip(*(weigh(rows)[1:] for rows in logits.split(at_once)), strict=True)
        return Weights(logits, *map(torch.cat, parts))
    maximum = logits.amax(dim=-1, keepdim=True)
    values = (logits - maximum).clamp_(min=_LEAST_LOG).exp_()
    return _summed(logits, maximum, torch.threshold_(values, _LEAST, 0.0))


def of_values(values: torch.Tensor) -> Weights:
    """Weights from unnormalised probabilities (rows, vocabulary) >= 0. Each row must have a positive one."""
    return _summed(values.log(), torch.zeros_like(values[:, :1]), values)


def _summed(logits: torch.Tensor, maximum: torch.Tensor, values: torch.Tensor) -> Weights:
    vocabulary = logits.shape[-1]
    block = min(_BLOCK, vocabulary)
    if vocabulary % block:
        values = torch.nn.functional.pad(values, (0, block - vocabulary % block))
    values = values.view(len(logits), -1, block)
    return Weights(logits, maximum, values, values.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1))


def process(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    """Processed logits, up to a constant for each row.

    Args:
        logits: float32 (rows, vocabulary); -inf where a token can never be drawn.
        params: sampling parameters. Temperature 0 gives a point mass on the most likely token. The smallest id wins a tie.
        history: the earlier tokens of each row, as far as the parameters need them.

    Returns:
        float32 (rows, vocabulary), with -inf outside the support. If they are too large for float32 in a row, its largest
        value is not finite, and the weights and log-probabilities made of them are not numbers.

    Raises UserError if the function of `params` fails or returns no law.
    """
    if params.function is not None:
        return _of_function(params.function, logits, history)
    if params.has_penalty:
        logits = _penalised(logits, params, history)
    if params.temperature == 0.0:
        token, log_q = _most_likely(logits)
        return torch.full_like(logits, -torch.inf).scatter_(-1, token, log_q)
    if params.temperature != 1.0 and not params.temperature_last:
        logits = logits / params.temperature
    if params.top_n_sigma:
        logits = logits.masked_fill(_deviation(logits) > params.top_n_sigma, -torch.inf)
    if params.top_k and params.top_k < logits.shape[-1]:
        logits = _without(logits, lambda rows: _rank(rows) >= params.top_k)
    if params.typical_p < 1.0:
        logits = _without(logits, lambda rows: _atypical(rows, params.typical_p))
    if params.top_p < 1.0:
        logits = _without(logits, lambda rows: _beyond(*torch.sort(rows, dim=-1, descending=True, stable=True), params.top_p))
    if params.min_p > 0.0:
        log_p = torch.log_softmax(logits, dim=-1)
        floor = log_p.amax(dim=-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(log_p < floor, -torch.inf)
    return logits / params.temperature if params.temperature != 1.0 and params.temperature_last else logits


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, int64 (rows, 1), and log q of temperature 0: 0, and no number where a penalty overflows."""
    most, token = logits.max(dim=-1, keepdim=True)
    return token, most - most


def draw_certain(logits: torch.Tensor, params: SamplingParams, history: History) -> tuple[torch.Tensor, ...]:
    """(tokens, intervals, log q) of temperature 0, as `draw` has them, without weights of the whole vocabulary."""
    token, log_q = _most_likely(_penalised(logits, params, history) if params.has_penalty else logits)
    return token[:, 0], torch.cat([log_q, log_q + 1.0], dim=1).double(), log_q[:, 0].double()


def _of_function(function: LawFunction, logits: torch.Tensor, history: History) -> torch.Tensor:
    """The log weights that a function gives, one row after another. It reads tokens on the host, so no graph can hold it."""
    if history.tokens is None or history.lengths is None:
        raise ValueError("a function needs the tokens before each row")
    rows = []
    for row, text, place in zip(logits, history.tokens.cpu().numpy(), history.lengths.tolist(), strict=True):
        if not place:
            rows.append(row)
            continue
        try:
            returned = function(row.clone(), text[:place].copy())
            weights = torch.as_tensor([] if returned is None else returned, dtype=row.dtype, device=row.device)
        except Exception as error:  # it is another person's function
            raise UserError(f"sampler.function: fails at token {place}: {type(error).__name__}: {reason_of(error)}") from error
        if weights.shape != row.shape or not weights.isfinite().any() or not (weights < torch.inf).all():
            raise UserError(f"sampler.function: returns {tuple(weights.shape)} at token {place}, or nothing that can be "
                            f"drawn; allowed: {len(row)} log weights, finite or -inf")
        rows.append(weights)
    return torch.stack(rows)


def _without(logits: torch.Tensor, left_out: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The logits without what `left_out` names of each row. Orders take several times the memory of their logits."""
    return logits.masked_fill(torch.cat([left_out(rows) for rows in logits.split(_ORDERED)]), -torch.inf)


def _beyond(values: torch.Tensor, order: torch.Tensor, share: float) -> torch.Tensor:
    """The tokens beyond the smallest set with at least this mass, of logits in the order in which tokens are taken."""
    mass = torch.softmax(values, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    beyond = torch.zeros_like(mass, dtype=torch.bool)
    beyond[:, 1:] = mass[:, :-1] >= share
    return torch.zeros_like(beyond).scatter(-1, order, beyond)


def _atypical(logits: torch.Tensor, share: float) -> torch.Tensor:
    """The tokens beyond the smallest set with at least this mass of those whose surprisal is nearest to the entropy."""
    log_p = torch.log_softmax(logits, dim=-1)
    entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(dim=-1, keepdim=True)
    order = (log_p + entropy).abs().sort(dim=-1, stable=True).indices
    return _beyond(logits.gather(-1, order), order, share)


def _deviation(logits: torch.Tensor) -> torch.Tensor:
    """How far each logit is below the largest of its row, in standard deviations of the finite ones."""
    possible = logits.isfinite()
    count, finite = possible.sum(dim=-1, keepdim=True), logits.masked_fill(~possible, 0.0).double()
    mean = finite.sum(dim=-1, keepdim=True) / count
    spread = ((finite - mean).masked_fill(~possible, 0.0).square().sum(dim=-1, keepdim=True) / count).sqrt()
    return (logits.amax(dim=-1, keepdim=True) - logits).double() / spread.clamp(min=torch.finfo(torch.float64).tiny)


def _penalised(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    if params.repetition_penalty != 1.0:
        if history.seen is None:
            raise ValueError("a repetition penalty needs the tokens that are present")
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(history.seen, penalised, logits)
    if params.counts_tokens:
        if history.counts is None:
            raise ValueError("frequency and presence penalty need the counts of the generated tokens")
        present = (history.counts > 0).to(logits.dtype)
        logits = logits - (params.frequency_penalty * history.counts + params.presence_penalty * present)
    return logits


def draw(weights: Weights, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens by inverse transform over token ids.

    Args:
        weights: of the processed logits.
        uniforms: float64 (rows,), inside (0, 1).

    Returns:
        (tokens, intervals): tokens int64 (rows,), never of probability zero, and float64 (rows, 2), the interval of
        uniforms that give the token. If the weights are not numbers, the tokens are arbitrary.
    """
    total = weights.upto[:, -1:]
    point = _below(uniforms[:, None] * total, total)
    block = torch.searchsorted(weights.upto, point, right=True).clamp(max=weights.upto.shape[-1] - 1)
    upto, before = _within(weights, block)
    size = weights.values.shape[-1]
    after = torch.searchsorted(upto, _below(point - before, upto[:, -1:]), right=True).clamp(min=1, max=size)
    tokens = (block * size + after - 1)[:, 0].clamp(max=weights.logits.shape[-1] - 1)
    return tokens, _interval(weights, upto, before, after)


def intervals(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The intervals of uniforms, float64 (rows, 2), that `draw` maps to the given tokens, int64 (rows,)."""
    size = weights.values.shape[-1]
    return _interval(weights, *_within(weights, (tokens // size)[:, None]), (tokens % size + 1)[:, None])


def kept(weights: Weights, most: int) -> torch.Tensor:
    """The tokens of finite logits by id, each with its log-probability: float64 (rows, 2 * most), padded by -1 and -inf."""
    ids = torch.arange(weights.logits.shape[-1], device=weights.logits.device)
    none = len(ids)
    found = torch.where(weights.logits > -torch.inf, ids, none).topk(min(most, none), largest=False, sorted=True).values
    found = torch.nn.functional.pad(found, (0, most - found.shape[-1]), value=none)
    logits = weights.logits.gather(1, found.clamp(max=none - 1))
    log_q = (logits - weights.maximum).double() - weights.upto[:, -1:].log()
    gone = found == none
    return torch.stack([found.double().masked_fill(gone, -1.0), log_q.masked_fill(gone, -torch.inf)], dim=-1).flatten(1)


def _within(weights: Weights, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative sums in one block per row, both float64.

    Returns the sums before each token of the block and over the whole block, (rows, block length + 1), and the sum of all
    earlier blocks, (rows, 1).
    """
    if weights.upto.shape[-1] == 1:
        chosen, before = weights.values[:, 0], torch.zeros_like(weights.upto)
    else:
        chosen = weights.values.gather(1, block[..., None].expand(-1, -1, weights.values.shape[-1]))[:, 0]
        before = torch.where(block > 0, weights.upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    return torch.nn.functional.pad(chosen.cumsum(dim=-1, dtype=torch.float64), (1, 0)), before


def _interval(weights: Weights, upto: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Intervals of tokens. `after` is the index of the cumulative sum that includes the token."""
    return (before + upto.gather(1, torch.cat([after - 1, after], dim=1))) / weights.upto[:, -1:]


def _below(point: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Moves a point below the total if rounding has put it on or above it. The search then finds a token with weight."""
    return torch.minimum(point, total * (1.0 - 2.0**-52))


def _rank(logits: torch.Tensor) -> torch.Tensor:
    """Rank of each token in its row, from 0 for the most likely. Ties are in the order of token ids."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(logits.shape[-1], device=logits.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)
