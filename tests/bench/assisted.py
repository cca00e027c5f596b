"""Compares the engine's speculation with `generate(assistant_model=...)` of `transformers`, for the same draft.

The class for DFlash in `transformers` has the same weights, two of them under other names.
`tests/draft/network/test_dflash.py` checks this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import GenerationConfig

from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.sampler.greedy import Greedy
from tests.bench.measure import PLAIN, TURNS, Decoding, Sizes, result_of, run, temperature
from tests.bench.subject import Subject

_RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


class Generated(NamedTuple):
    """Answers that were generated one after the other."""

    seconds: float
    tokens: list[list[int]]
    rounds: int
    """Forwards of the target, without those that read a prompt."""
    by_rounds: int
    """Tokens that these forwards produced."""

    @property
    def per_second(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def against_transformers(subject: Subject, sizes: Sizes) -> list[dict]:
    """(j) Comparison with `generate(assistant_model=...)` of transformers for the same draft, one chain at a time."""
    if not subject.draft:
        return []
    theirs, reason = assistant(subject.draft.network(subject.model, packs=False))
    return [row for value in (0.0, 1.0) for row in _at(subject, sizes.decoder_chains, value, theirs, reason)]


def _at(subject: Subject, chains: int, value: float, theirs: torch.nn.Module | None, reason: str) -> list[dict]:
    """Table rows at a temperature. Greedy tokens should equal those of plain `generate`. Sampled tokens can still differ."""
    law, sampler = (f"temperature {value:g}", temperature(value)) if value else ("greedy", Greedy(alpha=1.0))
    cases: dict[str, Callable[[range], Generated]] = {"generate": partial(_generate, subject, value, None)}
    if theirs:
        cases["generate, assisted"] = partial(_generate, subject, value, theirs)
    for decoding in _ours(subject):
        cases[decoding.name] = partial(_drawn, subject, sampler, decoding)
    found = _in_turn(cases, chains)
    rows, plain = [], found["generate"]
    for name, got in found.items():
        own = found["engine, plain"] if name.startswith("engine") else plain
        same = [a == b for a, b in zip(got.tokens, plain.tokens, strict=True)]
        rows.append({"by": name, "law": law, "tokens/round": got.by_rounds / max(1, got.rounds), "tokens/s": got.per_second,
                     "against own plain": got.per_second / own.per_second,
                     "against generate": got.per_second / plain.per_second,
                     "same tokens": None if value else sum(same) / len(same)})
    if not theirs:
        rows.insert(1, {"by": f"generate, assisted: {reason}", "law": law})
    return rows


def _in_turn(cases: dict[str, Callable[[range], Generated]], chains: int) -> dict[str, Generated]:
    """Runs all cases over the same problems, in several turns."""
    count = -(-chains // TURNS)
    turns = [{name: case(range(turn * count, (turn + 1) * count)) for name, case in cases.items()} for turn in range(TURNS)]
    found = {}
    for name in cases:
        seconds, tokens, rounds, by_rounds = zip(*(turn[name] for turn in turns), strict=True)
        found[name] = Generated(sum(seconds), [one for some in tokens for one in some], sum(rounds), sum(by_rounds))
    return found


def assistant(network: DFlash) -> tuple[torch.nn.Module | None, str]:
    """(the draft as a model of transformers, ""), or (None, the reason why transformers cannot run it)."""
    shape = network.shape
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        return None, f"transformers {transformers.__version__} has no DFlash network"
    if set(shape.sliding) != {None} or shape.bias or (shape.embedding_scale, shape.logit_scale, shape.logit_softcap) != (
            1.0, 1.0, None):
        return None, "its class supports no sliding windows, biases or scales"
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_key_heads, head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps, rope_parameters=dict(shape.rope), max_position_embeddings=shape.max_positions,
        layer_types=["full_attention"] * shape.num_layers, block_size=shape.block_size, mask_token_id=shape.mask_token_id,
        target_layer_ids=list(shape.target_layers))
    model = transformers.MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    model.load_state_dict({_RENAMED.get(name, name): tensor for name, tensor in network.state_dict().items()})
    return model, ""


def _ours(subject: Subject) -> list[Decoding]:
    """Plain decoding, the recommended decoder, and the verification rule of `transformers`."""
    match = SpeculativeMatch(draft_temperature=0.0, trace=False, fault=None, fault_window=None)
    reject = SpeculativeRejection(draft_temperature=None, verification="token", trace=False, fault=None)
    return [PLAIN._replace(name="engine, plain"), Decoding("engine, match", match, subject.draft),
            Decoding("engine, rejection", reject, subject.draft)]


def _generate(subject: Subject, value: float, draft: torch.nn.Module | None, numbers: range) -> Generated:
    """Answers of `generate`; their tokens depend on PyTorch's random generator."""
    settings = GenerationConfig(
        max_new_tokens=subject.horizon, do_sample=value > 0, temperature=value or None, top_k=0 if value else None,
        eos_token_id=list(subject.model.stop_ids), pad_token_id=0, **({"speculation_type": "dflash"} if draft else {}))

    def generate(number: int) -> list[int]:
        prompt = torch.from_numpy(subject.prompts[number % len(subject.prompts)])[None]
        drawn = subject.causal_lm.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings,
                                           **({"assistant_model": draft} if draft else {}))
        return drawn[0, prompt.shape[1] :].tolist()

    torch.manual_seed(Key(0).fold_in("bench", "generate", numbers.start).integer(2**31))
    generate(numbers.start)
    label = f"{subject.name} generate{', assisted' if draft else ''}"
    with _Counted(subject.causal_lm) as counted:
        started = time.perf_counter()
        tokens = [generate(number) for number in tqdm(numbers, desc=label, unit="chain", mininterval=1.0, leave=False)]
        seconds = time.perf_counter() - started
    count = len(numbers)  # the forward that reads a prompt produces a token too
    return Generated(seconds, tokens, counted.forwards - count, sum(map(len, tokens)) - count)


def _drawn(subject: Subject, sampler: Sampler, decoding: Decoding, numbers: range) -> Generated:
    """Answers of the engine, in the order of their problems."""
    got = run(subject, sampler, 1, len(numbers), label=decoding.name, decoding=decoding, first=numbers.start)
    tokens = [result_of(chain).trajectory.tokens.tolist() for chain in sorted(got.done, key=lambda chain: chain.tag)]
    count = sum(map(len, tokens))
    return Generated(got.seconds, tokens, sum(chain.cost.blocks_drafted for chain in got.done) or count, count)


class _Counted:
    """A context that counts the forwards of a model."""

    def __init__(self, model: torch.nn.Module):
        self._model, self.forwards = model, 0

    def __enter__(self) -> _Counted:
        self._handle = self._model.register_forward_hook(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _count(self, *call: object) -> None:
        self.forwards += 1
