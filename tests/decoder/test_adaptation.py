"""A draft that learns keeps the laws of the decoders. What would not keep them, or is no law at all, is caught or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.oracle.tabular import LearningDraft, TabularDraft, TabularEngine
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.speculation import Speculation
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT
from dflash_mcmc.types import Trajectory
from tests.runs import execute, records_of
from tests.speculation import LAWS, SMALL, speculative_error

RULES = {"token": rules.reject, "block": rules.reject_block, "match": rules.match}


def speculation(rule: str, draft: TabularDraft, temperature: float | None = None) -> Speculation:
    return Speculation(RULES[rule], draft, shared_noise=rule == "match", temperature=temperature, noisy=rule != "match")


def learning(sequential: bool = False, rate: float = 2.0) -> LearningDraft:
    return LearningDraft(3, 2, sequential=sequential, seed=2, rate=rate)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_learns_from_verified_blocks_keeps_the_law(rule):
    assert speculative_error(speculation(rule, learning()), LAWS["temperature"], 3, SMALL) <= 1e-12


def test_the_draft_has_learned_something():
    """Otherwise the tests of the laws would show nothing."""
    engine = TabularEngine(SMALL, None, speculation("token", draft := learning()))
    engine.answer(Draw(Trajectory.start(PROMPT), 6, LAWS["temperature"], Key(0)))
    assert np.abs(draft._learned).max() > 0.1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_that_sees_the_block_being_verified_is_caught(rule, monkeypatch):
    """q of the ratio is then not the q from which the tokens were drawn."""
    block_of = TabularEngine._block

    def peeking(self, operation, trajectory, chance):
        block, draft = block_of(self, operation, trajectory, chance), self.speculation.drafter
        self._learn(operation, trajectory, block, 2)
        prefix, drafted = (*trajectory.prompt.tolist(), *trajectory.tokens.tolist()), tuple(block.drafted[0].tolist())
        logits = np.stack([draft.logits(prefix, drafted[:slot]) for slot in range(2)]) / 0.8
        return block._replace(draft=laws.weigh(torch.from_numpy(logits)))

    monkeypatch.setattr(TabularEngine, "_block", peeking)
    assert speculative_error(speculation(rule, learning()), LAWS["temperature"], 2, SMALL) > 0.005


REFUSED = {
    "draft.adapt=learn": "draft.adapt: given 'learn'; allowed: one of 'none', 'context', 'online'",
    "draft.adapt=online sampler=draft_mh": "draft.adapt: given 'online'; allowed: none or context with sampler=draft_mh",
    "draft.adapt=online blend=draft": "draft.adapt: given 'online'; allowed: none or context with blend=draft",
    "draft.adapt=online draft.adapt_rank=0": "draft.adapt_rank: given 0; allowed: a whole number >= 1 and <= 256",
    "draft.adapt=context probe=layer_rank": "draft.adapt: given 'context'; allowed: none with probe=layer_rank",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_keeps_no_law_is_refused(make_config, given):
    decoder = () if "=draft" in given or "probe" in given else ("decoder=speculative_match",)
    with pytest.raises(UserError) as error:
        make_config("draft=tiny", *decoder, *given.split())
    assert str(error.value).startswith(REFUSED[given])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("condition", "given"), [
    ("draft_blend_ps_context", ("condition=draft_blend_ps",)), ("draft_mh_context", ("sampler=draft_mh", "draft=tiny"))])
def test_a_condition_learns_the_prompt_and_is_otherwise_that_without(make_config, condition, given):
    config = make_config(f"condition={condition}")
    assert config.label() == condition
    assert identity_hash(config) == identity_hash(make_config(*given, "draft.adapt=context"))
    small = ("dataset.limit=1", "dataset.max_new_tokens=16", "sampler.num_blocks=2")
    (record,) = records_of(execute(make_config(f"condition={condition}", *small)).folder).values()
    assert record["adapt_steps"] >= 10


def test_identity(make_config):
    """Learning is a runtime matter where tokens do not depend on the draft, and part of the identity where they do."""
    def digest(*overrides):
        return identity_hash(make_config("draft=tiny", *overrides))

    match, reject, mh = ("decoder=speculative_match",), ("decoder=speculative_rejection",), ("sampler=draft_mh",)
    assert digest(*match) == digest(*match, "draft.adapt=online")
    assert digest(*match) == digest(*match, "draft.adapt=context", "draft.adapt_rank=2")
    faulty = ("decoder=speculative_match", "decoder.fault=greedy_bonus", "name=faults")
    assert digest(*faulty) != digest(*faulty, "draft.adapt=online")
    for kind in (reject, mh):
        assert digest(*kind) == digest(*kind, "draft.adapt_rank=2")
        assert digest(*kind) != digest(*kind, "draft.adapt=context")
    online = (*reject, "draft.adapt=online")
    assert len({digest(*online), *(digest(*online, f"draft.adapt_{name}") for name in ("rank=2", "rate=0.5"))}) == 3
