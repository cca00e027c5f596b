"""A toy target given by a table, on which all random choices of a sampler can be enumerated.

`dflash_mcmc.testing` runs samplers on it to compute their exact law. With an ordinary `Key` it samples like the other
engines.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.interface import TargetBlend
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.speculative.rules import Block, BlockRandom, Noise, Speculation, Uniforms
from dflash_mcmc.ops import Draw, Operation, Result, SamplingParams, Score, Steps, drive, grid_slot
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory

_NOTHING = np.empty(0)
"""The history of a draft, which has no penalty."""


class TabularModel:
    """Random logits for every prefix, and another set for each intermediate layer.

    Args:
        vocab_size: number of tokens.
        stop_ids: tokens that end a sequence.
        seed: seed of the table.
        scale: scale of the logits; a larger one gives a more peaked law.
        num_layers: number of intermediate layers.
        stop: strings that end a sequence.
        texts: the bytes of each token, in which `stop` is searched.
    """

    def __init__(self, vocab_size: int, stop_ids: tuple[int, ...], seed: int = 0, scale: float = 1.0, num_layers: int = 1,
                 stop: tuple[str, ...] = (), texts: Sequence[bytes] = ()):
        self.vocab_size, self.stop_ids, self.scale, self._key = vocab_size, tuple(stop_ids), scale, Key(seed)
        self.num_layers, self.stop, self.texts = num_layers, stop, texts
        self._logits: dict[tuple, np.ndarray] = {}

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether generated tokens end a sequence: with a stop id, or because their text contains a stop string."""
        text = b"".join(self.texts[token] for token in tokens) if self.stop else b""
        return tokens[-1] in self.stop_ids or any(string.encode() in text for string in self.stop)

    def stopping_at(self, stop: tuple[str, ...]) -> "TabularModel":
        """The same model with other strings that end a sequence."""
        other = copy.copy(self)
        other.stop = stop
        return other

    def logits(self, prefix: tuple[int, ...], layer: str) -> np.ndarray:
        """Logits, float64 (vocab_size,); `layer` is "last", "tapped", or "tapped 1" and so on for further layers."""
        if (prefix, layer) not in self._logits:
            uniforms = self._key.fold_in(layer, *prefix).uniforms(0, self.vocab_size)
            self._logits[prefix, layer] = self.scale * np.log(uniforms / (1.0 - uniforms))
        return self._logits[prefix, layer]


class TabularDraft:
    """A draft given by a table.

    Args:
        vocab_size: size of the target's vocabulary.
        num_drafted: tokens of a block.
        sequential: whether a slot depends on the tokens drafted before it; DFlash's slots do not.
        has_density: whether the draft draws its tokens; if False, it proposes the most likely token of each slot.
        seed, scale: as for TabularModel.
    """

    def __init__(self, vocab_size: int, num_drafted: int, sequential: bool = False, has_density: bool = True, seed: int = 1,
                 scale: float = 1.0):
        self.num_drafted, self.sequential, self.has_density = num_drafted, sequential, has_density
        self._table = TabularModel(vocab_size, (), seed, scale)

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        """Logits, float64 (vocab_size,), for the slot after `drafted`. `prefix` ends with the anchor."""
        return self._table.logits((*prefix, *drafted) if self.sequential else prefix, f"slot {len(drafted)}")


class TabularEngine:
    """Runs one chain at a time on a TabularModel, whose head is the identity and whose norm scales to unit mean square.

    Args:
        model: the target.
        blend: changes the last hidden state; None for no change.
        speculation: draws block by block with a TabularDraft; None draws token by token. Draws from the draft do not use it.
        draft: a draft for the blend, or a draft from which tokens are drawn.
        companion: the other model of a blend that mixes logits.
        second: the companion's prompt; None if it reads the target's.
    """

    def __init__(self, model: TabularModel, blend: TargetBlend | None = None,
                 speculation: Speculation[TabularDraft] | None = None, draft: TabularDraft | None = None,
                 companion: TabularModel | None = None, second: tuple[int, ...] | None = None):
        self.model, self.speculation, self.draft, self._level = model, speculation, draft, 0
        self.companion, self.second = companion, second
        self.blend = TargetBlend() if blend is None else blend
        self._laws: dict[tuple, np.ndarray] = {}
        self._shares: dict[int, tuple[np.ndarray, list[float], np.ndarray]] = {}
        self._drafts: dict[tuple, tuple[np.ndarray, laws.Weights]] = {}

    def run(self, chain: Steps[Result]) -> Result:
        """The result of a chain or of another generator of operations."""
        return drive(chain, self.answer)

    def answer(self, operation: Operation) -> Trajectory:
        """The answer to a Draw or a Score."""
        if isinstance(operation, Score):
            trajectory = operation.trajectory
            for token in operation.tokens:
                trajectory = self._append(trajectory, int(token), operation)
            return trajectory
        trajectory, floor, weight = operation.trajectory, operation.floor, 0.0
        while not trajectory.complete(operation.horizon):
            for token, interval in self._next(operation, trajectory):
                trajectory = self._append(trajectory, token, operation, interval)
                if floor is not None:
                    weight += floor.alpha * trajectory.log_p[-1] - trajectory.log_q[-1]
                    if floor.crossed(weight, trajectory.length):
                        return trajectory
                if trajectory.complete(operation.horizon):
                    break
        return trajectory

    def log_p(self, trajectory: Trajectory) -> np.ndarray:
        """Log-probabilities of the blended target after `trajectory`, float64 (vocab_size,)."""
        return self._law(_prefix(trajectory), trajectory.length, None, "blended")

    def log_q(self, trajectory: Trajectory, params: SamplingParams, source: str) -> np.ndarray:
        """Log-probabilities under sampling parameters after `trajectory`, float64 (vocab_size,)."""
        return self._law(_prefix(trajectory), trajectory.length, params, source)

    def _next(self, operation: Draw, trajectory: Trajectory) -> list[tuple[int, np.ndarray | None]]:
        """The next token or the tokens of a block, each with its interval. None means that the law gives the interval."""
        if self.speculation is None or operation.source == "draft":
            return [(self._choose(operation, trajectory), None)]
        chance = self._chance(operation.key, trajectory.length)
        block = self._block(operation, trajectory, chance)
        verdict = self._blockwise.rule(block, chance)
        kept = int(verdict.accepted) + 1
        return list(zip(verdict.tokens[0, :kept].tolist(), verdict.interval[0, :kept].numpy(), strict=True))

    @property
    def _blockwise(self) -> Speculation[TabularDraft]:
        if self.speculation is None:
            raise ValueError("this engine draws token by token")
        return self.speculation

    def _chance(self, key: Key, anchor: int) -> BlockRandom:
        count = self._blockwise.num_drafted
        if not isinstance(key, Key):
            return key.chance(anchor, count)
        noise = Noise.of(key, anchor, anchor + 1, count)
        tokens = torch.from_numpy(key.uniforms(anchor, anchor + count + 1))[None]
        return Uniforms(tokens, *map(torch.from_numpy, noise))

    def _block(self, operation: Draw, trajectory: Trajectory, chance: BlockRandom) -> Block:
        """A drafted block of one row, in float64."""
        speculation, prefix = self._blockwise, _prefix(trajectory)
        params, drafter, count = speculation.draft_params(operation.params), speculation.drafter, speculation.num_drafted
        drawn = drafter.has_density and params.temperature > 0.0
        drafted: tuple[int, ...] = ()
        log_q: list[np.ndarray] = []
        for slot in range(count):
            law, weights = self._draft_law(params, prefix, drafted)
            log_q.append(law)
            token = speculation.draft(weights, chance, slot) if drawn else np.argmax(law)
            drafted = (*drafted, int(token))
        if speculation.fault.raw_draft:
            log_q = [drafter.logits(prefix, drafted[:slot]) for slot in range(len(drafted))]
        log_p = [self._slot(operation, prefix, trajectory.length, drafted[:slot]) for slot in range(len(drafted) + 1)]
        return Block(torch.tensor([drafted], dtype=torch.int64), _weights(log_p), _weights(log_q) if drawn else None,
                     torch.tensor([trajectory.length == 0]))

    def _draft_law(self, params: SamplingParams, prefix: tuple[int, ...],
                   drafted: tuple[int, ...]) -> tuple[np.ndarray, laws.Weights]:
        """Log-probabilities of the draft in the slot after `drafted`, and their weights."""
        drafter, name = self._blockwise.drafter, (params, prefix, drafted)
        if name not in self._drafts:
            law = exact_law.process(drafter.logits(prefix, drafted), params, _NOTHING, _NOTHING)
            self._drafts[name] = law, _weights([law])
        return self._drafts[name]

    def _slot(self, operation: Draw, prefix: tuple[int, ...], length: int, drafted: tuple[int, ...]) -> np.ndarray:
        """Log-probabilities of the target in the slot after `drafted`. `length`: generated tokens of the prefix."""
        whole, count = (*prefix, *drafted), length + len(drafted)
        fault = self._blockwise.fault
        if not fault.late_history and fault.window is None:
            return self._law(whole, count, operation.params, operation.source)
        read = whole if fault.window is None else whole[-fault.window:]
        history, counted = ((*prefix, *drafted[:-1]), count - bool(drafted)) if fault.late_history else (whole, count)
        return exact_law.process(self._logits(read, count, operation.source), operation.params, *_history(history, counted))

    def _choose(self, operation: Draw, trajectory: Trajectory) -> int:
        log_q = self.log_q(trajectory, operation.params, operation.source)
        if isinstance(operation.key, Key):
            return exact_law.draw(log_q, float(operation.key.uniforms(trajectory.length, trajectory.length + 1)[0]))
        return operation.key.fold_in("position", trajectory.length).categorical(self._shared(log_q)[1])

    def _append(self, trajectory: Trajectory, token: int, operation: Operation,
                interval: np.ndarray | None = None) -> Trajectory:
        prefix = _prefix(trajectory)
        log_p = self._law(prefix, trajectory.length, None, "blended")
        log_q = self._law(prefix, trajectory.length, operation.params, operation.source)
        interval = self._shared(log_q)[2][token] if interval is None else interval
        under = [self.log_q(trajectory, params, operation.source) for params in operation.laws]
        model = self.model if operation.stop is None else self.model.stopping_at(operation.stop)
        return trajectory.extended(
            np.array([token]), log_p[token : token + 1], log_q[token : token + 1], interval[None],
            model.ends([*prefix[len(trajectory.prompt) :], token]), exact_law.under(under, token)[None] if under else None,
            np.array([exact_law.entropy(log_p)]) if operation.entropy else None,
            exact_law.kept(log_q, operation.params.top_k)[None] if operation.kept else None)

    def _shared(self, law: np.ndarray) -> tuple[np.ndarray, list[float], np.ndarray]:
        """A law with its probabilities and the intervals of all tokens, which an enumeration asks for many times."""
        if id(law) not in self._shares:
            self._shares[id(law)] = law, np.exp(law).tolist(), exact_law.intervals(law)
        return self._shares[id(law)]

    def _law(self, prefix: tuple[int, ...], length: int, params: SamplingParams | None, source: str) -> np.ndarray:
        name = (prefix, length, params, source)
        if name not in self._laws:
            logits = self._logits(prefix, length, source)
            self._laws[name] = (exact_law.log_softmax(logits) if params is None
                                else exact_law.process(logits, params, *_history(prefix, length)))
        return self._laws[name]

    def _logits(self, prefix: tuple[int, ...], length: int, source: str) -> np.ndarray:
        """Logits after a prefix with `length` generated tokens."""
        last = self.model.logits(prefix, "last")
        if source == "base":
            return last
        slot = grid_slot(length, self.draft.num_drafted + 1) if self.draft else 0
        anchor = len(prefix) - slot + 1
        drafted = self.draft.logits(prefix[:anchor], prefix[anchor:]) if self.draft and slot else last
        if source == "draft" and slot:
            return drafted
        if self.blend.needs_draft:
            others = [drafted]
        elif self.companion is not None:
            read = prefix if self.second is None else (*self.second, *prefix[len(prefix) - length :])
            others = [self.companion.logits(read, "last")]
        else:
            others = [self.model.logits(prefix, f"tapped {layer}" if layer else "tapped")
                      for layer in self.blend.tapped_layers(self.model.num_layers)]
        return self.blend.mix(last, others, _normed)


def _normed(hidden: np.ndarray) -> np.ndarray:
    return hidden / np.sqrt(np.mean(hidden**2))


def _prefix(trajectory: Trajectory) -> tuple[int, ...]:
    return (*trajectory.prompt.tolist(), *trajectory.tokens.tolist())


def _history(prefix: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, generated tokens) of a prefix with `length` generated tokens."""
    return np.array(prefix[: len(prefix) - length]), np.array(prefix[len(prefix) - length :])


def _weights(log_p: list[np.ndarray]) -> laws.Weights:
    return laws.weigh(torch.from_numpy(np.stack(log_p)))
