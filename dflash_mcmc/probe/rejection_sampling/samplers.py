"""The samplers of the probe on one drafted token, by the engine's own rules."""

from types import SimpleNamespace

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws_of
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.rules import Block, BlockRandom, Fault, Noise, Speculation, Uniforms, Verdict
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key

_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""


def samplers_by_name() -> dict[str, Speculation]:
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    samplers, drafter = {}, SimpleNamespace(num_drafted=1, has_density=True)
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
    """Draws of one token with the logits of target and draft, float64 (vocabulary,) each."""

    def __init__(self, logits: tuple[np.ndarray, np.ndarray], temperature: float, key: Key, device: str):
        target, draft = (torch.from_numpy(values).to(device, torch.float32) for values in logits)
        self.samplers = samplers_by_name()
        self._logits, self._law, self._key = (target, draft), SamplingParams(temperature), key

    def draw(self, name: str, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """The tokens of draws `start` to `stop` - 1 of a sampler, int64, and the number of accepted drafts.

        They depend on the number of the draw alone, not on its chunk.
        """
        key = self._key.fold_in(name)
        tokens = key.fold_in("token").uniforms(2 * start, 2 * stop).reshape(-1, 2)
        chance = Uniforms(*(torch.from_numpy(values).to(self._logits[0].device)
                            for values in (tokens, *Noise.of(key, start, stop, 1))))
        judged = verdict(self.samplers[name], self._logits, self._law, chance, stop - start)
        return judged.tokens[:, 0], int(judged.accepted.sum())
