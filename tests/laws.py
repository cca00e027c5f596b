"""Laws on the tabular model, computed from their definitions. They share no code with the modules that they check."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from dflash_mcmc.engine.oracle.tabular import TabularModel

PROMPT = (0,)


class Beside(NamedTuple):
    """A blend with the logits of another model, among tokens that the target finds plausible."""

    beta: float
    other: TabularModel
    alpha_mask: float = 0.0
    prompt: tuple[int, ...] = PROMPT
    """The prompt that the other model reads."""

    def logits(self, last: list[float], prefix: tuple[int, ...]) -> list[float]:
        """The mixture; -inf where the target's probability is below `alpha_mask` times its largest."""
        total = sum(map(math.exp, last))
        p = [math.exp(x) / total for x in last]
        other = [float(x) for x in self.other.logits((*self.prompt, *prefix[len(PROMPT) :]), "last")]
        return [x + self.beta * (y - x) if here >= self.alpha_mask * max(p) else -math.inf
                for x, y, here in zip(last, other, p, strict=True)]


def logits_of(model: TabularModel, prefix: tuple[int, ...], blend: tuple | None) -> list[float]:
    """Logits after a prefix; `blend` is (beta, norm) of a layer blend, with names of the layers, and with a rotation.

    A rotation is a list of (place, sign): the place of the layer's state that stands at each place after it.
    """
    last = [float(x) for x in model.logits(prefix, "last")]
    if blend is None:
        return last
    if isinstance(blend, Beside):
        return blend.logits(last, prefix)
    beta, norm, names = (*blend, ("tapped",))[:3]
    rotation = blend[3] if len(blend) > 3 else [(place, 1.0) for place in range(len(last))]
    mean = [0.0] * len(last)
    for name in names:
        tapped = [float(x) for x in model.logits(prefix, name)]
        scale = math.sqrt(sum(x * x for x in tapped) / len(tapped)) if norm == "final" else 1.0
        mean = [x + y / scale / len(names) for x, y in zip(mean, tapped, strict=True)]
    return [(1 - beta) * x + beta * sign * mean[place] for x, (place, sign) in zip(last, rotation, strict=True)]


def conditional(logits: list[float], prefix: tuple[int, ...], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                min_p: float = 0.0, repetition_penalty: float = 1.0, frequency_penalty: float = 0.0,
                presence_penalty: float = 0.0, penalty_counts: str = "answer", top_n_sigma: float = 0.0,
                typical_p: float = 1.0, order: str = "temperature_first") -> dict[int, float]:
    """Probabilities of the next token by its sampling parameters, computed with sorted lists."""
    penalty = repetition_penalty
    logits = [(x / penalty if x > 0 else x * penalty) if v in prefix else x for v, x in enumerate(logits)]
    counts = [prefix[0 if penalty_counts == "prompt+answer" else len(PROMPT) :].count(v) for v in range(len(logits))]
    logits = [x - frequency_penalty * n - presence_penalty * (n > 0) for x, n in zip(logits, counts, strict=True)]
    first, last = (1.0, temperature) if order == "temperature_last" else (temperature, 1.0)
    weights = {v: math.exp(x / first) for v, x in enumerate(logits)}
    if top_n_sigma:
        weights = {v: w for v, w in weights.items() if (max(logits) - logits[v]) <= top_n_sigma * statistics.pstdev(logits)}
    if top_k:
        weights = dict(sorted(weights.items(), key=lambda item: -item[1])[:top_k])
    if typical_p < 1.0:
        total = sum(weights.values())
        entropy = -sum(w / total * math.log(w / total) for w in weights.values())
        weights = _smallest(weights, typical_p, lambda w: abs(math.log(w / total) + entropy))
    if top_p < 1.0:
        weights = _smallest(weights, top_p, lambda w: -w)
    if min_p:
        weights = {v: w for v, w in weights.items() if w >= min_p * max(weights.values())}
    weights = {v: w ** (1.0 / last) for v, w in weights.items()}
    return {v: w / sum(weights.values()) for v, w in weights.items()}


def _smallest(weights: dict[int, float], share: float, key: Callable[[float], float]) -> dict[int, float]:
    """The smallest set with at least this share, taken in the order of `key`."""
    kept, mass, total = {}, 0.0, sum(weights.values())
    for v, w in sorted(weights.items(), key=lambda item: key(item[1])):
        if mass >= share:
            break
        kept[v], mass = w, mass + w / total
    return kept


def sequences(model: TabularModel, horizon: int) -> list[tuple[int, ...]]:
    """All complete sequences: those that end with their only stop, and those of full length without a stop.

    A stop is a stop id, or the first token at which the text contains a stop string.
    """
    return [tokens for length in range(1, horizon + 1) for tokens in itertools.product(range(model.vocab_size), repeat=length)
            if stopped(model, tokens) == length or (length == horizon and not stopped(model, tokens))]


def stopped(model: TabularModel, tokens: tuple[int, ...]) -> int:
    """The number of tokens up to the first stop, that token included; 0 without one."""
    for number, token in enumerate(tokens, start=1):
        text = "".join(chr(byte) for before in tokens[:number] for byte in (model.texts[before] if model.stop else b""))
        if token in model.stop_ids or any(text.find("".join(map(chr, stop.encode()))) >= 0 for stop in model.stop):
            return number
    return 0


def product_law(model: TabularModel, horizon: int, blend: tuple[float, str] | None = None, **options) -> dict:
    """The law of sequences whose tokens are drawn one by one. `options` are sampling parameters."""
    law = {}
    for tokens in sequences(model, horizon):
        probability = 1.0
        for position, token in enumerate(tokens):
            prefix = (*PROMPT, *tokens[:position])
            probability *= conditional(logits_of(model, prefix, blend), prefix, **options).get(token, 0.0)
        if probability:
            law[tokens] = probability
    return law


def power_law(model: TabularModel, horizon: int, alpha: float, support: dict, blend: tuple[float, str] | None = None) -> dict:
    """p^alpha of the blended model, normalised over the sequences of `support`."""
    p = product_law(model, horizon, blend)
    weights = {tokens: p[tokens] ** alpha for tokens in support}
    return {tokens: weight / sum(weights.values()) for tokens, weight in weights.items()}


def published_law(model: TabularModel, alpha: float, temperature: float, blocks: int, block_length: int, steps: int) -> dict:
    """The law of the code of arXiv 2510.14901.

    Proposals are not longer than the state. The ratio covers only the overlap and has no length term. A chain returns after
    the block with its first stop id.
    """
    stops, done, live = set(model.stop_ids), {}, {(): 1.0}

    def add(law: dict, tokens: tuple, probability: float) -> None:
        law[tokens] = law.get(tokens, 0.0) + probability

    def grow(tokens: tuple, length: int) -> dict:
        """Continuations up to a length or a stop id, with their probabilities under q."""
        if len(tokens) >= length or (tokens[-1:] and tokens[-1] in stops):
            return {tokens: 1.0}
        grown, prefix = {}, (*PROMPT, *tokens)
        for token, q in conditional(logits_of(model, prefix, None), prefix, temperature).items():
            for longer, rest in grow((*tokens, token), length).items():
                add(grown, longer, q * rest)
        return grown

    def log_weight(tokens: tuple, start: int, stop: int) -> float:
        total = 0.0
        for position in range(start, stop):
            prefix = (*PROMPT, *tokens[:position])
            logits = logits_of(model, prefix, None)
            total += alpha * math.log(conditional(logits, prefix)[tokens[position]])
            total -= math.log(conditional(logits, prefix, temperature)[tokens[position]])
        return total

    for _ in range(blocks):
        states: dict = {}
        for tokens, probability in live.items():
            for longer, q in grow(tokens, len(tokens) + block_length).items():
                add(states, longer, probability * q)
        for _ in range(steps):
            moved: dict = {}
            for x, probability in states.items():
                for cut in range(len(x)):
                    for y, q in grow(x[:cut], len(x)).items():
                        overlap = min(len(x), len(y))
                        ratio = log_weight(y, cut, overlap) - log_weight(x, cut, overlap)
                        accept = math.exp(min(0.0, ratio))
                        add(moved, y, probability / len(x) * q * accept)
                        add(moved, x, probability / len(x) * q * (1.0 - accept))
            states = moved
        live = {}
        for tokens, probability in states.items():
            add(done if tokens[-1] in stops else live, tokens, probability)
    for tokens, probability in live.items():
        add(done, tokens, probability)
    return done
