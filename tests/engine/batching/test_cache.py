"""The record of the tokens in the rows of a chain, the sizes of chunks, and the memory of caches that grow.

What rows hold is compared with fresh forwards in `test_batched.py`.
"""

import subprocess
import sys

import numpy as np
import pytest

from dflash_mcmc.engine.batching.cache import CachedPrefix, assign, chunks


def holding(*tokens) -> CachedPrefix:
    made = CachedPrefix()
    made.hold(np.array(tokens, np.int64))
    return made


def test_the_spare_row_gives_back_what_a_draw_overwrote():
    current = np.array([1, 2, 3, 4, 5, 6])
    kept = holding(*current)
    assert kept.save(current, 3) == (3, 6)
    kept.hold(np.array([1, 2, 3, 9, 9]))  # a rejected proposal; the next proposal is cut at 5
    assert kept.restorable(current[:5], 3) == 5
    kept.hold(current[:5])
    assert kept.save(current, 5) == (5, 3)  # nothing new to copy
    kept.hold(np.array([1, 2, 3, 4, 5, 9]))  # another rejected proposal; the next one is cut before the saved tokens
    assert kept.restorable(current[:2], 2) == 2
    assert kept.save(current, 2) == (2, 3)
    assert kept.saved_from == 2


def test_an_accepted_draw_takes_the_place_of_what_was_kept():
    kept = holding(1, 2, 3, 4)
    kept.save(np.array([1, 2, 3, 4]), 2)
    accepted = np.array([1, 2, 7, 8, 9])
    kept.hold(accepted)
    assert kept.restorable(accepted, 5) == 5
    assert kept.save(accepted, 4) == (4, 5)
    assert kept.saved.tolist() == accepted.tolist()


@pytest.mark.parametrize(("start", "stop", "largest", "expected"), [
    (0, 0, 64, []), (0, 5, 64, [(0, 8)]), (3, 20, 64, [(3, 24)]), (3, 30, 64, [(3, 32)]), (0, 33, 64, [(0, 48)]),
    (0, 70, 64, [(0, 64), (64, 8)]), (0, 12, 64, [(0, 16)]), (0, 100, 32, [(0, 32), (32, 32), (64, 32), (96, 8)])])
def test_chunks_cover_the_span(start, stop, largest, expected):
    assert list(chunks(start, stop, largest)) == expected


def test_a_row_takes_what_it_lacks_from_another_row_and_reads_the_rest():
    mine, other = holding(1, 2, 9), holding(1, 2, 3, 4, 8)
    placed = mine.place(np.array([1, 2, 3, 4, 5, 6]), None, [holding(), other])
    assert placed == (2, 2, 4, 1, (0, 0))
    assert (mine.held.tolist(), mine.filled) == ([1, 2, 3, 4, 5], 4)
    assert other.in_row(np.array([1, 2, 3, 4, 5])) == 4
    mine.filled = len(mine.held)  # the rest is read
    assert mine.in_row(np.array([1, 2, 3, 4, 5])) == 5


def test_what_is_not_yet_read_is_not_copied():
    unread, mine = holding(), holding()
    unread.place(np.array([1, 2, 3]), None, [])
    assert mine.place(np.array([1, 2, 3]), None, [unread]).forked == 0


def test_a_row_for_the_same_tokens_is_copied_as_a_whole():
    first, again = holding(1, 2, 3), holding(1, 2, 7)
    assert again.place(np.array([1, 2, 3, 4]), None, [first], like=0) == (0, 0, 3, 0, (0, 0))


def test_rows_go_to_the_sequences_of_which_they_hold_the_most():
    rows = [holding(1, 2, 3), holding(1, 2), holding(5)]
    sequences = [np.array([1, 2, 4]), np.array([1, 2, 3, 4]), np.array([5, 6])]
    assert dict(assign(rows, sequences)) == {1: 0, 0: 1, 2: 2}
    assert dict(assign(rows[:1], sequences)) == {1: 0}


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
