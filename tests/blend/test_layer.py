"""`blend=layer`: the logits of the mixed hidden state equal the mixture of the logits of both states."""

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.slots import Slots
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.runner import tasks
from tests.runs import execute
from tests.targets import FAMILIES, random_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", ["none", "final"])
@pytest.mark.parametrize(("layer", "beta"), [(0, 0.05), (1, 1.0), (-2, 0.5)])
@torch.inference_mode()
def test_mixed_hidden_state_is_the_mixture_of_logits(family, norm, layer, beta):
    """Compared with `output_hidden_states` of transformers, where entry l + 1 is the output of layer l."""
    model = random_model(family)
    parts, blend = LanguageModel(model), LayerBlend(beta=beta, layer=layer, norm=norm)
    ids = torch.tensor([[5, 9, 30, 2]])
    output = model(input_ids=ids, output_hidden_states=True)
    state = output.hidden_states[layer % 3 + 1]
    other = model.lm_head(parts.final_norm(state) if norm == "final" else state)
    expected = (1 - beta) * output.logits + beta * other
    with parts.tapped(blend.tapped_layers(3)) as tapped:
        last = parts.decoder(input_ids=ids).last_hidden_state
    mixed = parts.logits(blend.mix(last, tapped, parts.final_norm))
    scale = expected.abs().max()
    assert ((mixed - expected).abs().max() / scale) < 1e-5


def test_beta_zero_changes_nothing_and_negative_layers_count_from_the_end():
    assert LayerBlend(beta=0.1, layer=-3, norm="none").tapped_layers(36) == (33,)
    assert LayerBlend(beta=0.1, layer=33, norm="none").tapped_layers(36) == (33,)
    for layer in (36, -37):
        with pytest.raises(ConfigError, match="-36 to 35"):
            LayerBlend(beta=0.1, layer=layer, norm="none").tapped_layers(36)
    last = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(LayerBlend(beta=0.0, layer=0, norm="none").mix(last, [last * 7], lambda h: h), last)


@pytest.mark.parametrize("norm", ["none", "final"])
def test_a_random_direction_keeps_the_norm_and_nothing_else(norm):
    """The rotation is linear, the same for every row and for both kinds of array, and acts after the norm of the layer."""
    generator = torch.Generator().manual_seed(0)
    last, state = (torch.randn(5, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.linspace(0.1, 1.0, 256, dtype=torch.float64)

    def other(blend, state):
        return blend.mix(torch.zeros_like(state), [state], lambda hidden: hidden * weight)

    turned, plain = (other(LayerBlend(beta=1.0, layer=0, norm=norm, direction=direction), state)
                     for direction in ("random", "layer"))
    assert torch.allclose(turned.norm(dim=-1), plain.norm(dim=-1), rtol=1e-12)
    assert sorted(turned[0].abs().tolist()) == sorted(plain[0].abs().tolist())
    assert torch.nn.functional.cosine_similarity(turned, plain).abs().max() < 0.25  # 256 dimensions: a deviation of 0.06
    alone = other(LayerBlend(beta=1.0, layer=0, norm=norm, direction="random"), state[2:3])
    assert torch.equal(alone, turned[2:3])
    blend = LayerBlend(beta=-0.3, layer=0, norm="none", direction="random")
    arrays = blend.mix(last.numpy(), [state.numpy()], lambda hidden: hidden)
    assert np.array_equal(arrays, blend.mix(last, [state], lambda hidden: hidden).numpy())


def test_noise_is_the_layer_blend_with_a_random_direction(make_config):
    noise = make_config("blend=noise", "blend.beta=0.1")
    assert noise.blend == LayerBlend(beta=0.1, direction="random")
    assert identity_hash(noise) != identity_hash(make_config("blend=layer", "blend.beta=0.1"))


@torch.inference_mode()
@pytest.mark.parametrize(("norm", "factor"), [("none", 1.0), ("none", 40.0), ("final", 40.0)])
def test_the_width_of_a_blend_is_measured_on_the_prompts(norm, factor):
    """Against transformers' own hidden states; the raw state of a layer is as wide as the weights of the layers make it."""
    model = random_model("llama")
    model.get_input_embeddings().weight.data *= factor
    target = LanguageModel(model)
    prompts = [np.array([5, 9, 30, 2]), np.arange(3, 40)]
    blend, expected = LayerBlend(beta=0.1, layer=0, norm=norm), []
    for prompt in prompts:
        output = model(input_ids=torch.from_numpy(prompt)[None], output_hidden_states=True)
        state = output.hidden_states[1][0, -16:]
        other = model.lm_head(target.final_norm(state) if norm == "final" else state)
        expected.append(float((other.std(dim=-1) / output.logits[0, -16:].std(dim=-1)).mean()))
    assert Slots().blend_width(blend, target, prompts) == pytest.approx(np.mean(expected), rel=1e-4)
    assert Slots().blend_width(NoBlend(), target, prompts) is None


@pytest.mark.parametrize(("condition", "wide", "told"), [
    ("blend_greedy", 0.0, True), ("blend_greedy", 1000.0, False), ("greedy", 0.0, False)])
def test_a_wide_blend_is_told_at_the_start(make_config, monkeypatch, capsys, condition, wide, told):
    monkeypatch.setattr(tasks, "_WIDE", wide)
    note.cache_clear()
    execute(make_config(f"condition={condition}", "dataset.limit=1", "dataset.max_new_tokens=4", "tracker=none"))
    assert ("blend: the logits that it mixes in deviate" in capsys.readouterr().err) is told
