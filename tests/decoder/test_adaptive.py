"""`decoder.adaptive`: blocks of a draw get shorter, stop and come back, and every law is kept.

The number of a block's tokens depends on earlier blocks alone. Wrong rules, which look at the block itself, change the law of
rejection and block verification, and are caught. Sample and match draws the tokens of plain decoding, whatever the lengths.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.engine.oracle.tabular import TabularEngine
from dflash_mcmc.engine.speculative.speculation import block_lengths
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT, law_of, product_target, total_variation
from dflash_mcmc.types import Trajectory
from tests.speculation import DRAFTS, LAWS, MODEL, SMALL

QUICK = block_lengths(2, 1.8, top=4, memory=2)
"""Levels that change within the few tokens of an enumeration: whole blocks at first, then one token, then plain steps."""
DECODERS = {
    "match": SpeculativeMatch(draft_temperature=0.7), "token": SpeculativeRejection(),
    "block": SpeculativeRejection(verification="block"),
}


def rule(decoder, draft, lengths=QUICK):
    return DECODERS[decoder].speculation(DRAFTS[draft])._replace(lengths=lengths)


def error(kind, speculation, law="temperature", horizon=4):
    """Total variation between the law of a draw and that of plain decoding."""
    engine = kind(SMALL, None, speculation)
    drawn = law_of(lambda key: engine.answer(Draw(Trajectory.start(PROMPT), horizon, LAWS[law], key)))
    return total_variation(drawn, product_target(TabularEngine(SMALL), horizon, LAWS[law]))


def test_the_quick_levels_have_every_length():
    assert QUICK.drafted.tolist() == [0, 0, 1, 2, 2]
    assert QUICK.start == 3
    assert [QUICK.next(*given) for given in ((3, 2, 2), (3, 1, 2), (3, 0, 2), (1, 0, 0), (2, 1, 1))] == [4, 2, 1, 2, 3]


@pytest.mark.parametrize("law", ["temperature", "penalty"])
@pytest.mark.parametrize("draft", ["small", "small_sequential"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_law_is_exact(decoder, draft, law):
    assert error(TabularEngine, rule(decoder, draft), law, horizon=3) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
def test_law_is_exact_over_more_blocks(decoder):
    assert error(TabularEngine, rule(decoder, "small")) <= 1e-12


class LooksAtDrafts(TabularEngine):
    """Wrong: a block ends before a drafted token that the draft finds unlikely."""

    def _block(self, operation, trajectory, chance):
        block = super()._block(operation, trajectory, chance)
        likely = [token == 0 for token in block.drafted[0].tolist()]
        return block._replace(offered=torch.tensor([(*likely, False).index(False)]))


class LooksAtVerdicts(TabularEngine):
    """Wrong: a block of which nothing is kept is not drafted after all, and its token is that of a plain step."""

    def _next(self, operation, trajectory):
        level, tokens = self._level, super()._next(operation, trajectory)
        if len(tokens) > 1 or not self.speculation.lengths.drafted[level]:
            return tokens
        self._level = 0
        return super()._next(operation, trajectory)


@pytest.mark.parametrize("wrong", [LooksAtDrafts, LooksAtVerdicts])
@pytest.mark.parametrize("decoder", ["token", "block"])
def test_a_rule_that_looks_at_the_block_is_caught(decoder, wrong):
    assert error(wrong, rule(decoder, "small"), horizon=2) > 0.005
    assert error(TabularEngine, rule(decoder, "small"), horizon=2) <= 1e-12


@pytest.mark.parametrize("kind", [TabularEngine, LooksAtDrafts])
def test_matched_tokens_are_those_of_plain_decoding(kind):
    engine, plain = kind(MODEL, None, rule("match", "parallel")), TabularEngine(MODEL)
    for seed in range(200):
        draw = Draw(Trajectory.start(PROMPT), 8, LAWS["temperature"], Key(seed))
        assert engine.answer(draw).tokens.tolist() == plain.answer(draw).tokens.tolist()


def walk(lengths, chance, steps):
    """The drafted tokens of each step of a draw whose drafted tokens are kept with this chance."""
    level, counts, uniforms = lengths.start, [], np.random.default_rng(0).random((steps, lengths.after.shape[2]))
    for step in range(steps):
        count = int(lengths.drafted[level])
        kept = [*(uniforms[step, :count] < chance), False].index(False)
        counts.append(count)
        level = lengths.next(level, kept, count)
    return np.array(counts)


def test_blocks_follow_what_is_kept():
    """Whole where nearly all is kept, shorter where less is, and hardly any below break-even, but some again and again."""
    lengths = block_lengths(7, 1.6)
    assert set(lengths.drafted.tolist()) == {0, 1, 3, 7}
    assert np.all(np.diff(lengths.drafted) >= 0)
    assert np.mean(walk(lengths, 0.95, 400) == 7) > 0.95
    assert 1.0 < walk(lengths, 0.5, 2000)[200:].mean() < 6.0
    rare = walk(block_lengths(7, 5.0), 0.3, 4000)[500:]
    assert 0.0 < np.mean(rare > 0) < 0.1
    assert np.flatnonzero(rare)[-1] > 3000


def test_a_block_that_costs_nothing_is_whole_and_one_that_never_pays_is_not_drafted():
    assert set(block_lengths(5, 1.0).drafted[1:].tolist()) == {5}
    assert set(block_lengths(3, 1000.0).drafted.tolist()) == {0}


def test_a_length_is_the_best_of_its_level():
    lengths, most, ratio = block_lengths(7, 1.4), 7, 1.4
    for level in (0, 100, 400, 700, 1000):
        rates = {count: sum((level / 1024) ** k for k in range(count + 1)) / (1 + (ratio - 1) * count / most)
                 for count in (0, 1, 3, 7)}
        assert lengths.drafted[level] == max(rates, key=rates.get)


def test_the_field_is_checked_and_part_of_the_identity(make_config):
    spec = ("decoder=speculative_match", "draft=ngram")
    assert identity_hash(make_config(*spec, "decoder.adaptive=1.3")) != identity_hash(make_config(*spec))
    with pytest.raises(UserError, match=r"decoder.adaptive: given 0.5; allowed"):
        make_config(*spec, "decoder.adaptive=0.5")
    with pytest.raises(UserError, match=r"decoder.adaptive: given 1.3; allowed: null with decoder.fault"):
        make_config(*spec, "decoder.adaptive=1.3", "decoder.fault=greedy_bonus", "name=faults")
    with pytest.raises(UserError, match=r"decoder.adaptive: given 1.3; allowed: null with a draft that learns"):
        make_config("decoder=speculative_match", "draft=tiny", "draft.adapt=online", "decoder.adaptive=1.3")
