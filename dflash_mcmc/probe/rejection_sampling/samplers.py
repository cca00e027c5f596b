"""The samplers of the probe on two kinds of laws: one drafted token with synthetic logits, and the first two of a real block.

The laws of a draft are tables over the vocabulary, because the prompt is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.chains import build
from dflash_mcmc.engine.batching import logits_processor as laws_of
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.engine.speculative.rules import Block, BlockRandom, Fault, Noise, Speculation, Uniforms, Verdict
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.registry import name_of
from dflash_mcmc.rng import Key
from dflash_mcmc.settings import Settings

_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""
_DRAFTED = 2
_LARGEST_VOCABULARY = 4096
_PAIRS = 199
"""Pairs of tokens that are counted; all others are counted together."""
BLOCK = "speculative_rejection_block"
MARGINAL, BASE = "speculative_rejection marginal_q", "speculative_rejection base_logits_q"


def samplers_by_name(num_drafted: int = 1) -> dict[str, Speculation]:
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    samplers, drafter = {}, SimpleNamespace(num_drafted=num_drafted, has_density=True)
    for decoder, rule, faults in (("speculative_rejection", rules.reject, rules.REJECTION),
                                  ("speculative_match", rules.match, rules.MATCH)):
        for name, (wrong, fault) in {"": (None, Fault()), **faults}.items():
            if name not in _ELSEWHERE:
                samplers[f"{decoder} {name}".strip()] = Speculation(wrong or rule, drafter, shared_noise=rule is rules.match,
                                                                    temperature=None, noisy=True, fault=fault)
    return samplers


def verdict(sampler: Speculation, logits: tuple[torch.Tensor, torch.Tensor], law: SamplingParams, chance: BlockRandom,
            rows: int) -> Verdict:
    """The verdict on one drafted token in each of `rows` rows. All rows have the same logits, each float32 (vocabulary,)."""
    def weigh(logits: torch.Tensor, law: SamplingParams, count: int) -> laws_of.Weights:
        return laws_of.weigh(laws_of.process(logits.expand(count, -1), law, laws_of.NO_HISTORY))

    target, draft = logits
    weights = weigh(draft, sampler.draft_params(law), rows)
    drafted = sampler.draft(weights, chance, 0)
    judged = weigh(draft, SamplingParams(), rows) if sampler.fault.raw_draft else weights
    first = torch.ones(rows, dtype=torch.bool, device=target.device)
    return sampler.rule(Block(drafted, weigh(target, law, 2 * rows), judged, first), chance)


class TokenDraws:
    """Draws of one token with the logits of target and draft, float64 (vocabulary,) each. A cell is a token."""

    def __init__(self, logits: tuple[np.ndarray, np.ndarray], temperature: float, key: Key, device: str):
        target, draft = (torch.from_numpy(values).to(device, torch.float32) for values in logits)
        self.samplers, self.num_cells = samplers_by_name(), len(target)
        self._logits, self._law, self._key = (target, draft), SamplingParams(temperature), key

    def draw(self, name: str, start: int, stop: int) -> tuple[torch.Tensor, float]:
        """The cells of draws `start` to `stop` - 1 of a sampler, int64, and the sum of their accepted shares.

        They depend on the number of the draw alone, not on its chunk.
        """
        key = self._key.fold_in(name)
        tokens = key.fold_in("token").uniforms(2 * start, 2 * stop).reshape(-1, 2)
        chance = Uniforms(*(torch.from_numpy(values).to(self._logits[0].device)
                            for values in (tokens, *Noise.of(key, start, stop, 1))))
        judged = verdict(self.samplers[name], self._logits, self._law, chance, stop - start)
        return judged.tokens[:, 0], int(judged.accepted.sum())


class Tables(NamedTuple):
    """Processed logits, float32, up to constants.

    Attributes:
        target, draft: (vocabulary,) of the first token.
        target_next, draft_next: (vocabulary, vocabulary) of the second token, after each first one.
        base: (2, vocabulary), the draft's logits before the correction.
    """

    target: torch.Tensor
    target_next: torch.Tensor
    draft: torch.Tensor
    draft_next: torch.Tensor
    base: torch.Tensor

    def pairs(self) -> torch.Tensor:
        """The pairs that are counted, int64 (pairs,): those with the largest p. A pair (a, b) is number a * vocabulary + b."""
        return joint(self.target, self.target_next).argsort(descending=True, stable=True)[:_PAIRS]


def joint(first: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The law of both tokens, float64 (vocabulary * vocabulary,), from logits of the first and of the second after it."""
    return (torch.softmax(first.double(), 0)[:, None] * torch.softmax(following.double(), -1)).flatten()


@torch.inference_mode()
def tables(config: Settings, temperature: float, device: str) -> Tables:
    """The laws after the first problem's prompt. Raises UserError."""
    model = config.model.load(device)
    if model.vocab_size > _LARGEST_VOCABULARY:
        raise ConfigError("model", name_of(config.model), f"a vocabulary of at most {_LARGEST_VOCABULARY} tokens with "
                          f"probe.laws=draft, which lists all pairs of tokens; this one has {model.vocab_size}")
    drafter = cast("DFlashDrafter", config.draft.load(model))
    problem = config.dataset.problems()[0]
    prompt = build.encoded(config, model, [problem])[problem.id]
    room = (model.max_positions or math.inf) - len(prompt) - drafter.num_drafted
    if room < 0:
        raise ConfigError("dataset", name_of(config.dataset), f"a shorter prompt, or a model with more positions (problem "
                          f"{problem.id} takes {len(prompt)} of the model's {model.max_positions} positions, and a block "
                          f"{drafter.num_drafted})")
    prefix = torch.from_numpy(prompt).to(device)[None]
    reading = sequences.read(model, prefix, drafter.tapped_layers)
    length = torch.tensor([prefix.shape[1]], device=prefix.device)
    # The block at the prompt's last token.
    hidden = sequences.drafted(drafter.network, model, reading.features(model, drafter.tapped_layers), prefix, length,
                               length[None] - 1)[0]
    base, vocabulary = drafter.logits(hidden)[0, :_DRAFTED], model.vocab_size
    every = torch.arange(vocabulary, device=device)
    # A draft may condition a slot on the token before it, so that the second slot has a row for each first token.
    previous = torch.stack([prefix[0, -1].expand(vocabulary), every], dim=1)
    rows = [value[0, :_DRAFTED].expand(vocabulary, -1, -1) for value in (drafter.logits(hidden), hidden)]
    corrected = drafter.network.along(rows[0], rows[1], previous)
    after = sequences.read(model, torch.cat([prefix.expand(vocabulary, -1), every[:, None]], dim=1)).hidden[:, -1]
    logits = (model.logits(reading.hidden[0, -1]), model.logits(after), corrected[0, 0], corrected[:, 1], base)
    law = SamplingParams(temperature)
    return Tables(*(laws_of.process(each.reshape(-1, vocabulary), law, laws_of.NO_HISTORY).view(each.shape)
                    for each in logits))


def cells(config: Settings, temperature: float) -> tuple[np.ndarray, np.ndarray, Callable[[int], str]]:
    """p and q of the counted pairs of tokens and of all other pairs together, float64 (cells,), and the name of a cell."""
    device = config.hardware.resolve()
    exact, model = tables(config, temperature, device), config.model.load(device)
    pairs, size = exact.pairs(), len(exact.target)
    laws = joint(exact.target, exact.target_next), joint(exact.draft, exact.draft_next)
    p, q = (torch.cat([law[pairs], (1.0 - law[pairs].sum()).clamp(min=0.0)[None]]).cpu().numpy() for law in laws)

    def name(cell: int) -> str:
        if cell == len(pairs):
            return "others"
        return "|".join(model.decode(np.array([token])) for token in divmod(int(pairs[cell]), size))

    return p, q, name


class PairDraws:
    """Draws of two tokens with the laws of a draft and its target. A cell is one of `Tables.pairs`, or all others."""

    def __init__(self, exact: Tables, temperature: float, key: Key):
        single, pairs = samplers_by_name(_DRAFTED), exact.pairs()
        right = single["speculative_rejection"]
        self.samplers = {**single, BLOCK: right._replace(rule=rules.reject_block), MARGINAL: right, BASE: right}
        self._exact, self._temperature, self._key = exact, temperature, key.fold_in("draft")
        self.num_cells = len(pairs) + 1
        self._cell = torch.full((len(exact.target) ** 2,), len(pairs), device=pairs.device)
        self._cell[pairs] = torch.arange(len(pairs), device=pairs.device)

    def draw(self, name: str, start: int, stop: int) -> tuple[torch.Tensor, float]:
        """See `TokenDraws.draw`."""
        sampler, exact, key = self.samplers[name], self._exact, self._key.fold_in(name)
        draws, device = stop - start, exact.target.device
        uniforms = key.fold_in("token").uniforms(start * 4, stop * 4).reshape(-1, 4)
        plain = torch.from_numpy(uniforms[:, 3]).to(device)
        chance = Uniforms(*(torch.from_numpy(values).to(device)
                            for values in (uniforms[:, :3].copy(), *Noise.of(key, start, stop, _DRAFTED))))
        first = exact.draft.expand(draws, -1)
        head = sampler.draft(laws_of.weigh(first), chance, 0)[:, 0]
        following = exact.draft_next[head]
        drafted = torch.stack([head, sampler.draft(laws_of.weigh(following), chance, 1)[:, 0]], dim=1)
        judged = (first, following)
        if name == MARGINAL:  # the law of the draft's second token without its first one
            marginal = torch.log(torch.softmax(exact.draft, 0) @ torch.softmax(exact.draft_next, -1))
            judged = first, marginal.expand(draws, -1)
        if name == BASE:
            judged = exact.base[0].expand(draws, -1), exact.base[1].expand(draws, -1)
        if sampler.fault.raw_draft:
            judged = first * self._temperature, following * self._temperature
        # The token after both drafted ones is the third, which is not counted: any law will do for it.
        after = exact.target_next[head]
        target = laws_of.weigh(torch.stack([exact.target.expand(draws, -1), after, after], dim=1).flatten(0, 1))
        block = Block(drafted, target, laws_of.weigh(torch.stack(judged, dim=1).flatten(0, 1)),
                      torch.ones(draws, dtype=torch.bool, device=device))
        found = sampler.rule(block, chance)
        one = found.tokens[:, 0]
        alone = laws_of.draw(laws_of.weigh(exact.target_next[one]), plain)[0]
        two = torch.where(found.accepted > 0, found.tokens[:, 1], alone)
        return self._cell[one * len(exact.target) + two], float(found.accepted.sum()) / _DRAFTED
