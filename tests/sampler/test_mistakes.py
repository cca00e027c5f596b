"""A mistake in the options of a sampler is one line that names the field and the given value."""

import pytest

from tests.composing import composed
from tests.refusals import refused

MISTAKES = [
    ("sampler=draft_mh draft=ngram",
     "draft: given 'ngram'; allowed: tiny, smollm2, dflash, eagle3, qwen2_5_coder_0_5b or model"),
    ("sampler=draft_mh draft=none", "draft: given 'none'; allowed: a draft"),
    ("sampler=draft_mh draft=tiny decoder=speculative_match",
     "decoder: given 'speculative_match'; allowed: plain with sampler.proposal=draft"),
    ("sampler=draft_refine draft=ngram",
     "draft: given 'ngram'; allowed: tiny, smollm2, dflash, eagle3, qwen2_5_coder_0_5b or model"),
    ("sampler=draft_refine draft=tiny decoder=speculative_match",
     "decoder: given 'speculative_match'; allowed: plain with sampler=draft_refine"),
    ("sampler=draft_refine draft=tiny sampler.early_reject=exact sampler.proposal_temperature=2",
     "sampler.early_reject: given 'exact'; allowed: auto or off, since the proposal's temperature 2 is not between"),
    ("sampler=best_of_n sampler.select=vote grader=code",
     "sampler.select: given 'vote'; allowed: log_p, mean_log_p or power with grader=code"),
    ("sampler=lookahead sampler.num_candidates=1", "sampler.num_candidates: given 1"),
    ("sampler=lookahead sampler.rollout_length=100000", "sampler.rollout_length: given 100000"),
    ("sampler=multiple_try sampler.form=multiple_try sampler.early_reject=exact", "sampler.early_reject: given 'exact'"),
    ("sampler=multiple_try sampler.alpha=0.5 sampler.early_reject=exact", "sampler.early_reject: given 'exact'"),
    ("sampler=multiple_try sampler.proposal_temperature=2 sampler.early_reject=exact", "sampler.early_reject: given 'exact'"),
    ("sampler=power_mh sampler.cut=entropy sampler.rule=published", "sampler.cut: given 'entropy'"),
    ("sampler=power_mh sampler.schedule=adaptive sampler.rule=published",
     "sampler.schedule: given 'adaptive'; allowed: 'published' with sampler.rule=published"),
    ("sampler=power_smc sampler.wrapper=csmc sampler.num_particles=1", "sampler.num_particles: given 1"),
    ("sampler=power_smc sampler.wrapper=pimh sampler.num_steps=0", "sampler.num_steps: given 0"),
    ("sampler=power_smc sampler.proposal=draft", "sampler.proposal: given 'draft'"),
    *((f"sampler=temperature sampler.sampling_mask=true sampler.top_k={top_k}",
       f"sampler.sampling_mask: given True; allowed: false with sampler.top_k={top_k}; or sampler.top_k from 1 to 512")
      for top_k in (0, 513)),
    ("sampler=power_mh sampler.sampling_mask=true",
     "sampler.sampling_mask: unknown field (did you mean sampler=temperature sampler.sampling_mask=true?)"),
    ("sampler=replica_exchange sampler.alphas=[2]", "sampler.alphas: given [2.0]"),
    ("sampler=replica_exchange sampler.alphas=[2,1]", "sampler.alphas: given [2.0, 1.0]"),
    ("sampler=replica_exchange sampler.temperatures=[1]", "sampler.temperatures: given [1.0]"),
    ("sampler=replica_exchange sampler.output=0", "sampler.output: given 0"),
    ("sampler=replica_exchange sampler.output=4", "sampler.output: given 4"),
    ("sampler=replica_exchange sampler.temperatures=[2,1,1] sampler.early_reject=exact",
     "sampler.early_reject: given 'exact'"),
    ("sampler=replica_exchange sampler.alphas=[0.5,1] sampler.early_reject=exact", "sampler.early_reject: given 'exact'"),
]
"""Overrides, and the start of the line."""


@pytest.mark.parametrize(("overrides", "start"), MISTAKES, ids=[overrides for overrides, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_field(tmp_path, overrides, start):
    with refused(start=start):
        composed(tmp_path, *overrides.split())
