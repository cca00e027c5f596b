"""Rows of different lengths in a KV cache give the logits of fresh forwards, also after a roll-back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dflash_mcmc.engine.batching.cache import KVCache, cache_argument
from dflash_mcmc.engine.batching.language_model import LanguageModel
from tests.targets import FAMILIES, random_model


def feed(model, cache, rows, tokens, positions):
    """Runs one forward of tokens (rows, queries) at the given positions. Returns the logits."""
    key_length = int(positions.max()) + 1
    index = torch.arange(rows.stop) if isinstance(rows, slice) else rows
    cache.aim(rows, positions, key_length)
    mask = (torch.arange(key_length) <= positions[..., None])[:, None]
    assert len(index) == len(tokens)
    cached = {cache_argument(model): cache, "use_cache": True}
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions, **cached).logits


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_ragged_rows_and_roll_back_equal_fresh_forwards(family):
    model, lengths = random_model(family), [3, 11, 7]
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 61, (length + 4,), generator=generator) for length in lengths]
    cache = KVCache(LanguageModel(model).cache_shape, 4, 64)
    for row, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        feed(model, cache, torch.tensor([row]), sequence[None, :length], torch.arange(length)[None])
    # Feeds two wrong tokens, then goes back to the right ones. Entries above a position must never be read.
    for offset in (0, 1):
        wrong = torch.tensor([[60], [59], [58]])
        feed(model, cache, slice(0, 3), wrong, torch.tensor(lengths)[:, None] + offset)
    for offset in range(4):
        tokens = torch.stack([s[n + offset] for n, s in zip(lengths, sequences, strict=True)])[:, None]
        logits = feed(model, cache, slice(0, 3), tokens, torch.tensor(lengths)[:, None] + offset)
        for row, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
            fresh = model(input_ids=sequence[None, : length + offset + 1]).logits[0, -1]
            scale = fresh.abs().max()
            assert (logits[row, 0] - fresh).abs().max() / scale < 1e-5


@torch.inference_mode()
def test_a_copied_row_goes_on_as_before():
    model = random_model()
    cache, spare = (KVCache(LanguageModel(model).cache_shape, 4, 64) for _ in range(2))
    tokens = torch.arange(8)[None]
    feed(model, cache, torch.tensor([2]), tokens, torch.arange(8)[None])
    spare.copy(cache, 2, 3, 2, 8)
    cache.copy(cache, 2, 0, 0, 2)
    cache.copy(spare, 3, 0, 2, 8)
    logits = feed(model, cache, slice(0, 1), torch.tensor([[9]]), torch.tensor([[8]]))
    fresh = model(input_ids=torch.cat([tokens, torch.tensor([[9]])], dim=1)).logits[0, -1]
    assert (logits[0, 0] - fresh).abs().max() / fresh.abs().max() < 1e-5


@torch.inference_mode()
def test_a_cache_that_grows_goes_on_as_before():
    model = random_model()
    cache = KVCache(LanguageModel(model).cache_shape, 2, 8)
    tokens = torch.arange(9)[None]
    feed(model, cache, torch.tensor([1]), tokens[:, :8], torch.arange(8)[None])
    cache.reserve(8)
    assert cache.length == 8
    cache.reserve(16)
    logits = feed(model, cache, torch.tensor([1]), tokens[:, 8:], torch.tensor([[8]]))
    fresh = model(input_ids=tokens).logits[0, -1]
    assert (logits[0, 0] - fresh).abs().max() / fresh.abs().max() < 1e-5


def test_bytes_of_a_token_are_those_of_the_tensors():
    shape = LanguageModel(random_model()).cache_shape
    cache = KVCache(shape, 4, 64)
    assert cache.keys.nbytes + cache.values.nbytes == 4 * 64 * shape.token_bytes()
    assert shape.token_bytes() == 3 * 2 * (8 + 8) * 4  # layers, key heads, dimensions, float32


def test_a_growing_cache_gives_its_old_memory_back():
    """Two caches that grow in turn hold what they have, and not the holes that they leave."""
    program = """if 1:
        import psutil
        import torch
        from dflash_mcmc.engine.batching.cache import CacheShape, KVCache
        from dflash_mcmc.process import machine
        machine.keep_memory()
        torch.set_num_threads(1)
        before = psutil.Process().memory_info().rss
        caches = [KVCache(CacheShape(12, 4, 32, 32, torch.float32), 32, 64) for _ in range(2)]
        records = []
        for length in range(128, 641, 64):
            for cache in caches:
                cache.reserve(length)
                logits = [torch.ones(32, 2**15) for _ in range(4)]
                records.append(torch.ones(2**11))
                del logits
        held = sum(memory.nbytes for cache in caches for memory in (cache.keys, cache.values))
        print((psutil.Process().memory_info().rss - before) / held)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.4
