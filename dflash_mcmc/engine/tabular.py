"""A toy target given by a table, on which every random choice of a sampler can be enumerated.

`dflash_mcmc.testing` runs samplers on it to get their exact law. With an ordinary `Key` it samples like the other
engines.
"""

from __future__ import annotations

import numpy as np

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine import exact_law
from dflash_mcmc.ops import Chain, Draw, Law, Operation, Score, drive
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Path


class TabularModel:
    """Random logits for every prefix, and a second set that stands for an intermediate layer's.

    Args:
        vocab_size: number of tokens.
        stop_ids: tokens that end a sequence.
        seed: of the table.
        scale: of the logits; larger is more peaked.
    """

    def __init__(self, vocab_size: int, stop_ids: tuple[int, ...], seed: int = 0, scale: float = 1.0):
        self.vocab_size, self.stop_ids, self.scale, self._key = vocab_size, tuple(stop_ids), scale, Key(seed)
        self._logits: dict[tuple, np.ndarray] = {}

    def logits(self, prefix: tuple[int, ...], layer: str) -> np.ndarray:
        """Float64 (vocab_size,); `layer` is "last" or "tapped"."""
        if (prefix, layer) not in self._logits:
            uniforms = self._key.fold_in(layer, *prefix).uniforms(0, self.vocab_size)
            self._logits[prefix, layer] = self.scale * np.log(uniforms / (1.0 - uniforms))
        return self._logits[prefix, layer]


class TabularEngine:
    """Runs one chain at a time on a TabularModel; the head is the identity and the norm scales to unit mean square."""

    def __init__(self, model: TabularModel, blend: object | None = None):
        self.model, self.blend = model, NoBlend() if blend is None else blend
        self._laws: dict[tuple, np.ndarray] = {}

    def run(self, chain: Chain) -> ChainResult:
        """The result of a chain, as its generator returns it."""
        return drive(chain, self.answer)

    def answer(self, operation: Operation) -> Path:
        """The path that a Draw or a Score asks for."""
        if isinstance(operation, Score):
            path = operation.path
            for token in operation.tokens:
                path = self._append(path, int(token), operation.law, operation.source)
            return path
        path, floor, weight = operation.path, operation.floor, 0.0
        while not path.complete(operation.horizon):
            path = self._append(path, self._choose(operation, path), operation.law, operation.source)
            if floor is not None:
                weight += floor.alpha * path.log_p[-1] - path.log_q[-1]
                if floor.crossed(weight, path.length):
                    break
        return path

    def log_p(self, path: Path) -> np.ndarray:
        """Log-probabilities of the blended target after `path`, float64 (vocab_size,)."""
        return self._law(path, None, "blended")

    def log_q(self, path: Path, law: Law, source: str) -> np.ndarray:
        """Log-probabilities of a law after `path`, float64 (vocab_size,)."""
        return self._law(path, law, source)

    def _choose(self, operation: Draw, path: Path) -> int:
        log_q = self.log_q(path, operation.law, operation.source)
        if isinstance(operation.key, Key):
            return exact_law.draw(log_q, float(operation.key.uniforms(path.length, path.length + 1)[0]))
        return operation.key.fold_in("position", path.length).categorical(np.exp(log_q))

    def _append(self, path: Path, token: int, law: Law, source: str) -> Path:
        log_p, log_q = self.log_p(path)[token], self.log_q(path, law, source)
        return path.extended(np.array([token]), np.array([log_p]), log_q[token : token + 1],
                             exact_law.interval(log_q, token)[None], token in self.model.stop_ids)

    def _law(self, path: Path, law: Law | None, source: str) -> np.ndarray:
        prefix = (*path.prompt.tolist(), *path.tokens.tolist())
        if (prefix, law, source) not in self._laws:
            logits = self._logits(prefix, source)
            log_p = exact_law.log_softmax(logits) if law is None else exact_law.process(logits, law, np.array(prefix))
            self._laws[prefix, law, source] = log_p
        return self._laws[prefix, law, source]

    def _logits(self, prefix: tuple[int, ...], source: str) -> np.ndarray:
        last = self.model.logits(prefix, "last")
        if source == "base":
            return last
        tapped = [self.model.logits(prefix, "tapped") for _ in self.blend.tapped_layers(1)]
        return self.blend.mix(last, tapped, lambda hidden: hidden / np.sqrt(np.mean(hidden**2)))
