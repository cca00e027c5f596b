"""Operations asked for together, further laws of a token, and the entropy column, on the slow engines."""

import numpy as np
import pytest

from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.ops import Draw, SamplingParams, Score, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT
from dflash_mcmc.types import Trajectory

ENGINE = TabularEngine(TabularModel(vocab_size=5, stop_ids=(0,), seed=3))
COLD = SamplingParams(temperature=0.5)
LAWS = (SamplingParams(), COLD)


def _draw(number, **fields):
    return Draw(Trajectory.start(PROMPT), 6, COLD, Key(7).fold_in(number), **fields)


def test_the_answers_of_a_together_are_in_its_order_and_equal_single_answers():
    operations = tuple(map(_draw, range(4)))

    def chain():
        return (yield Together(operations))

    for answer, operation in zip(ENGINE.run(chain()), operations, strict=True):
        np.testing.assert_array_equal(answer.tokens, ENGINE.answer(operation).tokens)


def test_a_token_has_log_q_and_interval_under_each_law():
    drawn = ENGINE.answer(_draw(0, laws=LAWS))
    assert drawn.laws.shape == (drawn.length, 2, 3)
    np.testing.assert_allclose(drawn.laws[:, 0, 0], drawn.log_p)  # the first law is p itself
    own = drawn.under(1)  # and the second is the one that it was drawn from
    np.testing.assert_array_equal(own.log_q, drawn.log_q)
    np.testing.assert_array_equal(own.interval, drawn.interval)


def test_a_draw_and_a_score_give_the_same_columns():
    cut = COLD._replace(top_k=3, top_p=0.9)
    drawn = ENGINE.answer(_draw(0, laws=LAWS, entropy=True, kept=True)._replace(params=cut))
    scored = ENGINE.answer(Score(Trajectory.start(PROMPT), drawn.tokens, cut, laws=LAWS, entropy=True, kept=True))
    np.testing.assert_array_equal(scored.kept, drawn.kept)
    np.testing.assert_array_equal(scored.laws, drawn.laws)
    np.testing.assert_array_equal(scored.entropy, drawn.entropy)


def test_the_entropy_is_that_of_p_and_not_of_the_law_of_the_draw():
    drawn = ENGINE.answer(_draw(0, entropy=True))
    log_p = ENGINE.log_p(drawn.prefix(1))
    assert drawn.entropy[1] == exact_law.entropy(log_p) == pytest.approx(-(np.exp(log_p) * log_p).sum())


def test_a_prefix_keeps_its_columns_and_a_draw_without_them_drops_them():
    drawn = ENGINE.answer(_draw(0, laws=LAWS, entropy=True))
    prefix = drawn.prefix(1)
    assert (prefix.laws.shape, prefix.entropy.shape) == ((1, 2, 3), (1,))
    again = ENGINE.answer(Draw(prefix, 6, COLD, Key(8), laws=LAWS, entropy=True))
    np.testing.assert_array_equal(again.laws[:1], drawn.laws[:1])
    assert ENGINE.answer(Draw(prefix, 6, COLD, Key(8))).laws is None


def test_columns_are_refused_after_tokens_that_lack_them():
    without = ENGINE.answer(_draw(0)).prefix(1)
    with pytest.raises(ValueError, match="lacks them"):
        ENGINE.answer(Draw(without, 6, COLD, Key(8), entropy=True))
    with pytest.raises(ValueError, match="no log q under further laws"):
        without.under(0)
