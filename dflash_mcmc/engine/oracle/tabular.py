"""A toy target given by a table, on which every random choice of a sampler can be enumerated.

`dflash_mcmc.testing` runs samplers on it to get their exact law. With an ordinary `Key` it samples like the other
engines.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine import logits_processor as laws
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.speculative.speculation import Block, Chance, Noise, Speculation, Uniforms
from dflash_mcmc.ops import Chain, Draw, Operation, SamplingParams, Score, drive, grid_origin, grid_slot
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory


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


class TabularDraft:
    """A draft given by a table.

    Args:
        vocab_size: of the target.
        num_drafted: tokens of a block.
        sequential: whether what it drafts hangs on the tokens drafted before; DFlash's slots do not.
        has_density: False names the most likely token of each slot, and no law.
        seed, scale: as for TabularModel.
    """

    def __init__(self, vocab_size: int, num_drafted: int, sequential: bool = False, has_density: bool = True, seed: int = 1,
                 scale: float = 1.0):
        self.num_drafted, self.sequential, self.has_density = num_drafted, sequential, has_density
        self._table = TabularModel(vocab_size, (), seed, scale)

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        """Float64 (vocab_size,), of the slot behind `drafted`, after a prefix that ends with the anchor."""
        return self._table.logits((*prefix, *drafted) if self.sequential else prefix, f"slot {len(drafted)}")


class TabularEngine:
    """Runs one chain at a time on a TabularModel; the head is the identity and the norm scales to unit mean square.

    Args:
        model: the target.
        blend: as in the configuration; None for none.
        speculation: draws block by block with a TabularDraft; None draws token by token.
        draft: that the blend mixes in, or that laws are drawn from.
    """

    def __init__(self, model: TabularModel, blend: object | None = None, speculation: Speculation | None = None,
                 draft: TabularDraft | None = None):
        self.model, self.blend, self.speculation = model, NoBlend() if blend is None else blend, speculation
        self.draft, self._origin = draft, 0
        self._laws: dict[tuple, np.ndarray] = {}

    def run(self, chain: Chain) -> ChainResult:
        """The result of a chain, as its generator returns it."""
        return drive(chain, self.answer)

    def answer(self, operation: Operation) -> Trajectory:
        """The path that a Draw or a Score asks for."""
        self._origin = grid_origin(self.blend, operation.path) - len(operation.path.prompt)
        if isinstance(operation, Score):
            path = operation.path
            for token in operation.tokens:
                path = self._append(path, int(token), operation.law, operation.source)
            return path
        path, floor, weight = operation.path, operation.floor, 0.0
        while not path.complete(operation.horizon):
            for token, interval in self._next(operation, path):
                path = self._append(path, token, operation.law, operation.source, interval)
                if floor is not None:
                    weight += floor.alpha * path.log_p[-1] - path.log_q[-1]
                    if floor.crossed(weight, path.length):
                        return path
                if path.complete(operation.horizon):
                    break
        return path

    def log_p(self, path: Trajectory) -> np.ndarray:
        """Log-probabilities of the blended target after `path`, float64 (vocab_size,)."""
        return self._law(_prefix(path), path.length, None, "blended")

    def log_q(self, path: Trajectory, law: SamplingParams, source: str) -> np.ndarray:
        """Log-probabilities of a law after `path`, float64 (vocab_size,)."""
        return self._law(_prefix(path), path.length, law, source)

    def _next(self, operation: Draw, path: Trajectory) -> list[tuple[int, np.ndarray | None]]:
        """The tokens that follow, with their intervals (None: that of the law): one, or those of a block."""
        if self.speculation is None:
            return [(self._choose(operation, path), None)]
        chance = self._chance(operation.key, path.length)
        verdict = self.speculation.rule(self._block(operation, path, chance), chance)
        kept = int(verdict.accepted) + 1
        return list(zip(verdict.tokens[0, :kept].tolist(), verdict.interval[0, :kept].numpy(), strict=True))

    def _chance(self, key: Key, anchor: int) -> Chance:
        count = self.speculation.drafter.num_drafted
        if not isinstance(key, Key):
            return key.chance(anchor, count)
        noise = Noise.of(key, anchor, anchor + 1, count)
        tokens = torch.from_numpy(key.uniforms(anchor, anchor + count + 1))[None]
        return Uniforms(tokens, torch.from_numpy(noise.drafts), torch.from_numpy(noise.accepting))

    def _block(self, operation: Draw, path: Trajectory, chance: Chance) -> Block:
        """A drafted block of one row, in float64."""
        speculation, prefix = self.speculation, _prefix(path)
        law, drafter, drafted, log_q = speculation.draft_law(operation.law), speculation.drafter, (), []
        for slot in range(drafter.num_drafted):
            log_q.append(exact_law.process(drafter.logits(prefix, drafted), law, np.empty(0)))
            drawn = drafter.has_density and law.temperature > 0.0
            token = speculation.draft(_weights(log_q[-1:]), chance, slot) if drawn else np.argmax(log_q[-1])
            drafted = (*drafted, int(token))
        if speculation.fault.raw_draft:
            log_q = [drafter.logits(prefix, drafted[:slot]) for slot in range(len(drafted))]
        log_p = [self._slot(operation, prefix, path.length, drafted[:slot]) for slot in range(len(drafted) + 1)]
        return Block(torch.tensor([drafted]), _weights(log_p), _weights(log_q) if drawn else None,
                     torch.tensor([path.length == 0]))

    def _slot(self, operation: Draw, prefix: tuple[int, ...], length: int, drafted: tuple[int, ...]) -> np.ndarray:
        """Log-probabilities that the target has in the slot behind `drafted`; `length`: generated tokens of the prefix."""
        whole, number = (*prefix, *drafted), length + len(drafted)
        if not self.speculation.fault.late_history:
            return self._law(whole, number, operation.law, operation.source)
        return exact_law.process(self._logits(whole, number, operation.source), operation.law,
                                 np.array((*prefix, *drafted[:-1])))

    def _choose(self, operation: Draw, path: Trajectory) -> int:
        log_q = self.log_q(path, operation.law, operation.source)
        if isinstance(operation.key, Key):
            return exact_law.draw(log_q, float(operation.key.uniforms(path.length, path.length + 1)[0]))
        return operation.key.fold_in("position", path.length).categorical(np.exp(log_q))

    def _append(self, path: Trajectory, token: int, law: SamplingParams, source: str, interval: np.ndarray | None = None) -> Trajectory:
        log_p, log_q = self.log_p(path)[token], self.log_q(path, law, source)
        if interval is None:
            interval = exact_law.interval(log_q, token)
        return path.extended(np.array([token]), np.array([log_p]), log_q[token : token + 1], interval[None],
                             token in self.model.stop_ids)

    def _law(self, prefix: tuple[int, ...], length: int, law: SamplingParams | None, source: str) -> np.ndarray:
        name = (prefix, length - self._origin, law, source)
        if name not in self._laws:
            logits = self._logits(prefix, length, source)
            self._laws[name] = (exact_law.log_softmax(logits) if law is None
                                else exact_law.process(logits, law, np.array(prefix)))
        return self._laws[name]

    def _logits(self, prefix: tuple[int, ...], length: int, source: str) -> np.ndarray:
        """After a prefix, of which `length` tokens are generated."""
        last = self.model.logits(prefix, "last")
        if source == "base":
            return last
        slot = grid_slot(length - self._origin, self.draft.num_drafted + 1) if self.draft else 0
        drafted = self.draft.logits(prefix[: len(prefix) - slot + 1], (0,) * (slot - 1)) if slot else last
        if source == "draft" and slot:
            return drafted
        if getattr(self.blend, "needs_draft", False):
            parts = [drafted]
        else:
            parts = [self.model.logits(prefix, "tapped") for _ in self.blend.tapped_layers(1)]
        return self.blend.mix(last, parts, lambda hidden: hidden / np.sqrt(np.mean(hidden**2)))


def _prefix(path: Trajectory) -> tuple[int, ...]:
    return (*path.prompt.tolist(), *path.tokens.tolist())


def _weights(log_p: list[np.ndarray]) -> laws.Weights:
    return laws.weigh(torch.from_numpy(np.stack(log_p)))
