"""Products that keep the bits of a row, and steps with as many rows as chains, where this machine allows both."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching import batched, linear
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import RowLinear
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.rng import Key
from tests.bench.subject import subject_of
from tests.cases import quick
from tests.composing import composed
from tests.engine.batching.test_batched import power_mh, temperature
from tests.targets import random_model, rows_do_not_depend_on_the_batch

WIDE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=16)
"""Widths for which steps are compared; the models of `targets.py` have others."""
PRECISIONS = [torch.float32, torch.bfloat16]
_HAS_TILES = linear.has_tiles()
PRODUCTS = pytest.mark.parametrize("small", [2**30, 0], ids=["plain", "packed"])
"""Float32 layers of at most so many weights have PyTorch's own product."""


def wide(family: str = "qwen3", packs: bool = True, **changes) -> LanguageModel:
    return LanguageModel(random_model(family, **{**WIDE, **changes}), stop_ids=(3, 7), packs=packs)


@pytest.fixture(scope="module")
def embedded():
    return subject_of("tiny", 24)


def free(model: LanguageModel) -> bool:
    """Whether steps of an engine have any number of rows."""
    return BatchedEngine(model, None, 1, 40)._loop._ladder.row_step == 1


def prepared(weight: torch.Tensor) -> torch.Tensor:
    found = linear.prepared(weight)
    if found is None:
        pytest.skip("this processor has no product of this precision that keeps bits: layers stay as they are")
    return found


def records(model: LanguageModel, prompts, sampler, slots: int, chains: int) -> tuple[list, BatchedEngine]:
    """Tokens, log p and log q of chains in the order of their numbers, and the engine."""
    longest = max(map(len, prompts))
    engine = BatchedEngine(model, None, slots, longest + 16, prompt_length=longest)
    done = engine.run((number, sampler.chain(prompts[number % len(prompts)], 16, Key(number))) for number in range(chains))
    results = [chain.result.trajectory for chain in sorted(done, key=lambda chain: chain.tag)]
    return [(t.tokens.tolist(), t.log_p.tolist(), t.log_q.tolist()) for t in results], engine


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [temperature(temperature=0.7, top_p=0.9), power_mh()], ids=["truncated", "power_mh"])
def test_records_of_the_embedded_model_are_those_of_padded_steps(embedded, sampler, monkeypatch):
    prompts = embedded.prompts[:3]
    found = [records(embedded.model, prompts, sampler, slots, 4)[0] for slots in (1, 3, 12)]
    monkeypatch.setattr(batched, "free_rows", lambda *given: False)
    padded, engine = records(embedded.model, prompts, sampler, 4, 4)
    assert engine._loop._ladder.row_step == 8
    assert found == [padded] * 3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_has_as_many_rows_as_chains_where_the_bits_allow_it(embedded, precision, monkeypatch, random_weights):
    fed, forward = [], ModelRunner.forward
    dtype = getattr(torch, precision)
    model = LanguageModel(random_model("qwen3", **WIDE).to(dtype), stop_ids=(3, 7), packs=True)
    freely = free(model)
    assert freely or not linear.has_row_layers(model.decoder) or precision == "bfloat16"

    def counted(self, cache, rows, tokens, *rest, **named):
        fed.append(tokens.shape)
        return forward(self, cache, rows, tokens, *rest, **named)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    for allowed in (freely, False):
        monkeypatch.setattr(batched, "free_rows", lambda *given, allowed=allowed: allowed)
        fed.clear()
        records(model, [np.arange(5, 17)], temperature(), 1, 1)
        assert {rows for rows, queries in fed if queries == 1} == {1 if allowed else 8}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("inputs", "outputs"), quick(
    [(64, 64), (192, 128), (576, 192), (1536, 576), (2560, 512), (33, 17)], (192, 128), (33, 17)))
@pytest.mark.parametrize("biased", [False, True])
@PRODUCTS
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(inputs, outputs, biased, dtype, small, monkeypatch):
    """Of 1 to 128 rows, for one and two threads; the values are those of a linear layer."""
    monkeypatch.setattr(linear, "_SMALL", small)
    generator, threads = torch.Generator().manual_seed(1), torch.get_num_threads()
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    added, rows = bias if biased else None, torch.randn(128, inputs, generator=generator).to(dtype)
    exact = torch.nn.functional.linear(rows.double(), weight.double(), None if added is None else added.double())
    error = 1e-3 if dtype == torch.float32 else 2**-7 * exact.abs().max()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            given = prepared(weight)
            expected = linear.multiply(rows, given, added)
            torch.testing.assert_close(expected.double(), exact, rtol=0, atol=float(error))
            for count in (1, 2, 3, 5, 8, 13, 40, 64, 128):
                for start in (0, (128 - count) // 2):
                    mine = slice(start, start + count)
                    assert torch.equal(linear.multiply(rows[mine].clone(), given, added), expected[mine])
            few = linear.multiply(rows, given, added, linear.FEW)
            torch.testing.assert_close(few.double(), exact, rtol=0, atol=float(error))
            for count in (*range(1, 34), 65, 97) if linear.keeps_bits(given, linear.FEW) else ():
                mine = slice(128 - count, None)
                assert torch.equal(linear.multiply(rows[mine].clone(), given, added, linear.FEW), few[mine])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(1, 64), (2, 64), (64, 64), (65, 64), (3, 40, 64), (0, 64)])
def test_each_call_of_a_product_in_tiles_has_64_rows_or_at_most_32(shape, monkeypatch):
    monkeypatch.setattr(linear, "has_tiles", lambda: True)
    generator = torch.Generator().manual_seed(2)
    weight, bias, rows = (torch.randn(each, generator=generator).bfloat16() for each in ((128, 64), (128,), shape))
    given, counts, call = prepared(weight), [], linear._packed_product

    def counted(rows, weight, bias):
        counts.append(len(rows))
        return call(rows, weight, bias)

    monkeypatch.setattr(linear, "_packed_product", counted)
    exact, count = torch.nn.functional.linear(rows.double(), weight.double(), bias.double()), len(rows.flatten(0, -2))
    torch.testing.assert_close(linear.multiply(rows, given, bias).double(), exact, rtol=2**-7, atol=0.02)
    assert counts == [64] * -(-count // 64) or not rows.numel()
    counts.clear()
    network = torch.nn.Sequential(RowLinear(given, bias, few=True), RowLinear(given, bias))
    with linear.few_rows(network):
        torch.testing.assert_close(network[0](rows).double(), exact, rtol=2**-7, atol=0.02)
        assert [layer.tile for layer in network] == [32, 64]
    assert network[0].tile == 64
    assert counts == [32] * (count // 32) + [max(2, count % 32)] * (count % 32 > 0) or not rows.numel()


@PRODUCTS
@pytest.mark.parametrize("shape", [(1, 1, 64), (64,), (3, 2, 64), (3, 1, 64), (1, 64), (0, 64)])
def test_rows_have_any_shape(shape, small, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", small)
    generator = torch.Generator().manual_seed(2)
    weight, bias, rows = (torch.randn(each, generator=generator) for each in ((128, 64), (128,), shape))
    layer = RowLinear(prepared(weight), bias)
    assert (layer.in_features, layer.out_features) == (64, 128)
    torch.testing.assert_close(layer(rows), torch.nn.functional.linear(rows, weight, bias), rtol=0, atol=1e-4)


@PRODUCTS
def test_layers_are_replaced_in_place_and_keep_their_numbers(small, random_weights, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", small)
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False)),
                                  torch.nn.Linear(64, 1))
    network.append(network[0])  # one layer at two places
    rows, count = torch.randn(4, 64), sum(parameter.numel() for parameter in network.parameters())
    with torch.no_grad():
        expected = network[:3](rows)
        if not linear.replace_layers(network):
            pytest.skip("this processor has no product that keeps bits")
        torch.testing.assert_close(network[:3](rows), expected)
    assert linear.has_row_layers(network)
    assert network[0] is network[3]
    assert type(network[2]) is torch.nn.Linear
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@PRODUCTS
@pytest.mark.parametrize("wrong", ["rows", "one row"])
def test_products_whose_bits_depend_on_the_number_of_rows_are_found_out(wrong, small, monkeypatch, random_weights):
    """A last bit is enough. Nothing is replaced then, and the head keeps its plain copy."""
    own = linear.multiply

    def other(rows, weight, bias, *tile):
        found, count = own(rows, weight, bias, *tile), rows.numel() // rows.shape[-1]
        return torch.nextafter(found, torch.tensor(torch.inf)) if count == (1 if wrong == "one row" else 8) else found

    monkeypatch.setattr(linear, "_SMALL", small)
    prepared(torch.eye(64))
    monkeypatch.setattr(linear, "multiply", other)
    model = wide()
    assert not linear.has_row_layers(model.decoder)
    assert not model.head_keeps_bits
    assert not free(model)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_network_whose_products_of_few_rows_have_other_bits_keeps_its_tiles(
        keeps, tmp_path, monkeypatch, random_weights):
    """And they end with `few_rows`, inside of others too. Steps have few rows by the slots and by the draft's block."""
    monkeypatch.setattr(linear, "has_tiles", lambda: True)
    prepared(torch.eye(64).bfloat16())
    own = linear.keeps_bits
    monkeypatch.setattr(linear, "keeps_bits", lambda weight, tile=64: own(weight) and (keeps or tile == 64))
    model, taken = LanguageModel(random_model("qwen3", **WIDE).bfloat16(), stop_ids=(3, 7), packs=True), []
    layers = [layer for layer in model.decoder.modules() if isinstance(layer, RowLinear)]
    assert layers
    assert all(layer.takes_few == keeps for layer in layers)
    monkeypatch.setattr(model, "_loop", None)
    model.decoder.register_forward_hook(lambda *_: taken.append({layer.tile for layer in layers}))
    few = 32 if keeps else 64
    for given, tile in (((), few), (("hardware.num_slots=33",), 64), (("hardware.num_slots=null",), 64),
                        (("hardware.num_slots=8", "decoder=speculative_match", "draft=ngram", "draft.num_drafted=3"), few),
                        (("hardware.num_slots=9", "decoder=speculative_match", "draft=ngram", "draft.num_drafted=3"), 64)):
        engine = slots.engine_of(composed(tmp_path, "dataset.max_new_tokens=4", *given), model, 8, 40, None)
        taken.clear()
        list(engine.run([(0, temperature(temperature=0.7).chain(np.arange(5), 4, Key(0)))]))
        assert taken
        assert taken[-1] == {tile}
        assert {layer.tile for layer in layers} == {64}
    with linear.few_rows(model.decoder):
        with linear.few_rows(model.decoder, few=False):
            assert {layer.tile for layer in layers} == {64}
        assert {layer.tile for layer in layers} == {few}


@pytest.mark.parametrize("changes", [{"intermediate_size": 48}, {"hidden_size": 96}, {"packs": False}])
def test_widths_with_a_rest_and_plain_products_have_eights(changes, random_weights):
    """A vectorised function computes the rest by other instructions."""
    assert not free(wide(**changes))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_small_layers_have_the_plain_product_in_float32(dtype, monkeypatch):
    """If the plain one does not keep the bits, they are packed."""
    monkeypatch.setattr(linear, "_SMALL", 64 * 64)
    small, large = (torch.zeros(outputs, 64, dtype=dtype) for outputs in (64, 65))
    assert prepared(small).is_mkldnn == (dtype == torch.bfloat16)
    assert prepared(large).is_mkldnn
    monkeypatch.setattr(linear, "keeps_bits", lambda weight: weight.is_mkldnn)
    assert prepared(small).is_mkldnn


def test_a_model_of_the_user_keeps_its_layers(random_weights):
    model = random_model("qwen3", **WIDE)
    before = [type(module) for module in model.modules()]
    LanguageModel(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_prepared_head_has_float32_sums_and_gradients(dtype, random_weights):
    layer = torch.nn.Linear(64, 192).to(dtype)
    head = linear.Float32Head(layer)
    prepared(layer.weight.float())
    hidden = torch.randn(3, 64).to(dtype).requires_grad_()
    exact = torch.nn.functional.linear(hidden.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        found = head.logits(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    logits = head.logits(hidden)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    logits.sum().backward()
    torch.testing.assert_close(hidden.grad.double(), layer.weight.double().sum(0).expand(3, -1), rtol=0.02, atol=0.02)
    assert linear.Float32Head(layer, copied=False).prepared is None


def looped(family: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A model whose layers run in the loop, where its products keep their bits on this machine."""
    model = LanguageModel(random_model(family, **WIDE).to(dtype), stop_ids=(3, 7), packs=True)
    if not linear.has_row_layers(model.decoder):
        pytest.skip("this processor has no product of this precision that keeps bits: layers stay as they are")
    return model


@pytest.mark.parametrize(("dtype", "tiles"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_the_loop_of_layers_has_the_bits_of_the_modules_and_tells_the_same_hooks(family, dtype, tiles, monkeypatch):
    monkeypatch.setattr(linear, "has_tiles", lambda: tiles or _HAS_TILES)
    model = looped(family, dtype)
    assert model._loop is not None
    found = []
    for loop in (model._loop, None):
        monkeypatch.setattr(model, "_loop", loop)
        cache = KVCache(model.cache_shape, 3, 64)
        runner = ModelRunner(model, None, "grouped", 64, 64, 8)
        steps = []
        with runner.ready(), model.tapped((-1, 0, 1)) as tapped:
            for start, queries, rows in ((0, 7, 3), (7, 1, 1), (7, 1, 3), (8, 2, 2)):
                tokens = torch.arange(rows * queries).view(rows, queries) * 7 % model.vocab_size
                positions = (start + torch.arange(queries)).expand(rows, -1)
                steps += [runner.forward(cache, slice(0, rows), tokens, positions, 64), *tapped]
        found.append([*steps, cache.keys, cache.values])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("changed", ["self_attn.q_proj", "mlp", "self_attn"])
def test_a_decoder_that_computes_anything_else_has_no_loop(changed):
    model = looped("qwen3")
    module = model.decoder.layers[1].get_submodule(changed)
    before = module.forward

    def forward(*given, **options):
        output = before(*given, **options)
        return (output[0] + 1e-3, *output[1:]) if isinstance(output, tuple) else output + 1e-3

    module.forward = forward
    assert linear.loop_of(model.decoder, model.cache_shape) is None


@pytest.mark.parametrize("hooked", ["embed_tokens", "layers.0", "layers.1.mlp", "layers.1.self_attn.q_proj"])
@torch.inference_mode()
def test_a_hook_that_changes_an_output_changes_the_loop_s(hooked, monkeypatch):
    """Steering vectors, for example. Hooks of other modules than layers and embedding leave the step to the modules."""
    model = looped("qwen3")
    loop, found = model._loop, []
    module = model.decoder.get_submodule(hooked)
    for with_hook, used in ((False, loop), (True, loop), (True, None)):
        monkeypatch.setattr(model, "_loop", used)
        hook = module.register_forward_hook(lambda module, given, output: output + 0.5) if with_hook else None
        cache, runner = KVCache(model.cache_shape, 2, 64), ModelRunner(model, None, "grouped", 64, 64, 8)
        with runner.ready():
            tokens = torch.arange(6).view(2, 3)
            found.append(runner.forward(cache, slice(0, 2), tokens, torch.arange(3).expand(2, -1), 64).clone())
        if hook is not None:
            hook.remove()
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


# Logits have float32 precision with and without a float32 copy of the head's weights.


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def layer_of(request):
    return SimpleNamespace(weight=0.1 * noise(20_000, 96), bias=0.1 * noise(20_000) if request.param else None)


def test_log_p_hardly_depends_on_the_copy(layer_of):
    hidden = 3 * noise(5, 2, 96)
    bias = 0 if layer_of.bias is None else layer_of.bias.double()
    exact = (hidden.double() @ layer_of.weight.double().T + bias).log_softmax(dim=-1)
    for copied in (True, False, None):
        head = linear.Float32Head(layer_of, copied)
        held = head.weight if head.prepared is None else head.prepared
        assert held.dtype == (torch.bfloat16 if copied is False else torch.float32)
        log_p = head.logits(hidden).double().log_softmax(dim=-1)
        assert log_p.shape == (5, 2, 20_000)
        assert (log_p - exact).abs().max() < 2e-5
    # Sums in bfloat16 show that the bound is not trivial.
    rounded = torch.nn.functional.linear(hidden, layer_of.weight, layer_of.bias).double().log_softmax(dim=-1)
    assert (rounded - exact).abs().max() > 2e-3


def test_forbidden_tokens_and_single_states(layer_of):
    for copied in (True, False):
        head = linear.Float32Head(layer_of, copied)
        head.forbid([3, 19_999])
        logits = head.logits(noise(96))
        assert logits.shape == (20_000,)
        assert logits.isneginf().nonzero().flatten().tolist() == [3, 19_999] == head.forbidden.nonzero().flatten().tolist()


def test_weights_in_float32_are_copied_only_to_be_packed():
    layer = SimpleNamespace(weight=torch.ones(12, 8), bias=None)
    for copied in (True, None):
        assert linear.Float32Head(layer, copied).weight.data_ptr() == layer.weight.data_ptr()
    assert linear.Float32Head(layer, False).prepared is None


def test_pieces_of_the_weights_do_not_make_a_row_depend_on_the_batch():
    head, hidden = linear.Float32Head(SimpleNamespace(weight=0.1 * noise(5_000, 640), bias=None), False), noise(40, 640)
    whole = head.logits(hidden)
    for start in range(0, 40, 8):
        tolerance = 0.0 if rows_do_not_depend_on_the_batch() else 1e-5
        torch.testing.assert_close(head.logits(hidden[start : start + 8]), whole[start : start + 8], rtol=0, atol=tolerance)
