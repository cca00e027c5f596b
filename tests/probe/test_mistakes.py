"""A mistake in the options of a probe is one line that names the field, the given value and the allowed ones."""

from __future__ import annotations

import pytest

from tests.refusals import command_is_refused

MISTAKES = [
    ("probe=adaptation draft=tiny probe.rates=[]", "probe.rates: ", "a list of different values, at least one"),
    ("probe=adaptation draft=tiny probe.ranks=[4,4]", "probe.ranks: ", "a list of different values, at least one"),
    ("probe=adaptation draft=tiny probe.modes=[prompt]", "probe.modes: ", "one of 'context', 'online'"),
    ("probe=adaptation draft=tiny probe.position_edges=[32,16]", "probe.position_edges: ", "a list of rising numbers"),
    ("probe=adaptation draft=ngram", "draft: ", "'ngram'; allowed: tiny, smollm2 or dflash with probe=adaptation"),
    ("probe=adaptation draft=tiny draft.adapt=online", "draft.adapt: ", "none with probe=adaptation"),
    ("probe=deep_readout", "draft: given 'none'", "a draft, such as tiny"),
    ("probe=deep_readout draft=ngram", "draft: given 'ngram'", "tiny, smollm2 or dflash with probe=deep_readout"),
    ("probe=deep_readout draft=self", "draft: given 'self'", "tiny, smollm2 or dflash"),
    ("probe=deep_readout draft=tiny probe.answers=silver", "probe.answers: given 'silver'", "one of 'gold', 'greedy'"),
    ("probe=deep_readout draft=tiny probe.context=none", "probe.context: given 'none'", "one of 'full', 'block', 'prompt'"),
    ("probe=deep_readout draft=tiny sampler=greedy", "sampler: given 'greedy'", "does not use it"),
    ("probe=difficulty draft=tiny sampler=greedy blend=layer", "blend: given 'layer'", "none with probe=difficulty"),
    ("probe=difficulty draft=tiny sampler=greedy draft=ngram", "draft: given 'ngram'", "with probe=difficulty"),
    ("probe=difficulty draft=tiny sampler=greedy draft=none", "draft: given 'none'", "probe=difficulty"),
    ("probe=difficulty draft=tiny sampler=greedy probe.num_folds=1", "probe.num_folds: given 1", "a whole number >= 2"),
    ("probe=difficulty draft=tiny sampler=greedy probe.num_bins=1", "probe.num_bins: given 1", "a whole number >= 2"),
    ("probe=difficulty draft=tiny sampler=greedy probe.num_bin=3", "probe.num_bin: unknown field", "num_bins"),
    ("probe=layer_rank probe.answers=golden", "probe.answers: ", "one of 'gold', 'greedy'"),
    ("probe=layer_rank probe.hard_below=0", "probe.hard_below: ", "0.0; allowed: a number > 0 and < 1"),
    ("probe=layer_rank probe.hard_below=1", "probe.hard_below: ", "1.0; allowed: a number > 0 and < 1"),
    ("probe=layer_rank draft=ngram", "draft: ", "'ngram'; allowed: tiny, smollm2 or dflash with probe=layer_rank"),
    ("probe=layer_rank probe.hrd_below=0.1", "probe.hrd_below: ", "did you mean 'hard_below'"),
    ("probe=logit_blend probe.answers=golden", "probe.answers: ", "one of 'gold', 'greedy'"),
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
    ("probe=logit_blend probe.betas=null", "probe.betas: ", "'null'; allowed: a list"),
    ("probe=logit_blend probe.hard_below=0", "probe.hard_below: ", "0.0; allowed: a number > 0 and < 1"),
    ("probe=logit_blend draft=self", "draft: ", "'self'; allowed: tiny, smollm2 or dflash with probe=logit_blend"),
    ("probe=logit_blend probe.beta=0.1", "probe.beta: ", "did you mean 'betas'"),
    ("probe=mixing sampler=greedy",
     "sampler: given 'greedy'; allowed: draft_mh, draft_refine, multiple_try, power_mh with probe=mixing", ""),
    ("probe=mixing sampler.num_steps=0", "sampler.num_steps: given 0; allowed: a whole number >= 1 with probe=mixing", ""),
    ("probe=mixing probe.alphas=[4.0,-1.0]",
     "probe.alphas: given [4.0, -1.0]; allowed: null, or a list, none twice, of values that sampler.alpha may have: a "
     "number >= 1e-06 and <= 1e+06", ""),
    ("probe=mixing probe.alphas=[]", "probe.alphas: given []; allowed: null, or a list", ""),
    ("probe=mixing probe.temperatures=[1.0,1.0]",
     "probe.temperatures: given [1.0, 1.0]; allowed: null, or a list, none twice", ""),
    ("probe=mixing sampler=draft_mh draft=tiny probe.temperatures=[null]",
     "probe.temperatures: given [None]; allowed: null, or a ", ""),
    ("probe=mixing probe.early_rejects=[sometimes]", "probe.early_rejects: given ['sometimes']; allowed: null, or a list", ""),
    ("probe=mixing sampler.early_reject=exact probe.temperatures=[0.5,2.0]",
     "sampler.early_reject: given 'exact'; allowed: auto, off or eps, since the proposal's temperature 2 is not between", ""),
    ("probe=mixing probe.alpha=[2.0]",
     "probe.alpha: unknown field (did you mean probe=speculative_mcmc probe.alpha=[2.0] or 'alphas'?)", ""),
    ("experiment=rejection_sampling probe=rejection_samplin", "probe: ", "did you mean 'rejection_sampling'"),
    ("experiment=rejection_sampling probe.vocab_size=1", "probe.vocab_size: ", "1; allowed: a whole number >= 2"),
    ("experiment=rejection_sampling probe.agreement=1.5", "probe.agreement: ", "1.5; allowed: a number >= -1 and <= 1"),
    ("experiment=rejection_sampling probe.num_draws=750",
     "probe.num_draws: ", "750; allowed: a multiple of probe.chunk_size=500"),
    ("experiment=rejection_sampling probe.law_sed=1", "probe.law_sed: ", "did you mean 'law_seed'"),
]
"""Command line, start of the line, and a part of it."""


@pytest.mark.parametrize(("arguments", "start", "part"), MISTAKES, ids=[arguments for arguments, _, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_field(arguments, start, part):
    command_is_refused(arguments.split(), part, start=start)
