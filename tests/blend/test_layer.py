"""`blend=layer`: the logits of the mixed hidden state equal the mixture of the logits of both states."""

from __future__ import annotations

import pytest
import torch

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.errors import ConfigError
from tests.targets import FAMILIES, random_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", ["none", "final"])
@pytest.mark.parametrize("layer", [0, 1, -2])
@pytest.mark.parametrize("beta", [0.0, 0.05, 0.5, 1.0])
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


def test_the_two_norms_differ():
    last = torch.ones(1, 4)
    tapped = [torch.full((1, 4), 8.0)]
    raw, normed = (LayerBlend(beta=0.5, layer=0, norm=n).mix(last, tapped, lambda h: h / 8) for n in ("none", "final"))
    assert raw[0, 0] == 4.5
    assert normed[0, 0] == 1.0
