"""The audit of a law: reads what was drawn along the target, one text after another, and keeps the evidence against the law.

Evidence may be looked at after every token: test martingales, and an interval for a shift.

A bet pays q(x) / p(x) for a token x, where p is the stated law and q another one. If the tokens follow p, the product of the
payments is a martingale that starts at 1. It reaches 1 / level with a probability of at most `level`, at whatever token one
stops (Ville 1939; Ramdas et al. 2022, arXiv 2210.01948). The mean of several such products is one too.

Most bets tilt the stated law p: q(x) is proportional to p(x) * exp(strength * f(x)). With f = log p this is another
temperature, with f = 1 for the most likely token a draft's mistake, with f = 1 for tokens of the answer so far a penalty.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash_mcmc.blend import Blend
from dflash_mcmc.components import name_of
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.logits_processor import history_along, process
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import SamplingParams

if TYPE_CHECKING:
    from dflash_mcmc.verify.drawn import DrawnText

_POWERS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25, 2.0)
"""The powers of p whose temperatures are tried, as shares of the stated one."""
_STRENGTHS = (-1.0, -0.2, -0.05, 0.05, 0.2, 1.0)
"""The strengths of tilts in nats."""
_CUTS = (SamplingParams(top_p=0.8), SamplingParams(top_p=0.9), SamplingParams(top_p=0.95), SamplingParams(top_k=20),
         SamplingParams(top_k=50), SamplingParams(min_p=0.05), SamplingParams(min_p=0.1))
"""The truncations that are tried where none is stated."""
_SLIP = 1e-3
"""The share of tokens that these bets let fall outside of the truncation, so that one token does not end the bet."""
_PRIORS = np.array([16.0, 256.0, 4096.0])
"""The weights of the stated law in what a bet learns from earlier texts of a prompt, as a number of texts."""
_LEARNED = 4
"""The first tokens of an answer whose law is learned."""
_COPIED = 0.02
"""The share of answers that are copies of an earlier one to the same prompt, under the bet that some are."""
_KEPT = 64
"""The newest answers to a prompt that may be copied."""
_CANDIDATES = 1024
"""The most likely tokens that are sorted for a truncation by mass. A row with less mass in them is left as it is."""
_NEAR, _NEAR_BFLOAT16 = 0.1, 0.5
"""The distance of logits within which a token outside counts as a near-tie of another rounding. bfloat16 rounds logits between
16 and 32 to multiples of 0.125, after many roundings on the way."""
_MASS, _MASS_BFLOAT16 = 1e-3, 0.02
"""The mass behind `top_p` in which a token counts as a near-tie, too."""
OFF = 0.02
"""The mean distance a token of a stated log p, in nats, above which it is wrong."""


class Bet(NamedTuple):
    """A law that may explain the tokens better than the stated one."""

    group: str
    """The kind of departure. Each kind has the same share of the stake, and each bet the same share of its kind."""
    says: str
    """What is wrong with the tokens if the bet wins."""


class BetEvidence(NamedTuple):
    """The evidence of a bet, or of all together, in factors of ten: log10 of the product of payments."""

    evidence: float
    """After the last token."""
    largest: float
    """The largest after any token."""
    red_at: int | None
    """The number of tokens after which it first reached 1 / level; None if it never did."""


class Evidence:
    """The products of payments of all bets, token by token.

    Args:
        bets: at least one.
        level: the probability of a false alarm that is allowed, in (0, 1).
    """

    def __init__(self, bets: Sequence[Bet], level: float):
        self.bets, self.level = tuple(bets), level
        groups = [bet.group for bet in bets]
        self._log_stake = -np.log([len(set(groups)) * groups.count(group) for group in groups])
        self._wealth = np.zeros(len(bets))
        self._largest = np.zeros(len(bets) + 1)
        self._red_at = np.zeros(len(bets) + 1, np.int64)
        self.tokens = 0

    def add(self, payments: np.ndarray) -> None:
        """Adds the log payments of further tokens, float64 (tokens, bets), in nats. -inf is a bet that is lost for good."""
        if not len(payments):
            return
        wealth = self._wealth + payments.cumsum(axis=0)
        together = log_mean(wealth + self._log_stake)
        paths = np.column_stack([wealth, together])
        for bet in np.flatnonzero(self._red_at == 0):
            if len(crossed := np.flatnonzero(paths[:, bet] >= -np.log(self.level))):
                self._red_at[bet] = self.tokens + crossed[0] + 1
        self._largest = np.maximum(self._largest, paths.max(axis=0))
        self._wealth = wealth[-1]
        self.tokens += len(payments)

    def together(self) -> BetEvidence:
        """The evidence of all bets together. It alone has the promise of `level`."""
        return self._evidence_of(float(log_mean((self._wealth + self._log_stake)[None])[0]), len(self.bets))

    def each(self) -> list[BetEvidence]:
        """The evidence of each bet. It says what is wrong, once all together say that something is."""
        return [self._evidence_of(float(wealth), bet) for bet, wealth in enumerate(self._wealth)]

    def _evidence_of(self, wealth: float, bet: int) -> BetEvidence:
        return BetEvidence(wealth / np.log(10.0), float(self._largest[bet]) / np.log(10.0), int(self._red_at[bet]) or None)


def log_mean(logs: np.ndarray) -> np.ndarray:
    """Logs of the sums of exp(logs), (rows, n), by rows; the shares of the stake are in `logs`."""
    highest = logs.max(axis=-1, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(logs - highest).sum(axis=-1)) + highest[:, 0]


class Shift(NamedTuple):
    """The mean difference between what was drawn and what the law expects, with an interval that holds at every token."""

    value: float
    low: float
    high: float


def shift_of(drawn: np.ndarray, expected: np.ndarray, level: float) -> Shift:
    """The shift of a share: the mean of drawn - expected, both (tokens,) in [0, 1].

    The predictable plug-in empirical Bernstein interval of Waudby-Smith and Ramdas (arXiv 2010.09686, theorem 2). It covers
    the mean over tokens, with weights that are known before each token, at all tokens together with probability 1 - level.
    """
    values = (drawn - expected + 1.0) / 2.0
    before = np.arange(1, len(values) + 1)
    means = (0.5 + values.cumsum()) / (before + 1)
    variances = (0.25 + ((values - means) ** 2).cumsum()) / (before + 1)
    mean, variance = np.concatenate([[0.5], means[:-1]]), np.concatenate([[0.25], variances[:-1]])
    weight = np.minimum(np.sqrt(2.0 * np.log(2.0 / level) / (variance * before * np.log(1.0 + before))), 0.5)
    total = weight.sum()
    centre = (weight * values).sum() / total
    half = (np.log(2.0 / level) + ((values - mean) ** 2 * (-np.log1p(-weight) - weight)).sum()) / total
    return Shift(2.0 * centre - 1.0, max(-1.0, 2.0 * (centre - half) - 1.0), min(1.0, 2.0 * (centre + half) - 1.0))


class Payments(NamedTuple):
    """What the tokens of a text pay, and what they are.

    Attributes:
        log: float64 (tokens, bets), in nats. A token that the law cannot draw pays nothing.
        top: float64 (tokens,), 1 where the token is the most likely one.
        expected_top: float64 (tokens,), the probability of the most likely token.
        outside: float64 (tokens,), for a token that the law cannot draw its distance from the least kept one in nats, else 0;
            at most that of rounding where this moves the bound of top-p or min-p so far.
        kept_otherwise: bool (tokens,), whether the law can draw the token in the other order of truncation and temperature.
        log_p: float64 (tokens,), log probability under the stated law, in nats; -inf for a token that it cannot draw.
        target_log_p: float64 (tokens,), log probability under the target at temperature 1, in nats.
    """

    log: np.ndarray
    top: np.ndarray
    expected_top: np.ndarray
    outside: np.ndarray
    kept_otherwise: np.ndarray
    log_p: np.ndarray
    target_log_p: np.ndarray


def bets_of(law: SamplingParams) -> list[Bet]:
    """The bets against a law. Temperature 0 leaves nothing to bet on: every other token is a mistake."""
    if law.temperature == 0.0:
        return [Bet("none", "nothing: every token is certain")]
    made = [Bet("temperature", f"temperature {law.temperature / power:.3g} instead of {law.temperature:.3g}")
            for power in _POWERS]
    for group, what in (("most likely token", "the most likely token"), ("first token", "the most likely token at the start"),
                        ("repetition", "a token that the answer has already"), ("prompt", "a token that the prompt has")):
        made += [Bet(group, f"{what}: {math.exp(strength):.2g} times its odds") for strength in _STRENGTHS]
    if _may_be_cut(law):
        usual = SamplingParams()
        made += [Bet("truncation", ", ".join(f"{name}={value:g}" for name, value in cut._asdict().items()
                                             if value != getattr(usual, name)) + ", which is not stated") for cut in _CUTS]
    elif _order_matters(law):
        made += [Bet("truncation", other_order(law))]
    return [*made, *[Bet("function", "the target's own law: the function is not applied")] * (law.function is not None)]


def _may_be_cut(law: SamplingParams) -> bool:
    """Whether bets are made on a truncation that is not stated."""
    return law.function is not None or not law.truncates


def other_order(law: SamplingParams) -> str:
    """What an engine does that truncates in the order which is not stated, and how one states it."""
    if law.temperature_last:
        return ("the truncation comes after the temperature, as in transformers and vLLM (sampler.order=temperature_first "
                "states it)")
    return "the truncation comes before the temperature, as in llama.cpp (sampler.order=temperature_last states it)"


def _order_matters(law: SamplingParams) -> bool:
    return law.truncates and law.temperature not in (0.0, 1.0)


@torch.no_grad()
def payments(logits: Callable[[slice], torch.Tensor], prompt: np.ndarray, tokens: np.ndarray, law: SamplingParams,
             pieces: Sequence[slice], near: tuple[float, float] = (0.0, 0.0)) -> Payments:
    """What the tokens of one text pay.

    Args:
        logits: the target's float32 logits (n, vocabulary) that predict a piece of the tokens.
        prompt: token ids of the prompt, int64.
        tokens: token ids of the answer, int64 (tokens,).
        pieces: the pieces, in order, that cover the tokens.
        near: how far the rounding of engines moves logits, in nats, and the mass of the most likely tokens.

    Raises UserError if the function of the law fails or returns something else.
    """
    of_pieces = [_of_piece(logits(piece), prompt, tokens, law, piece, near) for piece in pieces]
    return Payments(*(np.concatenate(arrays) for arrays in zip(*of_pieces, strict=True)))


def _of_piece(logits: torch.Tensor, prompt: np.ndarray, tokens: np.ndarray, law: SamplingParams, piece: slice,
              near: tuple[float, float]) -> Payments:
    nats, mass = near
    drawn = torch.from_numpy(tokens[piece]).to(logits.device)
    history = history_along([law], np.concatenate([prompt, tokens]), len(prompt), len(prompt) + piece.start, logits)
    kept = process(logits, law, history)
    log_p = torch.log_softmax(kept.double() if len(kept) * kept.shape[1] < 2**24 else kept, dim=-1)
    best = kept.argmax(dim=-1)
    of_drawn = log_p.gather(1, drawn[:, None])[:, 0].double()
    possible = of_drawn.isfinite()
    beyond = torch.zeros_like(of_drawn)
    # llama.cpp truncates at temperature 1; transformers and vLLM truncate what the temperature has made
    turned = law._replace(temperature_last=not law.temperature_last)
    other_way = process(logits, turned, history) if _order_matters(law) else kept
    if law.function is not None:
        beyond = torch.where(possible, 0.0, torch.inf)  # its logits do not say how far a token is from those that it keeps
    elif not possible.all():
        whole = process(logits, law.untruncated()._replace(temperature=law.temperature or 1.0), history)
        least = whole.masked_fill(~kept.isfinite(), torch.inf).amin(dim=-1)
        beyond = least - whole.gather(1, drawn[:, None])[:, 0]
        if law.typical_p < 1.0:
            # The typical set drops likely tokens, too: what counts is how far a token's surprisal is from the entropy.
            every = (whole * law.temperature if law.temperature_last else whole).log_softmax(dim=-1)
            away = (every + torch.special.entr(every.exp()).sum(dim=-1, keepdim=True)).abs()
            of_typical = away.gather(1, drawn[:, None])[:, 0] - away.masked_fill(~kept.isfinite(), 0.0).amax(dim=-1)
            beyond = torch.where(of_typical > 0.0, of_typical, torch.where(beyond > 0.0, beyond, torch.inf))
        beyond = torch.where(possible, 0.0, beyond.double())
        loosened = law._replace(top_p=min(1.0, law.top_p + mass), min_p=law.min_p * math.exp(-nats),
                                typical_p=min(1.0, law.typical_p + mass))  # keeps every token that rounding may keep
        at_bound = process(logits, loosened, history).gather(1, drawn[:, None])[:, 0].isfinite()
        beyond = torch.where(at_bound, beyond.clamp(max=nats), beyond)
    top, expected = (drawn == best).double(), log_p.gather(1, best[:, None])[:, 0].double().exp()
    if law.temperature == 0.0:
        paid = torch.zeros(len(drawn), 1, dtype=torch.float64)
    else:
        laws = list(_log_payments(log_p, drawn, top, expected, prompt, tokens, law, piece))
        if _order_matters(law):
            inside = other_way.masked_fill(~kept.isfinite(), -torch.inf)
            other = torch.log_softmax(inside, dim=-1).gather(1, drawn[:, None])[:, 0].double()
            laws.append(((1.0 - _SLIP) * (other - of_drawn).exp() + _SLIP).log())
        if law.function is not None:
            laws.append(((1.0 - _SLIP) * (sequences.log_probability(logits, drawn).double() - of_drawn).exp() + _SLIP).log())
        paid = torch.stack(laws, dim=1)
        paid = torch.where(possible[:, None], paid, 0.0)
    kept_otherwise = other_way.gather(1, drawn[:, None])[:, 0].isfinite()
    target_log_p = sequences.log_probability(logits, drawn)
    return Payments(*(each.cpu().numpy() for each in (paid, top, expected, beyond, kept_otherwise, of_drawn, target_log_p)))


class Repeats:
    """Bets on what earlier texts of the same prompt have shown. They name no mistake in advance.

    After n texts with this prompt and these tokens before a place, of which c had token x there, the law of a bet is
    (c + a p(x)) / (n + a): what a Dirichlet prior with the stated law p as its mean and weight a predicts. The last bet is
    that a share of the texts goes on as an earlier one does, as with a seed that two requests share.
    """

    bets = (*(Bet("repeated prompt", f"another law of the first tokens, learned from earlier answers (prior of {weight:g})")
              for weight in _PRIORS), Bet("copy", "an answer is a copy of an earlier one to the same prompt"))

    def __init__(self) -> None:
        self._seen: defaultdict[tuple[bytes, bytes], Counter[int]] = defaultdict(Counter)
        self._texts: defaultdict[bytes, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def payments(self, prompt: np.ndarray, tokens: np.ndarray, log_p: np.ndarray) -> np.ndarray:
        """The log payments (tokens, bets) of a text, in nats, from which later texts learn.

        Args:
            log_p: of the tokens under the stated law, as in `Payments`. A token that it cannot draw pays nothing.
        """
        paid = np.zeros((len(tokens), len(self.bets)))
        if earlier := self._texts[prompt.tobytes()]:  # each may be copied; behind the end of its text p is bet
            known, paths = np.where(np.isfinite(log_p), log_p, 0.0), np.zeros((len(earlier) + 1, len(tokens)))
            for path, text in zip(paths, earlier, strict=False):
                common = min(len(text), len(tokens))
                path[:common] = np.where(text[:common] == tokens[:common], -known[:common], -np.inf)
            shares = np.log([*[_COPIED / len(earlier)] * len(earlier), 1.0 - _COPIED])
            paid[:, -1] = np.diff(log_mean(paths.cumsum(axis=1).T + shares), prepend=0.0)
        earlier.append(tokens)
        for position, token in enumerate(tokens[:_LEARNED].tolist()):
            seen = self._seen[prompt.tobytes(), tokens[:position].tobytes()]
            if np.isfinite(log_p[position]):
                paid[position, :-1] = np.log((seen[token] * np.exp(-log_p[position]) + _PRIORS) / (seen.total() + _PRIORS))
            seen[token] += 1
        return paid


class Steps:
    """Bets on the place of a token in a step of an engine that speculates, from the number of tokens of each step.

    A draft proposes k tokens; a step has those that are accepted and one more. Where tokens are accepted one by one
    (Leviathan et al. 2023), the place of a token in its step depends on earlier tokens alone, so that its law is the stated
    one. A rule that accepts blocks as a whole (Sun et al. 2024) has no such law, and no bets here.
    """

    _PLACES = ("after a rejected token", "at the end of a block whose drafted tokens were all accepted",
               "inside of a block, after an accepted token")
    bets = tuple(Bet("place in a block", f"the most likely token {place}: {math.exp(strength):.2g} times its odds")
                 for place in _PLACES for strength in _STRENGTHS)

    def __init__(self) -> None:
        self._longest = 2  # the longest step so far: at its last place stands what follows k accepted tokens

    def payments(self, steps: Sequence[int] | None, top: np.ndarray, expected_top: np.ndarray) -> np.ndarray:
        """The log payments (tokens, bets) of a text, in nats.

        Args:
            steps: the number of tokens of each step, in order; None pays nothing.
            top, expected_top: as in `Payments`.
        """
        at = np.zeros((len(top), 3, 1))
        place, before = 0, 0
        for size in steps or ():
            for inside in range(size):
                full = inside + 1 == self._longest
                at[place, :, 0] = inside == 0 and 0 < before < self._longest, full, inside > 0 and not full
                place += 1
                self._longest = max(self._longest, inside + 1)
            before = size
        paid = torch.stack(list(_tilts(torch.from_numpy(top), torch.from_numpy(expected_top))), dim=1).numpy()
        return (at * paid[:, None]).reshape(len(top), -1)


def _log_payments(log_p: torch.Tensor, drawn: torch.Tensor, top: torch.Tensor, expected: torch.Tensor, prompt: np.ndarray,
                  tokens: np.ndarray, law: SamplingParams, piece: slice) -> Iterator[torch.Tensor]:
    of_drawn, p = log_p.gather(1, drawn[:, None])[:, 0].double(), log_p.exp()
    for power in _POWERS:
        yield (power - 1.0) * of_drawn - (power * log_p).logsumexp(dim=-1).double()
    yield from _tilts(top, expected)
    opening = torch.zeros_like(top)
    if piece.start == 0:
        opening[0] = 1.0
    yield from _tilts(top * opening, expected * opening)
    # The different tokens of the answer up to the end of the piece, and which of them stand before each of its tokens
    seen, first = np.unique(tokens[: piece.stop], return_index=True)
    before = first[None] < np.arange(piece.start, min(piece.stop, len(tokens)))[:, None]
    answer, is_before = (torch.from_numpy(array).to(p.device) for array in (seen, before))
    repeated = (drawn[:, None] == answer) & is_before
    yield from _tilts(repeated.any(dim=1).double(), (p[:, answer] * is_before).sum(dim=1).double())
    ids = torch.from_numpy(np.unique(prompt)).to(p.device)
    yield from _tilts(torch.isin(drawn, ids).double(), p[:, ids].sum(dim=1).double())
    if _may_be_cut(law):
        highest = p.topk(min(_CANDIDATES, p.shape[1]), dim=-1)
        own = p.gather(1, drawn[:, None])[:, 0].double()  # in the precision of the candidates
        for cut in _CUTS:
            mass, least = _kept(highest.values.double(), cut)
            inside = own >= least
            yield (inside * (1.0 - _SLIP) / mass + _SLIP).log()


def _tilts(drawn: torch.Tensor, share: torch.Tensor) -> Iterator[torch.Tensor]:
    """The log payments of tilts towards a set of tokens: whether a token is in it, and the set's probability, (tokens,)."""
    for strength in _STRENGTHS:
        yield strength * drawn - torch.log1p(share.clamp(max=1.0) * math.expm1(strength))


def _kept(values: torch.Tensor, cut: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Mass and smallest probability of what a truncation keeps, ties with it too, of descending probabilities (rows, n)."""
    upto = values.cumsum(dim=-1)
    if cut.top_k:
        count = torch.full((len(values), 1), min(cut.top_k, values.shape[1]), device=values.device)
    elif cut.top_p < 1.0:
        count = (upto < cut.top_p).sum(dim=-1, keepdim=True) + 1
    else:
        count = (values >= cut.min_p * values[:, :1]).sum(dim=-1, keepdim=True)
    last = (count - 1).clamp(max=values.shape[1] - 1)
    least = values.gather(1, last)
    mass, least = (values * (values >= least)).sum(dim=-1), least[:, 0]
    unknown = least <= values[:, -1]  # the set may be larger than what was sorted: such a row pays nothing
    return torch.where(unknown, 1.0, mass), torch.where(unknown, 0.0, least)


class Audit(NamedTuple):
    """What an audit has found.

    Attributes:
        law: the stated law of a token; None if only log p could be compared, since the texts are states of a chain or were
            drawn until one ended.
        bets: the bets, and `each` the evidence of each.
        together: the evidence of all, which decides.
        course: (texts, 2), tokens and log10 of the evidence of all together after each text.
        top: the shift of the share of most likely tokens.
        outside: the tokens that the law cannot draw: text, place in it, and distance from the kept ones in nats.
        near, near_ties: the distance in nats within which they are near-ties of another rounding, and the number of those.
        kept_otherwise: whether the law can draw all others in the other order of truncation and temperature.
        log_p_error: the mean and the largest distance a token between stated and recomputed log p, in nats; None if none
            is stated.
        at: where the texts are from, before the verdict; empty for all texts.
        texts, tokens: their numbers.
        left_out: texts of a run that is not complete, behind the first one that it lacks.
        defaults: steps that the checkpoint's generation_config.json sets and the stated law lacks, in words.
    """

    law: SamplingParams | None
    level: float
    bets: tuple[Bet, ...]
    each: tuple[BetEvidence, ...]
    together: BetEvidence
    course: np.ndarray
    top: Shift | None
    outside: tuple[tuple[str, int, float], ...]
    near: float
    near_ties: int
    kept_otherwise: bool
    log_p_error: tuple[float, float] | None
    texts: int
    tokens: int
    left_out: int = 0
    defaults: str = ""
    at: str = ""

    @property
    def is_red(self) -> bool:
        """Whether the texts do not follow what was stated."""
        impossible = len(self.outside) > self.near_ties
        wrong = self.log_p_error is not None and self.log_p_error[0] > OFF
        return impossible or wrong or self.together.red_at is not None

    @property
    def best(self) -> int:
        """The bet with the largest evidence."""
        return max(range(len(self.each)), key=lambda place: self.each[place].evidence)


def audit(model: LanguageModel, texts: "Iterable[DrawnText]", law: SamplingParams | None, level: float,
          blend: Blend | None = None, processed: bool = False) -> Audit:
    """Audits texts against a law.

    Args:
        law: how each token was drawn from the target's logits, as it is stated; None compares log p alone.
        level: the probability of a false alarm that is allowed.
        blend: a change of the target's last hidden state by its layers.
        processed: whether the texts' log p is that of the law, and not the target's.

    Raises:
        ConfigError: for a blend that needs a draft or mixes logits.
    """
    if blend is not None and (blend.needs_draft or blend.needs_companion):
        raise ConfigError("blend", name_of(blend), "none, or a blend of the target's own hidden states")
    read = law or SamplingParams(temperature=0.0)  # which pays nothing, so that log p alone is compared
    near = near_of(model, read.temperature or 1.0)
    learned, steps = (Repeats(), Steps()) if read.temperature > 0.0 else (None, None)
    more = (*(learned.bets if learned else ()), *(steps.bets if steps else ()))
    evidence = Evidence([*bets_of(read), *more], level)
    course, tops, outside, errors, kept_otherwise = [], [], [], [], True
    for text in texts:
        paid = read_text(model, text, read, blend)
        paths = [paid.log] + ([learned.payments(text.prompt, text.tokens, paid.log_p)] if learned else [])
        evidence.add(np.hstack([*paths, *([steps.payments(text.steps, paid.top, paid.expected_top)] if steps else [])]))
        if text.log_p is not None:
            errors.append(abs(text.log_p - (paid.log_p if processed else paid.target_log_p).sum()) / len(text.tokens))
        if law is not None:
            tops.append(np.stack([paid.top, paid.expected_top]))
            kept_otherwise &= bool(paid.kept_otherwise[paid.outside > near].all())
            outside += [(text.name, int(place), float(paid.outside[place])) for place in np.flatnonzero(paid.outside > 0.0)]
        course.append((evidence.tokens, evidence.together().evidence))
    if not course:
        raise ConfigError("TARGET", "no text", "at least one text with a token")
    shares = np.concatenate(tops, axis=1) if read.temperature > 0.0 else None
    top = None if shares is None else shift_of(shares[0], shares[1], level)
    return Audit(law, level, evidence.bets, tuple(evidence.each()), evidence.together(), np.array(course), top,
                 tuple(outside), near, sum(distance <= near for _, _, distance in outside), kept_otherwise,
                 (float(np.mean(errors)), max(errors)) if errors else None, len(course), evidence.tokens)


def near_of(model: LanguageModel, temperature: float) -> float:
    """The distance in nats at a temperature within which tokens are near-ties of another rounding."""
    return _NEAR_BFLOAT16 / temperature if model.dtype == torch.bfloat16 else _NEAR


@torch.no_grad()
def read_text(model: LanguageModel, text: "DrawnText", law: SamplingParams, blend: Blend | None) -> Payments:
    """What the tokens of a text pay, and their log p."""
    layers = () if blend is None else blend.tapped_layers(len(model.layers))
    sequence = torch.from_numpy(np.concatenate([text.prompt, text.tokens])).to(model.device)
    reading, first = sequences.read(model, sequence[None], layers), len(text.prompt) - 1
    last, outputs = (reading.hidden[0, first:-1], [output[0, first:-1] for output in reading.outputs])

    def logits(piece: slice) -> torch.Tensor:
        state = last[piece]
        if blend is not None and not blend.is_null:
            state = blend.mix(state, [output[piece] for output in outputs], model.final_norm)
        return sequences.checked(model.logits(state))

    near = near_of(model, law.temperature or 1.0), _MASS_BFLOAT16 if model.dtype == torch.bfloat16 else _MASS
    return payments(logits, text.prompt, text.tokens, law, list(sequences.pieces(model, len(text.tokens))), near)
