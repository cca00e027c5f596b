"""Logits have float32 precision with and without a float32 copy of the head's weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash_mcmc.engine.batching.linear import Float32Head
from tests.targets import rows_do_not_depend_on_the_batch


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def linear(request):
    return SimpleNamespace(weight=0.1 * noise(20_000, 96), bias=0.1 * noise(20_000) if request.param else None)


def test_log_p_hardly_depends_on_the_copy(linear):
    hidden = 3 * noise(5, 2, 96)
    bias = 0 if linear.bias is None else linear.bias.double()
    exact = (hidden.double() @ linear.weight.double().T + bias).log_softmax(dim=-1)
    for copied in (True, False, None):
        head = Float32Head(linear, copied)
        held = head.weight if head.prepared is None else head.prepared
        assert held.dtype == (torch.bfloat16 if copied is False else torch.float32)
        log_p = head.logits(hidden).double().log_softmax(dim=-1)
        assert log_p.shape == (5, 2, 20_000)
        assert (log_p - exact).abs().max() < 2e-5
    # Sums in bfloat16 show that the bound is not trivial.
    rounded = torch.nn.functional.linear(hidden, linear.weight, linear.bias).double().log_softmax(dim=-1)
    assert (rounded - exact).abs().max() > 2e-3


def test_forbidden_tokens_and_single_states(linear):
    for copied in (True, False):
        head = Float32Head(linear, copied)
        head.forbid([3, 19_999])
        logits = head.logits(noise(96))
        assert logits.shape == (20_000,)
        assert logits.isneginf().nonzero().flatten().tolist() == [3, 19_999] == head.forbidden.nonzero().flatten().tolist()


def test_weights_in_float32_are_copied_only_to_be_packed():
    linear = SimpleNamespace(weight=torch.ones(12, 8), bias=None)
    assert Float32Head(linear, True).weight.data_ptr() == linear.weight.data_ptr() == Float32Head(linear).weight.data_ptr()
    assert Float32Head(linear, False).prepared is None


def test_pieces_of_the_weights_do_not_make_a_row_depend_on_the_batch():
    head, hidden = Float32Head(SimpleNamespace(weight=0.1 * noise(5_000, 640), bias=None), False), noise(40, 640)
    whole = head.logits(hidden)
    for start in range(0, 40, 8):
        tolerance = 0.0 if rows_do_not_depend_on_the_batch() else 1e-5
        torch.testing.assert_close(head.logits(hidden[start : start + 8]), whole[start : start + 8], rtol=0, atol=tolerance)
