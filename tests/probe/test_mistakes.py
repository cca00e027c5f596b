"""A mistake in the options of a probe is one line that names the field, the given value and the allowed ones."""

import pytest

from tests.refusals import command_is_refused

MISTAKES = [
    ("probe=deep_readout", "draft: given 'none'", "a draft, such as tiny"),
    ("probe=deep_readout draft=ngram", "draft: given 'ngram'", "tiny, smollm2 or dflash with probe=deep_readout"),
    ("probe=deep_readout draft=tiny probe.answers=silver", "probe.answers: given 'silver'", "one of 'gold', 'greedy'"),
    ("probe=deep_readout draft=tiny probe.context=none", "probe.context: given 'none'", "one of 'full', 'block', 'prompt'"),
    ("probe=deep_readout draft=tiny sampler=greedy", "sampler: given 'greedy'", "does not use it"),
    ("probe=difficulty draft=tiny sampler=greedy blend=layer", "blend: given 'layer'", "none with probe=difficulty"),
    ("probe=difficulty draft=tiny sampler=greedy draft=ngram", "draft: given 'ngram'", "with probe=difficulty"),
    ("probe=difficulty draft=tiny sampler=greedy draft=none", "draft: given 'none'", "probe=difficulty"),
    ("probe=layer_rank probe.answers=golden", "probe.answers: ", "one of 'gold', 'greedy'"),
    ("probe=layer_rank probe.hard_below=0", "probe.hard_below: ", "0.0; allowed: a number > 0 and < 1"),
    ("probe=layer_rank draft=ngram", "draft: ", "'ngram'; allowed: tiny, smollm2 or dflash with probe=layer_rank"),
    ("probe=logit_blend probe.norm=first", "probe.norm: ", "one of 'none', 'final'"),
    ("probe=logit_blend probe.layers=[8]",
     "probe.layers: ", "[8]; allowed: different layers from -8 to 7 (the model has 8 layers)"),
    ("probe=logit_blend probe.layers=[-9]", "probe.layers: ", "[-9]; allowed: different layers from -8 to 7"),
    ("probe=logit_blend probe.layers=[5,-3]", "probe.layers: ", "[5, -3]; allowed: different layers"),
    ("probe=logit_blend probe.layers=[]",
     "probe.layers: ", "[]; allowed: different layers from -8 to 7 (the model has 8 layers), at least"),
    ("probe=logit_blend probe.betas=[]", "probe.betas: ", "[]; allowed: different numbers from -10 to 1, at least one"),
    ("probe=logit_blend probe.betas=[0.1,0.1]", "probe.betas: ", "[0.1, 0.1]; allowed: different numbers"),
    ("probe=logit_blend probe.betas=[0.1,1.1]", "probe.betas: ", "[0.1, 1.1]; allowed: different numbers from -10 to 1"),
    ("probe=logit_blend probe.betas=[-11]", "probe.betas: ", "[-11.0]; allowed: different numbers from -10 to 1"),
    ("probe=logit_blend draft=tiny blend=draft", "blend: given 'draft'", "another one, or none: probe=logit_blend with"),
    ("experiment=rejection_sampling probe=rejection_samplin", "probe: ", "did you mean 'rejection_sampling'"),
    ("experiment=rejection_sampling probe.vocab_size=1", "probe.vocab_size: ", "1; allowed: a whole number >= 2"),
    ("experiment=rejection_sampling probe.num_draws=750",
     "probe.num_draws: ", "750; allowed: a multiple of probe.chunk_size=500"),
]
"""Command line, start of the line, and a part of it."""


@pytest.mark.parametrize(("arguments", "start", "part"), MISTAKES, ids=[arguments for arguments, _, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_field(arguments, start, part):
    command_is_refused(arguments.split(), part, start=start)
