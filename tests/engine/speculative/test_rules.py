"""What a rule says besides its tokens: intervals that claim nothing, and random numbers that no two anchors share."""

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import NgramDrafter
from dflash_mcmc.engine.speculative.rules import Block, Noise, Uniforms
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from tests.engine.speculative.test_speculator import reject


@pytest.mark.parametrize("rule", [rules.reject, rules.reject_block])
def test_tokens_of_a_rejection_rule_claim_no_interval(rule):
    """A kept or replaced token depends on more than the uniform of its position, so no uniform repeats it."""
    generator = torch.Generator().manual_seed(0)
    rows, drafted = 6, 3
    target, draft = (laws.weigh(torch.randn(rows * slots, 5, generator=generator)) for slots in (drafted + 1, drafted))
    block = Block(torch.randint(5, (rows, drafted), generator=generator), target, draft, torch.zeros(rows, dtype=torch.bool))
    numbers = [torch.from_numpy(Key(count).uniforms(0, rows * count).reshape(rows, count)) for count in (drafted + 1, drafted)]
    verdict = rule(block, Uniforms(*numbers, numbers[1].flip(0)))
    assert 0 <= verdict.accepted.min() < verdict.accepted.max()
    assert verdict.interval.shape == (rows, drafted + 1, 2)
    assert not verdict.interval.any()


def test_no_two_anchors_share_a_number():
    """A position that is drafted again after a later anchor gets a new number, which block verification needs."""
    noise = Noise.of(Key(3), 0, 7, 4)
    assert noise.drafts.shape == noise.accepting.shape == (7, 4)
    numbers = np.concatenate([noise.drafts, noise.accepting]).ravel()
    assert len(np.unique(numbers)) == len(numbers)


def test_the_numbers_of_an_anchor_do_not_depend_on_where_the_draw_starts():
    whole, part = Noise.of(Key(3), 0, 7, 4), Noise.of(Key(3), 2, 5, 4)
    for of_all, of_some in zip(whole, part, strict=True):
        assert np.array_equal(of_all[2:5], of_some)


def test_the_draft_has_its_own_temperature_but_no_penalties_and_none_at_greedy_decoding():
    """A draft that is drawn while the target is greedy would be kept less often."""
    params = SamplingParams(0.8, 20, 0.9, 0.01, 1.3, 0.4, 0.3)
    own, same = (reject(temperature=given).speculation(NgramDrafter(3, 2)) for given in (1.2, None))
    assert own.draft_params(params) == SamplingParams(1.2, 20, 0.9, 0.01)
    assert same.draft_params(params) == SamplingParams(0.8, 20, 0.9, 0.01)
    assert own.draft_params(params._replace(temperature=0.0)).temperature == 0.0
