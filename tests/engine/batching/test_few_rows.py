"""Steps of fewer than eight rows have the bits of eight, where a comparison on this machine says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from dflash_mcmc.engine.batching import few_rows, few_rows_bits, fused_norms, joint_product, piecewise_product
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.piecewise_product import PiecewiseProduct
from dflash_mcmc.rng import Key
from tests.bench.subject import subject_of
from tests.engine.batching.test_batched import power_mh, temperature
from tests.targets import random_model

WIDE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=16)
"""Widths that few rows are made for; the models of `targets.py` have others."""


def wide(family: str = "qwen3", **changes) -> LanguageModel:
    return LanguageModel(random_model(family, **{**WIDE, **changes}), stop_ids=(3, 7))


@pytest.fixture(scope="module")
def embedded():
    return subject_of("tiny", 24)


def records(model: LanguageModel, prompts, sampler, slots: int, chains: int, few: bool) -> tuple[list, BatchedEngine]:
    """Tokens, log p and log q of chains in the order of their numbers, and the engine."""
    longest = max(map(len, prompts))
    engine = BatchedEngine(model, None, slots, longest + 16, Options(few_rows=few), longest)
    done = engine.run((number, sampler.chain(prompts[number % len(prompts)], 16, Key(number))) for number in range(chains))
    results = [chain.result.trajectory for chain in sorted(done, key=lambda chain: chain.tag)]
    return [(t.tokens.tolist(), t.log_p.tolist(), t.log_q.tolist()) for t in results], engine


@pytest.mark.parametrize("sampler", [temperature(temperature=0.7, top_p=0.9), power_mh()],
                         ids=["truncated", "power_mh"])
def test_records_of_the_embedded_model_are_the_same_to_the_last_bit(embedded, sampler):
    prompts = embedded.prompts[:3]
    expected, _ = records(embedded.model, prompts, sampler, 8, 4, few=False)
    for slots in (1, 3):
        assert records(embedded.model, prompts, sampler, slots, 4, few=True)[0] == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_families_have_the_same_bits_or_eights(family, random_weights):
    model = wide(family)
    prompts = [np.arange(5, 17), np.arange(8, 30)]
    on, engine = records(model, prompts, temperature(), 2, 4, few=True)
    assert on == records(model, prompts, temperature(), 2, 4, few=False)[0]
    runner = engine._memory.runner
    assert runner.few_rows is few_rows.of(model, few_rows.EngineSteps(2))


def test_a_step_has_as_many_rows_as_chains_where_the_bits_allow_it(embedded, monkeypatch):
    fed = []
    forward = BatchedEngine.__init__.__globals__["ModelRunner"].forward

    def counted(self, cache, rows, tokens, *rest):
        fed.append(tokens.shape)
        return forward(self, cache, rows, tokens, *rest)

    monkeypatch.setattr(BatchedEngine.__init__.__globals__["ModelRunner"], "forward", counted)
    for few, padded in ((True, few_rows.of(embedded.model, few_rows.EngineSteps(1)) is None), (False, True)):
        engine = BatchedEngine(embedded.model, None, 1, 100, Options(few_rows=few), 76)
        fed.clear()
        list(engine.run([(0, temperature().chain(embedded.prompts[0], 4, Key(0)))]))
        assert {rows for rows, queries in fed if queries == 1} == {8 if padded else 1}


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (192, 128), (256, 64), (576, 192), (1536, 128), (300, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_that_is_found_has_the_bits_of_eight_rows(inputs, outputs, biased):
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    product = piecewise_product.find(weight, bias if biased else None, 7)
    if product is None:
        pytest.skip("this processor sums eight rows in another order: steps have eight rows here")
    rows = torch.randn(40, inputs, generator=generator)
    expected = linear(rows, weight, bias if biased else None)
    for count in range(1, 8):
        for start in range(0, 40 - count, 5):
            given = rows[start : start + count]
            assert torch.equal(product(given, bias if biased else None), expected[start : start + count])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("piece", [32, 48, 96])
def test_a_product_is_the_sum_of_its_pieces(piece, count, monkeypatch):
    """In float64 arithmetic, to rounding; for several parts of the outputs too."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(256, 96, generator=generator), torch.randn(256, generator=generator)
    rows = torch.randn(count, 96, generator=generator)
    exact = rows.double() @ weight.double().t() + bias.double()
    whole = PiecewiseProduct(weight, piece)(rows, bias)
    monkeypatch.setattr(piecewise_product, "_num_parts", lambda *given: 4)
    parts = PiecewiseProduct(weight, piece)(rows, bias)
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=1e-4)


def test_another_order_of_the_sums_is_found_out():
    """Pieces of another length give other bits, and the comparison sees them."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(128, 576, generator=generator)
    product = piecewise_product.find(weight, None, 3)
    other = PiecewiseProduct(weight, 64 if product is None or product.piece != 64 else 96)
    assert not piecewise_product.agrees(other, weight, None, 3, range(3))


def test_layers_of_one_input_are_computed_together_only_for_the_same_tensor():
    generator = torch.Generator().manual_seed(4)
    layers = [torch.nn.utils.skip_init(torch.nn.Linear, 64, size, bias=False) for size in (64, 128)]
    with torch.inference_mode():
        for layer in layers:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        joint = joint_product.JointProduct(layers, 64)
        first, second = (torch.randn(2, 64, generator=generator) for _ in range(2))
        for given in ((first, first), (first, second), (second, first)):
            for number, (layer, rows) in enumerate(zip(layers, given, strict=True)):
                torch.testing.assert_close(joint.of_layer(number, rows), layer(rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("wrong", ["draws_agree", "steps_agree", "products"])
def test_a_failed_comparison_leads_to_eights(wrong, monkeypatch, random_weights):
    model = wide()
    monkeypatch.setattr(few_rows if wrong == "products" else few_rows_bits, wrong, lambda *given: None)
    assert few_rows.of(model, few_rows.EngineSteps(1)) is None
    assert BatchedEngine(model, None, 1, 40, Options())._memory.runner.few_rows is None


@pytest.mark.parametrize("changes", [{"intermediate_size": 48}, {"hidden_size": 96}])
def test_widths_with_a_rest_have_eights(changes, random_weights):
    """A vectorised function computes the rest by other instructions."""
    assert few_rows.of(wide(**changes), few_rows.EngineSteps(1)) is None


def test_changed_weights_are_noticed(random_weights):
    model, prompts = wide(), [np.arange(5, 17)]
    records(model, prompts, temperature(), 1, 1, few=True)
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
        model.head.weight.data.mul_(0.5)
    expected, _ = records(model, prompts, temperature(), 8, 2, few=False)
    assert records(model, prompts, temperature(), 1, 2, few=True)[0] == expected
    engine = BatchedEngine(model, None, 1, 40, Options(), 12)
    for _ in range(2):  # the second time with weights that an optimiser has changed while the engine exists
        (done,) = engine.run([(0, temperature().chain(prompts[0], 16, Key(0)))])
        assert done.result.trajectory.log_p.tolist() == records(model, prompts, temperature(), 8, 1, few=False)[0][0][1]
        with torch.no_grad():
            model.layers[0].self_attn.k_proj.weight.mul_(1.25)
            model.head.weight.mul_(1.25)


def test_the_model_is_left_as_it_was(random_weights):
    model = wide()
    records(model, [np.arange(5, 17)], temperature(), 1, 1, few=True)
    assert not any("forward" in layer.__dict__ for layer in joint_product.linears(model.decoder))
    assert model._float32_head.product is None


def test_a_norm_is_fused_only_if_it_has_the_same_bits(random_weights):
    class OtherRMSNorm(torch.nn.Module):
        """Like a norm of Llama by its attributes. It scales before it divides."""

        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 3, 64)), 1e-6

        def forward(self, rows):
            rows = rows * self.weight
            return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    model = wide()
    norms = [module for module in model.decoder.modules() if type(module).__name__ == "Qwen3RMSNorm"]
    with torch.inference_mode():
        found = fused_norms.fused(model.decoder, 2)
        assert set(found) <= set(norms)
        rows = torch.randn(2, 1, model.config.hidden_size)
        assert all(torch.equal(norm(rows[..., : len(module.weight)]), module(rows[..., : len(module.weight)]))
                   for module, norm in found.items())
        assert not fused_norms.fused(torch.nn.Sequential(OtherRMSNorm()), 2)
