"""The memory of KV caches that grow. What their rows hold is compared with fresh forwards in `test_batched.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
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
