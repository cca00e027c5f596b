"""The samplers of the probe on two kinds of laws: one drafted token with synthetic logits, and the first two of a real block.

The laws of a draft are tables over the vocabulary, because the prompt and the anchor are fixed: the target's and the draft's
law of the first token, and their laws of the second token after each first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws_of
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.speculation import Block, BlockRandom, Fault, Noise, Speculation, Uniforms, Verdict
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import Unit, Work
from dflash_mcmc.registry import name_of
from dflash_mcmc.rng import Key
from dflash_mcmc.runner import build

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.probe.rejection_sampling import RejectionSampling

_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""
_DRAFTED = 2
_LARGEST_VOCABULARY = 4096
_PAIRS = 199
"""Pairs of tokens that are counted; all others are counted together."""
BLOCK = "speculative_rejection_block"
MARGINAL, BASE = "speculative_rejection marginal_q", "speculative_rejection base_logits_q"


class OneToken(NamedTuple):
    """The attributes of a drafter that predicts one token, without a network."""

    num_drafted: int = 1
    has_density: bool = True


def samplers_by_name(num_drafted: int = 1) -> dict[str, Speculation]:
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    samplers = {}
    for decoder, rule, known in (("speculative_rejection", rules.reject, rules.REJECTION),
                                 ("speculative_match", rules.match, rules.MATCH)):
        for name, (wrong, fault) in {"": (None, Fault()), **known}.items():
            if name not in _ELSEWHERE:
                samplers[f"{decoder} {name}".strip()] = Speculation(
                    wrong or rule, OneToken(num_drafted), shared_noise=rule is rules.match, temperature=None, noisy=True,
                    fault=fault)
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


def measure_synthetic(probe: RejectionSampling, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
    """Counts, for each sampler and chunk of draws, how often each token is drawn and how many drafts are accepted."""
    target, draft = (torch.from_numpy(values).to(work.device, torch.float32) for values in probe.logits())
    key, size = Key(config.seed).fold_in("rejection_sampling"), probe.chunk_size
    samplers = samplers_by_name()
    for unit in work:
        counts, accepted = {}, {}
        for name, sampler in samplers.items():
            chance = _uniforms(key.fold_in(name), unit.chain * size, (unit.chain + 1) * size, work.device)
            judged = verdict(sampler, (target, draft), SamplingParams(probe.temperature), chance, size)
            counts[name] = torch.bincount(judged.tokens[:, 0], minlength=probe.vocab_size).tolist()
            accepted[name] = int(judged.accepted.sum())
        yield unit, {"draws": size, "accepted": accepted, "counts": counts}


def _uniforms(key: Key, start: int, stop: int, device: str) -> Uniforms:
    """The uniforms of draws `start` to `stop` - 1. They depend on the number of the draw alone, not on its chunk."""
    tokens = key.fold_in("token").uniforms(2 * start, 2 * stop).reshape(-1, 2)
    return Uniforms(*(torch.from_numpy(values).to(device) for values in (tokens, *Noise.of(key, start, stop, 1))))


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

    def joint_target(self) -> torch.Tensor:
        """The target's law of both tokens, float64 (vocabulary * vocabulary,)."""
        return (torch.softmax(self.target.double(), 0)[:, None] * torch.softmax(self.target_next.double(), -1)).flatten()

    def joint_draft(self) -> torch.Tensor:
        """The draft's law of both tokens, float64 (vocabulary * vocabulary,)."""
        return (torch.softmax(self.draft.double(), 0)[:, None] * torch.softmax(self.draft_next.double(), -1)).flatten()

    def marginal(self) -> torch.Tensor:
        """Log-probabilities of the draft's second token without its first one, (vocabulary,)."""
        return torch.log(torch.softmax(self.draft, 0) @ torch.softmax(self.draft_next, -1))


def samplers() -> dict[str, Speculation]:
    """The samplers by name: those of the synthetic probe, block verification, and rejection with a wrong q."""
    single = samplers_by_name(_DRAFTED)
    right = single["speculative_rejection"]
    return {**single, BLOCK: right._replace(rule=rules.reject_block), MARGINAL: right, BASE: right}


@torch.inference_mode()
def tables(probe: RejectionSampling, config: Config, device: str) -> Tables:
    """The laws after the first problem's prompt and `probe.anchor` greedy tokens. Raises UserError."""
    model = config.model.load(device)
    if model.vocab_size > _LARGEST_VOCABULARY:
        raise ConfigError("model", name_of(config.model), f"a vocabulary of at most {_LARGEST_VOCABULARY} tokens with "
                          f"probe.laws=draft, which lists all pairs of tokens; this one has {model.vocab_size}")
    drafter = cast("DFlashDrafter", config.draft.load(model))
    problem = config.dataset.problems()[0]
    prefix = torch.from_numpy(build.prompts(config, model, [problem])[problem.id]).to(device)[None]
    for _ in range(probe.anchor):
        token = model.logits(sequences.read(model, prefix).hidden[:, -1]).argmax(dim=-1)
        prefix = torch.cat([prefix, token[:, None]], dim=1)
    reading = sequences.read(model, prefix, drafter.tapped_layers)
    hidden = _hidden(model, drafter, reading, prefix)
    base, vocabulary = drafter.logits(hidden)[0, :_DRAFTED], model.vocab_size
    every = torch.arange(vocabulary, device=device)
    previous = torch.stack([prefix[0, -1].expand(vocabulary), every], dim=1)
    rows = [value[0, :_DRAFTED].expand(vocabulary, -1, -1) for value in (drafter.logits(hidden), hidden)]
    corrected = drafter.network.along(rows[0], rows[1], previous)
    after = sequences.read(model, torch.cat([prefix.expand(vocabulary, -1), every[:, None]], dim=1)).hidden[:, -1]
    logits = (model.logits(reading.hidden[0, -1]), model.logits(after), corrected[0, 0], corrected[:, 1], base)
    return Tables(*(_processed(each, probe) for each in logits))


def _hidden(model: LanguageModel, drafter: DFlashDrafter, reading: sequences.Reading, prefix: torch.Tensor) -> torch.Tensor:
    """Hidden states (1, drafted tokens, hidden) of the block at the prefix's last token."""
    features = reading.features(model, drafter.tapped_layers)
    length = torch.tensor([prefix.shape[1]], device=prefix.device)
    return sequences.drafted(drafter.network, model, features, prefix, length, length[None] - 1)[0]


def _processed(logits: torch.Tensor, probe: RejectionSampling) -> torch.Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return laws_of.process(rows, SamplingParams(probe.temperature), laws_of.NO_HISTORY).view(logits.shape)


def laws(probe: RejectionSampling, config: Config) -> tuple[np.ndarray, np.ndarray, Callable[[int], str]]:
    """p and q of the counted pairs of tokens and of all other pairs together, float64 (cells,), and the name of a cell."""
    device = config.hardware.resolve()
    known, model = tables(probe, config, device), config.model.load(device)
    pairs, size = _pairs(known), len(known.target)
    joint = [known.joint_target(), known.joint_draft()]
    p, q = (torch.cat([law[pairs], (1.0 - law[pairs].sum()).clamp(min=0.0)[None]]).cpu().numpy() for law in joint)

    def name(cell: int) -> str:
        if cell == len(pairs):
            return "others"
        return "|".join(model.decode(np.array([token])) for token in divmod(int(pairs[cell]), size))

    return p, q, name


def measure(probe: RejectionSampling, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
    """Counts, for each sampler and chunk of draws, how often each pair of tokens is drawn."""
    known, size = tables(probe, config, work.device), probe.chunk_size
    key = Key(config.seed).fold_in("rejection_sampling", "draft")
    pairs, vocabulary = _pairs(known), len(known.target)
    cell = torch.full((vocabulary**2,), len(pairs), device=pairs.device)
    cell[pairs] = torch.arange(len(pairs), device=pairs.device)
    for unit in work:
        counts, accepted, numbers = {}, {}, (unit.chain * size, (unit.chain + 1) * size)
        for name, sampler in samplers().items():
            first, second, kept = _draw(name, sampler, known, key.fold_in(name), numbers, probe.temperature)
            counts[name] = torch.bincount(cell[first * vocabulary + second], minlength=len(pairs) + 1).tolist()
            accepted[name] = kept
        yield unit, {"draws": size, "accepted": accepted, "counts": counts}


def _pairs(known: Tables) -> torch.Tensor:
    """The pairs that are counted, int64 (pairs,): those with the largest p. A pair (a, b) is number a * vocabulary + b."""
    return known.joint_target().argsort(descending=True, stable=True)[:_PAIRS]


def _draw(name: str, sampler: Speculation, known: Tables, key: Key, numbers: tuple[int, int],
          temperature: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """First and second tokens of some draws, int64 (draws,) each, and the sum of their accepted shares."""
    start, stop = numbers
    draws, device = stop - start, known.target.device
    uniforms = key.fold_in("token").uniforms(start * 4, stop * 4).reshape(-1, 4)
    plain = torch.from_numpy(uniforms[:, 3]).to(device)
    chance = Uniforms(*(torch.from_numpy(values).to(device)
                        for values in (uniforms[:, :3].copy(), *Noise.of(key, start, stop, _DRAFTED))))
    first = known.draft.expand(draws, -1)
    head = sampler.draft(laws_of.weigh(first), chance, 0)[:, 0]
    following = known.draft_next[head]
    drafted = torch.stack([head, sampler.draft(laws_of.weigh(following), chance, 1)[:, 0]], dim=1)
    judged = (first, following)
    if name == MARGINAL:
        judged = first, known.marginal().expand(draws, -1)
    if name == BASE:
        judged = known.base[0].expand(draws, -1), known.base[1].expand(draws, -1)
    if sampler.fault.raw_draft:
        judged = first * temperature, following * temperature
    # The token after both drafted ones is the third, which is not counted: any law will do for it.
    after = known.target_next[head]
    target = laws_of.weigh(torch.stack([known.target.expand(draws, -1), after, after], dim=1).flatten(0, 1))
    block = Block(drafted, target, laws_of.weigh(torch.stack(judged, dim=1).flatten(0, 1)),
                  torch.ones(draws, dtype=torch.bool, device=device))
    verdict = sampler.rule(block, chance)
    one = verdict.tokens[:, 0]
    alone = laws_of.draw(laws_of.weigh(known.target_next[one]), plain)[0]
    return one, torch.where(verdict.accepted > 0, verdict.tokens[:, 1], alone), float(verdict.accepted.sum()) / _DRAFTED
