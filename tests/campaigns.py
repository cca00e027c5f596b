"""Many draws of a decoder on the batched engine, and tests whether they have the law of plain decoding."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.engine.speculative.speculation import Speculation
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.speculative.test_speculator import network
from tests.laws import conditional

_EXPECTED = 5.0
"""Smallest expected count of a cell in a chi-square test."""


def random_drafter(parts: LanguageModel, model: torch.nn.Module, mask: int) -> DFlashDrafter:
    """A drafter of three tokens per block with an untrained network. `mask` is the token id that the network uses as mask."""
    draft = network(model, block_size=4)
    draft.shape = dataclasses.replace(draft.shape, mask_token_id=mask)
    return DFlashDrafter(draft, parts, 4)


def drawn(model: LanguageModel, speculation: Speculation | None, prompts: Sequence[np.ndarray], law: SamplingParams,
          horizon: int, key: Key, num_slots: int, repeats: int = 1) -> list[tuple[int, ...]]:
    """Answers to every prompt: `repeats` answers per prompt, with independent keys."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}

    def chain(number: int, prompt: np.ndarray):
        for repeat in range(repeats):
            path = yield Draw(Trajectory.start(prompt), horizon, law, key.fold_in(number, repeat))
            found[number, repeat] = tuple(path.tokens.tolist())
        return ChainResult(path)

    longest = max(map(len, prompts))
    engine = BatchedEngine(model, NoBlend(), num_slots, longest + horizon, Options(), longest, speculation)
    assert all(done.result for done in engine.run((n, chain(n, prompt)) for n, prompt in enumerate(prompts)))
    return [found[place] for place in sorted(found)]


def exact_law(model: torch.nn.Module, prompt: Sequence[int], law: SamplingParams, horizon: int,
              stops: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Probability of every complete sequence, from the model's own forward and the law in `tests/laws.py`."""
    complete, open_ones = {}, {(): 1.0}
    for length in range(1, horizon + 1):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens] for tokens in open_ones])).logits[:, -1].tolist()
        longer = {(*tokens, token): open_ones[tokens] * p for tokens, row in zip(open_ones, logits, strict=True)
                  for token, p in conditional(row, (*prompt, *tokens), **law._asdict()).items()}
        complete.update({t: p for t, p in longer.items() if t[-1] in stops or length == horizon})
        open_ones = {t: p for t, p in longer.items() if t not in complete}
    return complete


def chi_square(found: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p-value. Cells with small expected counts are pooled. It is 0 if a sequence was found that the law excludes."""
    counts = Counter(found)
    if counts.keys() - law.keys():
        return 0.0
    cells = sorted(((len(found) * p, counts[tokens]) for tokens, p in law.items()), reverse=True)
    large = sum(expected >= _EXPECTED for expected, _ in cells)
    if sum(expected for expected, _ in cells[large:]) < _EXPECTED:
        large -= 1
    expected, observed = (np.append(column[:large], column[large:].sum()) for column in np.array(cells).T)
    return float(scipy.stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
