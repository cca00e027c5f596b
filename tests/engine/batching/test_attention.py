"""Compares our attention with PyTorch's. What models draw with it is in `test_families.py`."""

import pytest
import torch

from dflash_mcmc.engine.batching import attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def example(queries: int, keys: int, key_heads: int = 2):
    generator = torch.Generator().manual_seed(queries)
    query = torch.randn(3, 4, queries, 8, generator=generator)
    key, value = (torch.randn(3, key_heads, keys, 8, generator=generator) for _ in range(2))
    return query, key, value


def fused(query, key, value, mask):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (5, 20), (20, 20)])
def test_grouped_is_fused(queries, keys, key_heads):
    query, key, value = example(queries, keys, key_heads)
    ends = (torch.tensor([[keys], [keys - 3], [queries]]) - queries).clamp(min=0)
    mask = (torch.arange(keys) <= (ends + torch.arange(queries))[..., None])[:, None]
    ours, _ = attention.grouped_attention(None, query, key, value, mask)
    torch.testing.assert_close(ours, fused(query, key, value, mask), atol=1e-5, rtol=0)
    causal, _ = attention.grouped_attention(None, query, key, value, None)
    lower = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    torch.testing.assert_close(causal, fused(query, key, value, lower), atol=1e-5, rtol=0)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_in_tiles_is_grouped(queries, masked, monkeypatch):
    """On any processor; only those with tiles choose it. Keys and values lie as pages are gathered."""
    query, key, value = (x.bfloat16() for x in example(queries, 40))
    key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
    mask = torch.ones(3, 1, queries, 40, dtype=torch.bool).tril(40 - queries) if masked else None
    if masked:
        mask[1, ..., :7] = False
    found = []
    for tiles in (True, False):
        monkeypatch.setattr(attention, "has_tiles", lambda tiles=tiles: tiles)
        found.append(attention.grouped_attention(None, query, key, value, mask, scaling=0.5)[0])
    assert found[0].shape == (3, queries, 4, 8)
    torch.testing.assert_close(*found, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_keeps_scores_of_hundreds(dtype):
    """Scores of Qwen2.5-1.5B reach thousands. In bfloat16 those of 400 would have steps of 2."""
    query, key, value = (x.to(dtype) for x in example(1, 40))
    query, key = query + 12, key + 12
    mask = torch.ones(3, 1, 1, 40, dtype=torch.bool)
    ours, _ = attention.grouped_attention(None, query, key, value, mask)
    exact = fused(*(x.double() for x in (query, key, value)), mask)
    assert (query.double() @ key.double().repeat_interleave(2, dim=1).mT).max() * 8**-0.5 > 400
    torch.testing.assert_close(ours.double(), exact, atol=0.02, rtol=0)


def test_auto_is_what_suits_the_device(monkeypatch):
    assert attention.implementation("auto", CPU) == "grouped"
    for installed, name in ((object(), attention.OWN), (None, "sdpa")):  # Triton
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _, found=installed: found)
        assert attention.implementation("auto", CUDA) == name
