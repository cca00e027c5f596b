"""Compares our draft network with loops in float64, and with itself computed in other ways."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape, block_mask, block_pass

pytestmark = pytest.mark.usefixtures("random_weights")
TOLERANCE = 3e-5
SHAPE = DFlashShape(
    # heads · head_dim differs from hidden_size, and no other axis has the size of the features. Swapped axes therefore fail.
    hidden_size=24, num_layers=2, num_heads=4, num_key_heads=2, head_dim=8, intermediate_size=40, block_size=5,
    mask_token_id=7, target_layers=(1, 4, 2), norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 10_000.0},
    max_positions=256, sliding=(None, None),
)
MIXED = dataclasses.replace(SHAPE, num_layers=3, sliding=(4, None, 2), bias=True)
QWEN3_4B = DFlashShape(
    hidden_size=2560, num_layers=5, num_heads=32, num_key_heads=8, head_dim=128, intermediate_size=9728, block_size=16,
    mask_token_id=151669, target_layers=(1, 9, 17, 25, 33), num_target_layers=36, sliding=(None,) * 5,
    rope={"rope_type": "default", "rope_theta": 1e6}, max_positions=40960, dtype=torch.bfloat16,
)


def random_draft(shape: DFlashShape = SHAPE, seed: int = 0) -> DFlash:
    """A random draft in float32. Norms and biases are random too, because a missing one must change the result."""
    draft, generator = DFlash(shape).requires_grad_(False), torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 1.5 * noise * parameter.shape[1] ** -0.5)
    return draft.eval()


def random_inputs(shape: DFlashShape, num_rows: int, m: int, n: int, *batch: int, seed: int = 1):
    """Features (num_rows, m, features · hidden) and embeddings (num_rows, *batch, n, hidden)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, m, len(shape.target_layers) * shape.hidden_size, generator=generator),
            torch.randn(num_rows, *batch, n, shape.hidden_size, generator=generator))


def attend_alone(draft: DFlash, keys: torch.Tensor, values: torch.Tensor):
    """Attention of one block to a context at positions 0 .. m - 1, (layers, rows, key heads, m, dim), masked by hand."""
    m = keys.shape[3]

    def attend(layer, queries, own_keys, own_values):
        window, n = draft.shape.sliding[layer], queries.shape[2]
        all_keys, all_values = torch.cat((keys[layer], own_keys), 2), torch.cat((values[layer], own_values), 2)
        distance = (m + torch.arange(n))[:, None] - torch.arange(m + n)
        seen = distance < m + n if window is None else (distance >= 0) & (distance < window)
        groups = queries.shape[1] // all_keys.shape[1]
        scores = torch.einsum("rhqd,rhkd->rhqk", queries, all_keys.repeat_interleave(groups, 1)) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("rhqk,rhkd->rhqd", weights, all_values.repeat_interleave(groups, 1))

    return attend


def draft_alone(draft: DFlash, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Drafts one block in one call.

    The features (rows, m, ...) are of positions 0 .. m - 1. The embeddings (rows, n, hidden) are of the block after them.
    """
    num_rows, m = features.shape[:2]
    keys, values = draft.keys_values(draft.context(features), torch.arange(m).expand(num_rows, -1))
    positions = (m + torch.arange(embeddings.shape[1])).expand(num_rows, -1)
    return draft(embeddings, positions, attend_alone(draft, keys, values))


def by_the_document(draft: DFlash, features: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """Drafts one row in float64 from the document's equations: features (m, ...), embeddings (n, hidden) -> (n, hidden)."""
    shape, weights = draft.shape, {name: tensor.double().numpy() for name, tensor in draft.state_dict().items()}
    m, n, dim = len(features), len(embeddings), shape.head_dim

    def norm(vector, name):
        return weights[name] * vector / np.sqrt((vector**2).mean() + shape.norm_eps)

    def project(vector, name):
        return weights[f"{name}.weight"] @ vector + weights.get(f"{name}.bias", 0.0)

    def rotated(vector, position):
        result = np.empty(dim)
        for j in range(dim // 2):
            angle = position * shape.rope["rope_theta"] ** (-2 * j / dim)
            x, y = vector[j], vector[j + dim // 2]
            result[j] = x * np.cos(angle) - y * np.sin(angle)
            result[j + dim // 2] = y * np.cos(angle) + x * np.sin(angle)
        return result

    context = [norm(project(row, "fc"), "hidden_norm.weight") for row in features]
    hidden = list(embeddings)
    for layer in range(shape.num_layers):
        prefix, window = f"layers.{layer}", shape.sliding[layer]
        normed = [norm(row, f"{prefix}.input_layernorm.weight") for row in hidden]
        mixed = [np.zeros(shape.num_heads * dim) for _ in range(n)]
        for head in range(shape.num_heads):
            key_head = head * shape.num_key_heads // shape.num_heads
            mine, theirs = slice(head * dim, (head + 1) * dim), slice(key_head * dim, (key_head + 1) * dim)
            keys, values = [], []
            for position, row in enumerate([*context, *normed]):
                key = norm(project(row, f"{prefix}.self_attn.k_proj")[theirs], f"{prefix}.self_attn.k_norm.weight")
                keys.append(rotated(key, position))
                values.append(project(row, f"{prefix}.self_attn.v_proj")[theirs])
            for offset, row in enumerate(normed):
                query = norm(project(row, f"{prefix}.self_attn.q_proj")[mine], f"{prefix}.self_attn.q_norm.weight")
                query, position = rotated(query, m + offset), m + offset
                seen = range(m + n) if window is None else range(max(0, position - window + 1), position + 1)
                scores = np.array([query @ keys[j] / np.sqrt(dim) for j in seen])
                parts = np.exp(scores - scores.max())
                mixed[offset][mine] = sum(part * values[j] for part, j in zip(parts / parts.sum(), seen, strict=True))
        for offset in range(n):
            hidden[offset] = hidden[offset] + project(mixed[offset], f"{prefix}.self_attn.o_proj")
            row = norm(hidden[offset], f"{prefix}.post_attention_layernorm.weight")
            gate = project(row, f"{prefix}.mlp.gate_proj")
            inner = gate / (1 + np.exp(-gate)) * project(row, f"{prefix}.mlp.up_proj")
            hidden[offset] = hidden[offset] + project(inner, f"{prefix}.mlp.down_proj")
    return np.stack([norm(row, "norm.weight") for row in hidden])


@pytest.mark.parametrize("shape", [SHAPE, MIXED], ids=["full", "sliding, bias"])
@pytest.mark.parametrize(("m", "n"), [(9, 5), (1, 2), (0, 5)])
def test_it_is_the_published_network(shape, m, n):
    draft = random_draft(shape)
    features, embeddings = random_inputs(shape, 2, m, n)
    ours = draft_alone(draft, features, embeddings)
    for row in range(2):
        theirs = by_the_document(draft, features[row].double().numpy(), embeddings[row].double().numpy())
        np.testing.assert_allclose(ours[row], theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rope", [
    SHAPE.rope,
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
], ids=lambda rope: rope["rope_type"])
def test_rotations_are_those_of_transformers(rope):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=SHAPE.head_dim, rope_parameters=dict(rope),
                         max_position_embeddings=SHAPE.max_positions)
    positions = torch.arange(40)[None]
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = random_draft(dataclasses.replace(SHAPE, rope=rope)).rotation(positions, torch.float32)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:, 0], other, atol=1e-6, rtol=0)


ANCHORS = torch.tensor([[3, 9, -1, 0, 5], [-1, 1, 2, 6, 3]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [-1, 0, 1, 2, -1, 3, 4, 5, -1]])
"""Positions of the context. The second row is padded before, inside and after."""


def pass_example(shape: DFlashShape, n: int):
    """Draft, features, embeddings, and the arguments of `block_pass`. Padding holds values that would change the results."""
    draft = random_draft(shape)
    features, embeddings = random_inputs(shape, 2, 9, n, 5)
    keys, values = draft.keys_values(draft.context(features), POSITIONS)
    hole = (POSITIONS < 0)[:, None, :, None]
    arguments = (keys.masked_fill(hole, 30.0), values.masked_fill(hole, 1e4), POSITIONS, ANCHORS, embeddings)
    return draft, features, embeddings, arguments


@pytest.mark.parametrize("shape", [SHAPE, MIXED], ids=["full", "sliding, bias"])
@pytest.mark.parametrize("n", [5, 3, 1])
def test_one_pass_is_every_block_alone(shape, n):
    draft, features, embeddings, arguments = pass_example(shape, n)
    together = block_pass(draft, *arguments)
    assert together.shape == (2, 5, n, shape.hidden_size)
    assert together.isfinite().all()
    for row, block in (ANCHORS >= 0).nonzero().tolist():
        context = features[row, (POSITIONS[row] >= 0) & (POSITIONS[row] < ANCHORS[row, block])]
        alone = draft_alone(draft, context[None], embeddings[row, block][None])[0]
        torch.testing.assert_close(together[row, block], alone, atol=TOLERANCE, rtol=0)


def test_autocast_and_bfloat16_are_near_float32():
    draft, features, embeddings, arguments = pass_example(MIXED, 5)
    exact, used = block_pass(draft, *arguments), ANCHORS >= 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys, values = draft.keys_values(draft.context(features), POSITIONS)
        assert keys.dtype == values.dtype == torch.bfloat16
        cast = block_pass(draft, keys, values, POSITIONS, ANCHORS, embeddings)
    draft.to(torch.bfloat16)
    keys, values = draft.keys_values(draft.context(features.bfloat16()), POSITIONS)
    low = block_pass(draft, keys, values, POSITIONS, ANCHORS, embeddings.bfloat16())
    assert low.dtype == torch.bfloat16
    for near in (cast, low):
        assert ((near.float() - exact)[used].norm() / exact[used].norm()) < 0.05


def test_block_mask_by_hand():
    positions, anchors = torch.tensor([[-1, 0, 1, 2, 3, 4, 5]]), torch.tensor([3])
    full = block_mask(positions, anchors, 2, None)
    assert full.int().tolist() == [[[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0]]]
    window = block_mask(positions, anchors, 2, 3)
    assert window.int().tolist() == [[[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0]]]
    many = block_mask(positions, torch.tensor([[3, 0]]), 2, 3)
    assert torch.equal(many[:, 0], window)
    assert many[0, 1].int().tolist() == [[0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0]]


def test_the_published_size():
    with torch.device("meta"):
        draft = DFlash(QWEN3_4B)
    state = draft.state_dict()
    assert len(state) == 58
    assert sum(tensor.numel() for tensor in state.values()) == 537_427_200
    assert state["fc.weight"].shape == (2560, 12800)
    assert state["layers.4.self_attn.q_proj.weight"].shape == (4096, 2560)
    assert state["layers.0.self_attn.k_norm.weight"].shape == (128,)
    assert draft.rotation.frequencies.device.type == "cpu"
    with torch.device("meta"):
        assert len(DFlash(dataclasses.replace(QWEN3_4B, bias=True)).state_dict()) == 58 + 4 * 5
