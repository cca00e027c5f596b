"""Packed products, and steps with as many rows as chains, where a comparison on this machine allows both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from dflash_mcmc.engine.batching import float32_head, fused_norms, packed_linear, step_bits
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.packed_linear import PackedLinear
from dflash_mcmc.engine.batching.step_bits import EngineSteps
from dflash_mcmc.rng import Key
from tests.bench.subject import subject_of
from tests.engine.batching.test_batched import power_mh, temperature
from tests.targets import random_model, small_layers_packed

WIDE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=16)
"""Widths for which steps are compared; the models of `targets.py` have others."""
PRECISIONS = [torch.float32, torch.bfloat16]


def wide(family: str = "qwen3", packs: bool = True, **changes) -> LanguageModel:
    return LanguageModel(random_model(family, **{**WIDE, **changes}), stop_ids=(3, 7), packs=packs)


@pytest.fixture(scope="module", autouse=True)
def _small_layers():
    with small_layers_packed():
        yield


@pytest.fixture(scope="module")
def embedded():
    return subject_of("tiny", 24)


def packed(weight: torch.Tensor) -> torch.Tensor:
    found = packed_linear.packed(weight)
    if found is None:
        pytest.skip("this processor has no packed products of this precision that keep bits: weights stay as they are")
    return found


def records(model: LanguageModel, prompts, sampler, slots: int, chains: int) -> tuple[list, BatchedEngine]:
    """Tokens, log p and log q of chains in the order of their numbers, and the engine."""
    longest = max(map(len, prompts))
    engine = BatchedEngine(model, None, slots, longest + 16, prompt_length=longest)
    done = engine.run((number, sampler.chain(prompts[number % len(prompts)], 16, Key(number))) for number in range(chains))
    results = [chain.result.trajectory for chain in sorted(done, key=lambda chain: chain.tag)]
    return [(t.tokens.tolist(), t.log_p.tolist(), t.log_q.tolist()) for t in results], engine


@pytest.mark.parametrize("sampler", [temperature(temperature=0.7, top_p=0.9), power_mh()], ids=["truncated", "power_mh"])
def test_records_of_the_embedded_model_are_those_of_padded_steps(embedded, sampler, monkeypatch):
    prompts = embedded.prompts[:3]
    found = [records(embedded.model, prompts, sampler, slots, 4)[0] for slots in (1, 3, 12)]
    monkeypatch.setattr(step_bits, "free_rows", lambda *given: False)
    padded, engine = records(embedded.model, prompts, sampler, 4, 4)
    assert engine._loop._ladder.row_step == 8
    assert found == [padded] * 3


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_families_have_the_bits_of_padded_steps(family, random_weights, monkeypatch):
    model, prompts = wide(family), [np.arange(5, 17), np.arange(8, 30)]
    found = records(model, prompts, temperature(), 2, 4)[0]
    monkeypatch.setattr(step_bits, "free_rows", lambda *given: False)
    assert found == records(model, prompts, temperature(), 2, 4)[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_has_an_even_number_of_rows_where_the_bits_allow_it(embedded, precision, monkeypatch, random_weights):
    fed, forward = [], ModelRunner.forward
    dtype = getattr(torch, precision)
    model = LanguageModel(random_model("qwen3", **WIDE).to(dtype), stop_ids=(3, 7), packs=True)
    free = step_bits.free_rows(model, EngineSteps(), step_bits.ATTENTION)
    assert free or not packed_linear.is_packed(model.decoder) or precision == "bfloat16"

    def counted(self, cache, rows, tokens, *rest):
        fed.append(tokens.shape)
        return forward(self, cache, rows, tokens, *rest)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    for allowed in (free, False):
        monkeypatch.setattr(step_bits, "free_rows", lambda *given, allowed=allowed: allowed)
        fed.clear()
        records(model, [np.arange(5, 17)], temperature(), 1, 1)
        assert {rows for rows, queries in fed if queries == 1} == {2 if allowed else 8}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (192, 128), (576, 192), (1536, 576), (2560, 512), (33, 17)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(inputs, outputs, biased, dtype):
    """Of 1 to 128 rows, for one and two threads; the values are those of a linear layer."""
    generator, threads = torch.Generator().manual_seed(1), torch.get_num_threads()
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    given, added, rows = packed(weight), bias if biased else None, torch.randn(128, inputs, generator=generator).to(dtype)
    expected = packed_linear.multiply(rows, given, added)
    exact = linear(rows.double(), weight.double(), None if added is None else added.double())
    error = 1e-3 if dtype == torch.float32 else 2**-7 * exact.abs().max()
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=float(error))
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for count in (1, 2, 3, 5, 8, 13, 40, 64, 128):
                for start in (0, (128 - count) // 2):
                    mine = slice(start, start + count)
                    assert torch.equal(packed_linear.multiply(rows[mine].clone(), given, added), expected[mine])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(1, 1, 64), (64,), (3, 2, 64), (1, 64), (0, 64)])
def test_rows_have_any_shape(shape):
    generator = torch.Generator().manual_seed(2)
    weight, bias, rows = (torch.randn(each, generator=generator) for each in ((128, 64), (128,), shape))
    layer = PackedLinear(packed(weight), bias)
    assert (layer.in_features, layer.out_features) == (64, 128)
    torch.testing.assert_close(layer(rows), linear(rows, weight, bias), rtol=0, atol=1e-4)


def test_a_network_is_packed_in_place_and_keeps_its_numbers(random_weights):
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False)),
                                  torch.nn.Linear(64, 1))
    network.append(network[0])  # one layer at two places
    rows, count = torch.randn(4, 64), sum(parameter.numel() for parameter in network.parameters())
    with torch.no_grad():
        expected = network[:3](rows)
        if not packed_linear.pack(network):
            pytest.skip("this processor has no packed products that keep bits")
        torch.testing.assert_close(network[:3](rows), expected)
    assert packed_linear.is_packed(network)
    assert network[0] is network[3]
    assert type(network[2]) is torch.nn.Linear
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.parametrize("wrong", ["rows", "one row"])
def test_products_whose_bits_depend_on_the_number_of_rows_are_found_out(wrong, monkeypatch, random_weights):
    """A last bit is enough. Nothing is packed then, and the head keeps its plain copy."""
    own = packed_linear.multiply

    def other(rows, weight, bias):
        found, count = own(rows, weight, bias), rows.numel() // rows.shape[-1]
        return torch.nextafter(found, torch.tensor(torch.inf)) if count == (1 if wrong == "one row" else 8) else found

    packed(torch.eye(64))
    monkeypatch.setattr(packed_linear, "multiply", other)
    model = wide()
    assert not packed_linear.is_packed(model.decoder)
    assert not model.packs_head
    assert not step_bits.free_rows(model, EngineSteps(), step_bits.ATTENTION)
    assert BatchedEngine(model, None, 1, 40)._loop._ladder.row_step == 8


@pytest.mark.parametrize("wrong", ["draws_agree", "steps_agree"])
def test_a_failed_comparison_leads_to_eights(wrong, monkeypatch, random_weights):
    monkeypatch.setattr(step_bits, wrong, lambda *given: False)
    model = wide()
    assert not step_bits.free_rows(model, EngineSteps(), step_bits.ATTENTION)
    assert BatchedEngine(model, None, 1, 40)._loop._ladder.row_step == 8


@pytest.mark.parametrize("changes", [{"intermediate_size": 48}, {"hidden_size": 96}, {"packs": False}])
def test_widths_with_a_rest_and_plain_products_have_eights(changes, random_weights):
    """A vectorised function computes the rest by other instructions."""
    assert not step_bits.free_rows(wide(**changes), EngineSteps(), step_bits.ATTENTION)


def test_networks_of_small_layers_are_not_packed(monkeypatch, random_weights):
    """The mean size decides: a call costs the same for each layer.."""
    networks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 192)) for _ in range(2)]
    monkeypatch.setattr(packed_linear, "_SMALL", 128 * 64)
    assert not packed_linear.pack(networks[0])
    assert packed_linear.packed(torch.eye(64)) is None
    monkeypatch.setattr(packed_linear, "_SMALL", 128 * 64 - 1)
    packed(torch.zeros(129, 64))
    assert packed_linear.pack(networks[1])


def test_a_model_of_the_user_keeps_its_layers(random_weights):
    model = random_model("qwen3", **WIDE)
    before = [type(module) for module in model.modules()]
    LanguageModel(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_packed_head_has_float32_sums_and_gradients(dtype, random_weights):
    layer = torch.nn.Linear(64, 192).to(dtype)
    head = float32_head.Float32Head(layer)
    packed(layer.weight.float())
    hidden = torch.randn(3, 64).to(dtype).requires_grad_()
    exact = linear(hidden.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        found = head.logits(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    logits = head.logits(hidden)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    logits.sum().backward()
    torch.testing.assert_close(hidden.grad.double(), layer.weight.double().sum(0).expand(3, -1), rtol=0.02, atol=0.02)
    assert float32_head.Float32Head(layer, copied=False).packed is None


def test_a_norm_is_fused_only_if_it_has_the_same_bits(random_weights):
    class OtherRMSNorm(torch.nn.Module):
        """Like a norm of Llama by its attributes. It scales before it divides."""

        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 3, 64)), 1e-6

        def forward(self, rows):
            rows = rows * self.weight
            return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    model = wide(packs=False)
    norms = [module for module in model.decoder.modules() if type(module).__name__ == "Qwen3RMSNorm"]
    with torch.inference_mode():
        found = fused_norms.fused(model.decoder)
        assert set(found) <= set(norms)
        rows = torch.randn(2, 1, model.config.hidden_size)
        assert all(torch.equal(norm(rows[..., : len(module.weight)]), module(rows[..., : len(module.weight)]))
                   for module, norm in found.items())
        assert not fused_norms.fused(torch.nn.Sequential(OtherRMSNorm()))
