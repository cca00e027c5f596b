"""Compares `probe=speculative_mcmc` with a simple script that loops over answers and blocks."""

from __future__ import annotations

import time

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import DEFAULTS
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.probe.speculative_mcmc import PROPOSALS, SpeculativeMCMC
from dflash_mcmc.probe.speculative_mcmc.weighing import Timing
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.bench.measure import Sizes
from tests.bench.subject import Subject

_SAMPLES, _ALPHA, _TIMED_ROWS = 100, 4.0, 8
"""Defaults of the probe."""
_ALONE, _DEFAULTS = "drafts and weights", "drafts, weights, target's own blocks, timing"


def blocks_per_second(subject: Subject, sizes: Sizes) -> list[dict]:
    """(k) `probe=speculative_mcmc` compared with a loop over blocks, on the same problems.

    The probe and the loop both compute greedy answers, drafts and weights. The last row measures the probe with its defaults,
    which also draw blocks from the target and time both proposals. It has as many problems as the row before it, but no loop
    to compare with.
    """
    if subject.draft is None:
        return []
    drafter, rows = subject.draft.load(subject.model), []
    for weights, theirs in (("reference", 2 * sizes.loop_chains), ("joint", sizes.loop_chains)):
        loop_blocks, loop_seconds = _loop(subject, drafter, weights, theirs)
        for share, ours in ((True, 30 * sizes.loop_chains), (False, 3 * sizes.loop_chains))[: 1 + (weights == "joint")]:
            blocks, seconds = _probe(subject, drafter, _probe_of(weights, share), ours, sizes.slots)
            rows.append({**_row(weights, share, _ALONE, blocks, seconds),
                         "loop blocks": loop_blocks, "loop blocks/s": loop_blocks / loop_seconds,
                         "faster": blocks / seconds * loop_seconds / loop_blocks})
    whole = _probe_of("joint", True, autoregressive=True, timed_rows=_TIMED_ROWS)
    return [*rows, _row("joint", True, _DEFAULTS, *_probe(subject, drafter, whole, 3 * sizes.loop_chains, sizes.slots))]


def _row(weights: str, share_prefixes: bool, measured: str, blocks: int, seconds: float) -> dict:
    return {"weights": weights, "share_prefixes": share_prefixes, "measured": measured, "blocks": blocks,
            "blocks/s": blocks / seconds}


def _probe_of(weights: str, share_prefixes: bool, autoregressive: bool = False, timed_rows: int = 0) -> SpeculativeMCMC:
    return SpeculativeMCMC(alpha=_ALPHA, draft_temperatures=None, num_samples=_SAMPLES, weights=weights,
                           autoregressive=autoregressive, share_prefixes=share_prefixes, timed_rows=timed_rows,
                           chain_steps=10, position_edges=[10, 30])


def _probe(subject: Subject, drafter: DFlashDrafter, probe: SpeculativeMCMC, problems: int, slots: int) -> tuple[int, float]:
    prompts = subject.prompts[:problems]
    engine = BatchedEngine(subject.model, None, min(slots, problems), max(map(len, prompts)) + subject.horizon)

    def chain(prompt: np.ndarray):
        return ChainResult((yield Draw(Trajectory.start(prompt), subject.horizon, SamplingParams(temperature=0.0), Key(0))))

    timing = (Timing(DEFAULTS, subject.model, drafter, probe.timed_rows, 1.0 / probe.alpha, PROPOSALS)
              if probe.timed_rows else None)
    started, blocks = time.perf_counter(), 0
    finished = engine.run((number, chain(prompt)) for number, prompt in enumerate(prompts))
    for done in tqdm(finished, f"{subject.name} probe, {probe.weights}", problems, leave=False, unit="problem"):
        answer = Answer(prompts[done.tag], done.result.trajectory.tokens)
        if answer.skipped(drafter.num_drafted + 1) is None:
            blocks += probe.record(subject.model, drafter, answer, Key(done.tag))["blocks"]
            if timing is not None:
                timing.of(answer)
    return blocks, time.perf_counter() - started


@torch.inference_mode()
def _loop(subject: Subject, drafter: DFlashDrafter, weights: str, problems: int) -> tuple[int, float]:
    started, blocks = time.perf_counter(), 0
    for prompt in tqdm(subject.prompts[:problems], f"{subject.name} loop, {weights}", leave=False, unit="problem"):
        blocks += _answer(subject, drafter, torch.from_numpy(prompt)[None], weights)
    return blocks, time.perf_counter() - started


def _answer(subject: Subject, drafter: DFlashDrafter, prompt: torch.Tensor, weights: str) -> int:
    """Sections 2.1 and 2.2 of the probe's source document, for one problem. Returns the number of blocks."""
    stops = list(subject.model.stop_ids)
    settings = GenerationConfig(max_new_tokens=subject.horizon, do_sample=False, eos_token_id=stops, pad_token_id=stops[0])
    tokens = subject.causal_lm.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    read = subject.causal_lm(tokens, output_hidden_states=True, use_cache=False)
    network, size = drafter.network, drafter.num_drafted + 1
    features = torch.cat([read.hidden_states[layer + 1] for layer in network.shape.target_layers], dim=-1)
    cached: tuple[torch.Tensor, torch.Tensor] | None = None
    blocks = range(prompt.shape[1], tokens.shape[1] - size + 1, size)
    for anchor in blocks:
        start = cached[0].shape[3] if cached else 0
        keys, values = network.keys_values(network.context(features[:, start:anchor]), torch.arange(start, anchor)[None])
        if cached:
            keys, values = torch.cat([cached[0], keys], dim=3), torch.cat([cached[1], values], dim=3)
        cached = keys, values
        draft = _draft(subject, drafter, keys, values, tokens, anchor)
        _block(subject, tokens, anchor, read.logits[0, anchor : anchor + size - 1], draft, weights)
    return len(blocks)


def _draft(subject: Subject, drafter: DFlashDrafter, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor,
           anchor: int) -> torch.Tensor:
    """Logits of the draft for a block, (block_size - 1, vocabulary), from the cached context."""
    network, size = drafter.network, drafter.num_drafted + 1
    given = torch.full((1, size), network.shape.mask_token_id)
    given[0, 0] = tokens[0, anchor]

    def attend(layer, queries, own_keys, own_values):
        return torch.nn.functional.scaled_dot_product_attention(
            queries, torch.cat([keys[layer], own_keys], dim=2), torch.cat([values[layer], own_values], dim=2), enable_gqa=True)

    embeddings = subject.causal_lm.get_input_embeddings()(given)
    hidden = network(embeddings, torch.arange(anchor, anchor + size)[None], attend)
    return subject.causal_lm.lm_head(hidden[0, 1:])


def _block(subject: Subject, tokens: torch.Tensor, anchor: int, target: torch.Tensor, draft: torch.Tensor,
           weights: str) -> None:
    """Computes metrics, samples, weights and a chain at each temperature."""
    log_p = torch.log_softmax(target, dim=-1)
    sharp = torch.softmax(_ALPHA * target, dim=-1)
    for temperature in (1.0, 0.5, 1.0 / _ALPHA):
        q = torch.softmax(draft / temperature, dim=-1)
        log_q = q.clamp(min=1e-30).log()
        for a, b, log_b in zip(sharp, q, log_q, strict=True):  # KL, total variation and acceptance at each position
            (a * (a.clamp(min=1e-30).log() - log_b)).sum().item()
            1.0 - 0.5 * (a - b).abs().sum().item()
        drawn = torch.multinomial(q, _SAMPLES, replacement=True)  # noqa: TID251  (a script would use it)
        own = log_p.gather(1, drawn).sum(dim=0)
        if weights == "joint":
            rows = torch.cat([tokens[:, : anchor + 1].expand(_SAMPLES, -1), drawn.T], dim=1)
            logits = subject.causal_lm(rows, use_cache=False).logits[:, anchor:-1]
            own = torch.log_softmax(logits, dim=-1).gather(2, drawn.T[..., None]).sum(dim=(1, 2))
        log_w = (_ALPHA * own - log_q.gather(1, drawn).sum(dim=0)).tolist()
        state = log_w[0]
        for proposal in log_w[1:]:
            if torch.rand(()).log().item() < proposal - state:  # noqa: TID251
                state = proposal
