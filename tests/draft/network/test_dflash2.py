"""DFlash 2's convolutions and selector against their formulas, written out; blocks in one pass are blocks alone."""

import numpy as np
import pytest
import torch

from dflash_mcmc.draft.network.dflash import DFlash, block_mask, block_pass
from tests.engine.speculative.slotwise_drafts import random_network, shape_of
from tests.targets import random_model

BLOCK = 4


@pytest.fixture(scope="module")
def network():
    return random_network(shape_of("dflash2", random_model("qwen3"), BLOCK, 60, kernel_size=3, selector_top_k=5))


def test_convolution(network):
    """conv_side(y)_t = sum over taps o of (base[side, o] + D_t[side, o, group]) y_(t-o), with D from the sublayer's input."""
    layer, group = network.layers[0].attention_conv, network.shape.group_size
    u = np.random.default_rng(2).normal(size=(2 * BLOCK, network.shape.hidden_size)).astype(np.float32)
    base, projection = layer.base_kernel.numpy(), layer.kernel_projection.weight.numpy()
    dynamic = (u @ projection.T).reshape(len(u), 2, 3, -1)

    def convolve(y, side):
        out = np.zeros_like(y)
        for t in range(len(y)):
            for o in range(min(3, t % BLOCK + 1)):  # a block does not see the block before it
                out[t] += (base[side, o] + np.repeat(dynamic[t, side, o], group)) * y[t - o]
        return out

    expected = convolve(np.tanh(convolve(u, 0)), 1)
    found = layer(torch.from_numpy(u)[None], torch.tanh)[0].numpy()
    assert np.abs(found - expected).max() < 1e-4


def test_selector(network):
    numbers, shape, selector = np.random.default_rng(3), network.shape, network.candidate_selector
    base, hidden = (numbers.normal(size=(2, n)).astype(np.float32) for n in (shape.vocab_size, shape.hidden_size))
    previous = np.array([7, 30])
    found = network.corrected(*(torch.from_numpy(x) for x in (base, hidden, previous)), None)[0].numpy()
    for row in range(2):
        pair = selector.predecessor_codebook.numpy()[previous[row]] * (selector.hidden_projection.weight.numpy() @ hidden[row])
        candidates = np.argsort(-base[row])[:5]
        assert set(np.flatnonzero(np.isfinite(found[row]))) == set(candidates)
        for token in candidates:
            assert abs(found[row, token] - base[row, token] - pair @ selector.successor_codebook.numpy()[token]) < 1e-4


def test_one_pass_is_every_block_alone(network):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 1, 2, 9, 8, generator=generator) for _ in range(2))
    positions, anchors = torch.arange(9)[None], torch.tensor([[3, 5, 8]])
    embeddings = torch.randn(1, 3, BLOCK, 32, generator=generator)
    together = block_pass(network, keys, values, positions, anchors, embeddings)
    for number in range(3):
        alone = block_pass(network, keys, values, positions, anchors[:, number : number + 1],
                           embeddings[:, number : number + 1])
        assert torch.allclose(together[:, number], alone[:, 0], atol=1e-5)


def test_identity_convolutions_are_dflash(network):
    shape = shape_of("dflash2", random_model("qwen3"), BLOCK, 60)
    with torch.random.fork_rng():
        plain = DFlash(shape).eval().requires_grad_(False)
    convolved = random_network(shape)
    plain.load_state_dict({name: value for name, value in convolved.state_dict().items() if name in plain.state_dict()})
    for module in convolved.modules():
        if hasattr(module, "base_kernel"):
            module.base_kernel.zero_()[:, 0] = 1.0
            module.kernel_projection.weight.zero_()
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 1, 2, 6, 8, generator=generator) for _ in range(2))
    given = (keys, values, torch.arange(6)[None], torch.tensor([[4]]), torch.randn(1, 1, BLOCK, 32, generator=generator))
    assert torch.allclose(block_pass(convolved, *given), block_pass(plain, *given), atol=1e-6)


@pytest.mark.parametrize(("window", "causal", "seen"), [
    (None, None, [0, 1, 2, 3, 4, 5, 6]), (None, True, [0, 1, 2, 3, 4]), (3, None, [2, 3, 4]), (3, False, [2, 3, 4, 5, 6]),
    (2, False, [3, 4, 5])])
def test_what_a_row_sees(window, causal, seen):
    """The row at position 4 of a block of 4 after the anchor 3."""
    mask = block_mask(torch.arange(9)[None], torch.tensor([3]), BLOCK, window, causal)[0, 1]
    assert mask.nonzero().flatten().tolist() == seen
