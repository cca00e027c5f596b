"""The blocks of each training step, the loss of a draft on them, and the quality of a draft.

All blocks of some sequences are drafted in one forward. Slot k of a block predicts the token k positions after the anchor,
from the target's features before the anchor and the anchor's token. The prediction is compared with the token at that
position, or with the target's distribution there. Slot 0, padding and positions after the end do not count. Slot k has the
weight exp(-(k - 1) / gamma), because all slots after a wrong one are rejected (DFlash, arXiv 2602.06036).

The logits of all ids are most of the work of a step with a real vocabulary: at 49 thousand ids and a draft of 7 million
parameters, three quarters. A step with candidates computes those of the frequent ids of the training responses, of the ids
that occur in the step, and of random others that stand for the rest: sampled softmax (Jean et al. 2015, arXiv 1412.2007,
section 3). The sum of exp(logit) over all ids is estimated without bias, so that the error of the loss has a mean of about
zero.

Every epoch has its own random order of the sequences and its own random anchors. Features are kept in memory, so that each
response is read once, before the first step. The groups that are read together depend on the responses alone, so that a run
that was resumed has the same values to the last bit.

The quality of a draft is its tokens per forward of the target, as if recorded responses were drawn speculatively: the drafted
tokens before the first one that differs from the response are accepted, and the response's token replaces that one. For greedy
responses this is exactly greedy speculation, and for sampled ones sample-and-match with a draft that proposes its most likely
tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.process import bars
from dflash_mcmc.rng import Key

POOL_BATCHES = 8
"""Number of batches in a pool. The sequences of a pool are sorted by length and then divided into batches."""
T = TypeVar("T")


class Response(NamedTuple):
    """A prompt with the target's answer."""

    tokens: np.ndarray
    """int32 (length,): the prompt, then the answer, including its stop id if it has one."""
    prompt_length: int

    @property
    def length(self) -> int:
        return len(self.tokens)


def cut_by_length(items: Sequence[T], lengths: Sequence[int], size: int, key: Key) -> list[list[T]]:
    """Batches of `size` items of similar length, in random order by `key`. Their number is a multiple of `size`."""
    ordered = [items[i] for i in np.argsort(np.asarray(lengths), kind="stable")]
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return [batches[i] for i in key.uniforms(0, len(batches)).argsort()]


class TrainingBlocks(NamedTuple):
    """Blocks of some sequences.

    Attributes:
        tokens: int64 (rows, length), padded on the right.
        lengths: int64 (rows,).
        anchors: int64 (rows, blocks), positions of the anchors; padded with -1.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    anchors: torch.Tensor

    def rows(self, rows: list[int]) -> "TrainingBlocks":
        """A selection of the sequences, with the padding reduced to the longest of them."""
        length = int(self.lengths[rows].max())
        return TrainingBlocks(self.tokens[rows, :length], self.lengths[rows], self.anchors[rows])

    def to(self, device: torch.device) -> "TrainingBlocks":
        """The same blocks on another device."""
        return TrainingBlocks(*(tensor.to(device) for tensor in self))


def possible_anchors(response: Response, prompt_end: bool) -> range:
    """From the first token of the answer, or with `prompt_end` the prompt's last token, to the last token but one."""
    return range(response.prompt_length - prompt_end, response.length - 1)


def draw_anchors(response: Response, count: int, prompt_end: bool, key: Key) -> np.ndarray:
    """`count` different anchors, uniformly random and sorted by position; all possible anchors if there are fewer."""
    possible = possible_anchors(response, prompt_end)
    chosen = key.uniforms(0, len(possible)).argsort(kind="stable")[:count]
    return possible.start + np.sort(chosen)


def gather(responses: Sequence[Response], anchors: Sequence[np.ndarray]) -> TrainingBlocks:
    """The sequences and their anchors as tensors, padded to the longest."""
    tokens = pad_sequence([torch.from_numpy(response.tokens.astype(np.int64)) for response in responses], batch_first=True)
    padded = pad_sequence([torch.from_numpy(np.asarray(chosen, np.int64)) for chosen in anchors], batch_first=True,
                          padding_value=-1)
    return TrainingBlocks(tokens, torch.tensor([response.length for response in responses]), padded)


class Epochs:
    """The training batches. Batch n depends only on the seed and n, so a resumed run gets the same batches.

    An epoch leaves out random responses that fill no batch.

    Args:
        responses: the training responses. A response without a possible anchor is ignored.
        batch_size: sequences per batch.
        anchors: maximal number of blocks per sequence.
        prompt_end: whether the last token of the prompt is a possible anchor.
    """

    def __init__(self, responses: Sequence[Response], batch_size: int, anchors: int, prompt_end: bool, seed: int):
        self.responses = [response for response in responses if possible_anchors(response, prompt_end)]
        self._batch_size, self._anchors, self._prompt_end = batch_size, anchors, prompt_end
        self._key = Key(seed).fold_in("draft", "blocks")
        self.num_batches = len(self.responses) // batch_size
        self._at: tuple[int, int] | None = None
        self._pool: list[list[int]] = []

    def indices(self, step: int) -> list[int]:
        """The numbers of a step's responses among those with a possible anchor."""
        epoch, batch = divmod(step, self.num_batches)
        pool, offset = divmod(batch, POOL_BATCHES)
        if self._at != (epoch, pool):
            size = self._batch_size * POOL_BATCHES
            order = self._key.fold_in("order", epoch).uniforms(0, len(self.responses)).argsort(kind="stable")
            indices = order[: self.num_batches * self._batch_size][pool * size : (pool + 1) * size].tolist()
            lengths = [self.responses[index].length for index in indices]
            self._at, self._pool = (epoch, pool), cut_by_length(indices, lengths, self._batch_size,
                                                                self._key.fold_in("pool", epoch, pool))
        return self._pool[offset]

    def __call__(self, step: int) -> TrainingBlocks:
        epoch, indices = step // self.num_batches, self.indices(step)
        responses = [self.responses[index] for index in indices]
        keys = [self._key.fold_in("anchors", epoch, index) for index in indices]
        return gather(responses, [draw_anchors(response, self._anchors, self._prompt_end, key)
                                  for response, key in zip(responses, keys, strict=True)])


class Known(NamedTuple):
    """What a loss needs of the target along sequences.

    Attributes:
        features: (rows, length, layers · hidden), the draft's features.
        hidden: (rows, length, hidden), after the final norm; None for a loss of tokens alone.
        log_sums: float32 (rows, length), log of the sum of exp(power · logit) over all ids, in nats; None if the loss sums
            over all ids itself.
    """

    features: torch.Tensor
    hidden: torch.Tensor | None = None
    log_sums: torch.Tensor | None = None


def read_target(model: LanguageModel, layers: tuple[int, ...], tokens: torch.Tensor, power: float | None = None,
                sums: bool = False) -> Known:
    """Reads sequences, int64 (rows, length), for a loss.

    Args:
        layers: the target's layers that the draft reads.
        power: the power of the target's distribution that the draft learns; None for a loss of tokens alone.
        sums: whether the loss needs the logarithms of sums.
    """
    reading = sequences.read(model, tokens, layers)
    features = reading.features(model, layers)
    if power is None:
        return Known(features)
    if not sums:
        return Known(features, reading.hidden)
    with torch.no_grad():
        log_sums = [(power * model.logits(piece)).logsumexp(dim=-1)
                    for piece in reading.hidden.flatten(0, 1).split(sequences.positions_at_once(model.vocab_size))]
    return Known(features, reading.hidden, torch.cat(log_sums).view(reading.hidden.shape[:2]))


class KeptReader:
    """What has been read of all responses, by the number of the response.

    `at_once` responses of similar length are read together. A response takes length · (layers · hidden) numbers of the model's
    dtype, and for a loss of distributions length · (hidden + 1) more.

    Args:
        reader: `read_target` of tokens.
    """

    def __init__(self, reader: Callable[[torch.Tensor], Known], responses: Sequence[Response], at_once: int,
                 device: torch.device):
        self._kept: dict[int, Known] = {}
        order = sorted(range(len(responses)), key=lambda number: (responses[number].length, number))
        with bars.Bar(len(order), "response", "reading") as bar:
            for numbers in [order[start : start + at_once] for start in range(0, len(order), at_once)]:
                group = [responses[number] for number in numbers]
                reading = reader(gather(group, [np.empty(0, np.int64)] * len(group)).tokens.to(device))
                for row, (number, response) in enumerate(zip(numbers, group, strict=True)):
                    self._kept[number] = Known._make(None if column is None else column[row, : response.length]
                                                     for column in reading)
                bar.update(len(group))

    def __call__(self, numbers: Sequence[int]) -> Known:
        """What is known of the responses with these numbers, padded with zeros."""
        columns = zip(*(self._kept[number] for number in numbers), strict=True)
        return Known._make(None if column[0] is None else pad_sequence(list(column), batch_first=True)
                           for column in columns)


class Candidates(NamedTuple):
    """The ids of a step.

    Attributes:
        ids: int64 (n,). The first `num_certain` are different and ascending; the others are random, from outside them.
        num_certain: number of ids that stand for themselves.
        log_weight: log of the number of ids that each random one stands for.
    """

    ids: torch.Tensor
    num_certain: int
    log_weight: float

    def to(self, device: torch.device) -> "Candidates":
        """The same candidates on another device."""
        return self._replace(ids=self.ids.to(device))

    @property
    def shift(self) -> torch.Tensor:
        """`log_weight` for random ids, 0 for the others, float32 (n,)."""
        shift = torch.zeros(len(self.ids), device=self.ids.device)
        shift[self.num_certain :] = self.log_weight
        return shift

    def places(self, labels: torch.Tensor) -> torch.Tensor:
        """The places of labels, int64 (rows,), in `ids`. All labels must be among the certain ids."""
        return torch.searchsorted(self.ids[: self.num_certain], labels)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Logits (rows, n) of hidden states (rows, width), with `log_weight` added to those of random ids.

        Args:
            weight: (ids, width), the head's. bias: (ids,), or None.
        """
        logits = torch.nn.functional.linear(hidden, weight[self.ids].to(hidden.dtype)).float()
        if bias is not None:
            logits = logits + bias[self.ids]
        return logits + self.shift

    def kl_divergences(self, logits: torch.Tensor, target: torch.Tensor, log_sums: torch.Tensor, power: float) -> torch.Tensor:
        """KL(p | q) in nats, shape (n,): an estimate from the candidates, in which p has no error.

        Args:
            logits: (n, candidates), the draft's, as `logits` returns them.
            target: (n, candidates), the target's logits of the candidates. p is softmax(power · target) over all ids.
            log_sums: (n,), log of the sum of exp(power · logit of the target) over all ids.
        """
        log_p, shift = power * target - log_sums[:, None], self.shift
        log_q = torch.log_softmax(logits, dim=-1) - shift
        return ((log_p + shift).exp() * (log_p - log_q)).sum(dim=-1)


class CandidateIds:
    """The candidates of each step. Step n depends only on the responses, the seed and n, so a resumed run has the same ones.

    Args:
        responses: the training responses.
        num: number of candidates beside the ids of the step. Half of them are the most frequent ids of the answers.
        forbidden: bool (ids,), True for ids without a token, which are never candidates.
    """

    def __init__(self, responses: Sequence[Response], num: int, forbidden: np.ndarray, seed: int):
        answers = np.concatenate([response.tokens[response.prompt_length :] for response in responses])
        counts = np.bincount(answers, minlength=len(forbidden))
        counts[forbidden] = 0
        frequent = np.argsort(-counts, kind="stable")[: num // 2]
        self._frequent, self._forbidden = frequent[counts[frequent] > 0], forbidden
        self._num_random = num - num // 2
        self._key = Key(seed).fold_in("draft", "candidates")

    def __call__(self, step: int, tokens: torch.Tensor) -> Candidates:
        """The candidates of a step with these tokens, int64 of any shape. All tokens are certain candidates."""
        certain = np.union1d(self._frequent, tokens.cpu().numpy())
        outside = ~self._forbidden
        outside[certain] = False
        rest = np.flatnonzero(outside)
        if not len(rest):
            return Candidates(torch.from_numpy(certain), len(certain), 0.0)
        drawn = rest[(self._key.fold_in(step).uniforms(0, self._num_random) * len(rest)).astype(np.int64)]
        ids = torch.from_numpy(np.concatenate([certain, drawn]))
        return Candidates(ids, len(certain), float(np.log(len(rest) / self._num_random)))


_SLOTS_AT_ONCE = 8192
"""Slots whose logits are in memory at the same time. With 152 thousand ids they take 5 GB in float32."""


class Objective(NamedTuple):
    """The loss of a slot and the decay `gamma` of its weight."""

    target: str
    """`tokens`, `p` or `p_alpha`; see `DraftPlan`."""
    alpha: float
    gamma: float

    @property
    def power(self) -> float | None:
        """The power of the target's distribution that the draft learns; None if it learns tokens."""
        return {"tokens": None, "p": 1.0, "p_alpha": self.alpha}[self.target]


def weights_of(blocks: TrainingBlocks, num_drafted: int, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) of slot k, float32 (rows, blocks, num_drafted); 0 for padding and positions after the end."""
    counts = (blocks.anchors >= 0) * (blocks.lengths[:, None] - 1 - blocks.anchors)
    slots = torch.arange(num_drafted, device=counts.device)
    return (slots < counts[..., None]) * torch.exp(-slots / gamma)


def kl_divergences(logits: torch.Tensor, target: torch.Tensor, alpha: float) -> torch.Tensor:
    """KL(p_alpha | q) in nats, shape (...), with q = softmax(logits) and p_alpha = softmax(alpha · target).

    `logits` and `target` have the shape (..., ids). p_alpha is the target's next-token distribution to the power alpha,
    normalised. The minimum is 0, at q = p_alpha.
    """
    log_p = torch.log_softmax(alpha * target, dim=-1)
    # Ids without a token have probability 0 in both distributions and would give 0 · (-inf + inf).
    ratio = torch.where(torch.isneginf(target), 0.0, log_p - torch.log_softmax(logits, dim=-1))
    return (log_p.exp() * ratio).sum(dim=-1)


def loss_sum(draft: DFlash, model: LanguageModel, blocks: TrainingBlocks, objective: Objective,
             autocast: bool, candidates: Candidates | None = None, known: Known | None = None) -> torch.Tensor:
    """The sum over all slots of weight times loss, in nats.

    Sums over parts of a batch, from several processes, can be added. To get the mean, divide the total by the sum of the
    whole batch's weights.

    Args:
        candidates: the ids to normalise over; None for all ids.
        known: what the target says along the sequences; None reads the target.
    """
    weights = weights_of(blocks, draft.shape.num_drafted, objective.gamma)
    rows, anchors, slots = torch.nonzero(weights, as_tuple=True)
    positions = blocks.anchors[rows, anchors] + slots + 1
    if known is None:
        known = read_target(model, draft.shape.target_layers, blocks.tokens, objective.power, candidates is not None)
    with torch.autocast(blocks.tokens.device.type, torch.bfloat16, enabled=autocast):
        hidden = sequences.drafted(draft, model, known.features, *blocks)[rows, anchors, slots]
    # The target's distribution of a token is computed from the position before it.
    teacher, log_sums = (None if part is None else part[rows, positions - 1] for part in known[1:])
    tokens, weights = blocks.tokens[rows, positions], weights[rows, anchors, slots]
    if candidates is not None and objective.power is not None and log_sums is None:
        raise ValueError("a loss of a distribution over candidates needs the logarithms of the target's sums")
    head = model.head_logits if candidates is None else partial(
        candidates.logits, weight=model.head.weight.detach(), bias=getattr(model.head, "bias", None))

    def piece(part: slice) -> torch.Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
            logits = head(hidden[part]).float()
        if objective.power is None or teacher is None:
            labels = tokens[part] if candidates is None else candidates.places(tokens[part])
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        elif candidates is None or log_sums is None:
            with torch.no_grad():
                target = model.logits(teacher[part])
            losses = kl_divergences(logits, target, objective.power)
        else:
            with torch.no_grad():
                target = model.logits_of(teacher[part], candidates.ids)
            losses = candidates.kl_divergences(logits, target, log_sums[part], objective.power)
        return (weights[part] * losses).sum()

    pieces = [slice(start, start + _SLOTS_AT_ONCE) for start in range(0, len(hidden), _SLOTS_AT_ONCE)]
    if len(pieces) == 1:
        return piece(pieces[0])
    # The backward pass recomputes the logits. Only the logits of one part are in memory at a time.
    return sum((checkpoint(piece, part, use_reentrant=False) for part in pieces), hidden.sum() * 0.0)


def speculated(draft: DFlash, model: LanguageModel, responses: Sequence[Response], rows_at_once: int,
               anchors_at_once: int) -> tuple[int, int]:
    """(number of tokens of the answers, number of forwards of the target), whose ratio is the accepted length tau.

    Drafting starts at the last token of each prompt. A forward yields the accepted tokens and the target's token after them.
    """
    forwards, ordered = 0, sorted(responses, key=lambda response: response.length)
    for start in range(0, len(ordered), rows_at_once):
        rows = ordered[start : start + rows_at_once]
        for accepted, response in zip(accepted_lengths(draft, model, rows, anchors_at_once), rows, strict=True):
            anchor = response.prompt_length - 1
            while anchor < response.length - 1:
                anchor, forwards = anchor + int(accepted[anchor]) + 1, forwards + 1
    return sum(response.length - response.prompt_length for response in responses), forwards


@torch.no_grad()
def accepted_lengths(draft: DFlash, model: LanguageModel, responses: Sequence[Response], anchors_at_once: int) -> np.ndarray:
    """Number of accepted tokens of the block at each anchor position, int64 (responses, length of the longest).

    The number counts the leading drafted tokens that equal the response's tokens. It is 0 at positions where no block can
    start: before the last token of the prompt, and at the last token of the sequence.
    """
    anchors = [np.array(possible_anchors(response, prompt_end=True)) for response in responses]
    every = gather(responses, anchors).to(model.device)
    layers = draft.shape.target_layers
    features = sequences.read(model, every.tokens, layers).features(model, layers)
    accepted = torch.zeros(len(responses), every.tokens.shape[1] + 1, dtype=torch.int64, device=model.device)
    for start in range(0, every.anchors.shape[1], anchors_at_once):
        blocks = every._replace(anchors=every.anchors[:, start : start + anchors_at_once])
        hidden, last = sequences.drafted(draft, model, features, *blocks), blocks.tokens.shape[1] - 1
        slots = torch.arange(hidden.shape[2], device=hidden.device)
        proposed = model.head_logits(hidden).masked_fill(model.forbidden, -torch.inf).argmax(dim=-1)
        positions = blocks.anchors[..., None] + 1 + slots
        expected = blocks.tokens.gather(1, positions.flatten(1).clamp(max=last)).view_as(positions)
        right = (proposed == expected) & (positions < blocks.lengths[:, None, None])
        counts = right.long().cumprod(dim=-1).sum(dim=-1)
        accepted.scatter_(1, blocks.anchors % accepted.shape[1], counts)  # padding anchors (-1) write to the extra last column
    return accepted[:, :-1].cpu().numpy()
