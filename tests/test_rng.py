"""Keys: equal parts give equal numbers, different parts give independent numbers, and any slice can be computed directly."""

import math

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc import errors
from dflash_mcmc.ops import Floor, SamplingParams, grid_slot
from dflash_mcmc.process import program
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.types import Trajectory


def test_numbers_never_change():
    """Compares with stored values, because a new release must be able to resume the runs of an old one."""
    uniforms = Key(0).fold_in("problem", 3, "block", 1).uniforms(0, 3)
    assert uniforms.tolist() == GOLDEN


GOLDEN = [0.2581024255069354, 0.29822548088156997, 0.23048528412840985]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 63, 64, 1000])
def test_any_slice_is_a_slice_of_the_whole(start):
    key = Key(5).fold_in("x")
    assert np.array_equal(key.uniforms(0, 1100)[start:], key.uniforms(start, 1100))
    assert np.array_equal(key.uniforms(0, 1100)[start : start + 7], key.uniforms(start, start + 7))


def test_keys_differ_by_type_order_and_number_of_parts():
    keys = [Key(0).fold_in(1, 2), Key(0).fold_in(2, 1), Key(0).fold_in("1", 2), Key(0).fold_in("12"), Key(0).fold_in(12),
            Key(0).fold_in("1", "2"), Key(1).fold_in(1, 2), Key(0)]
    assert len({key.uniform() for key in keys}) == len(keys)
    assert Key(0).fold_in(1).fold_in(2).uniform() == Key(0).fold_in(1, 2).uniform()


def test_uniforms_are_uniform_and_keys_uncorrelated():
    """The seeds are fixed, so the p-values are constants."""
    columns = np.array([Key(9).fold_in("chain", n).uniforms(0, 50) for n in range(400)])
    assert stats.kstest(columns.ravel(), "uniform").pvalue > 0.01
    assert np.abs(np.corrcoef(columns[:, :10].T) - np.eye(10)).max() < 0.2
    assert 0.0 < columns.min() < columns.max() < 1.0


def test_integer_covers_its_range():
    assert {Key(1).fold_in(n).integer(5) for n in range(200)} == {0, 1, 2, 3, 4}


def test_categorical_is_the_inverse_transform():
    probabilities = np.array([0.2, 0.0, 0.5, 0.3])
    for number in range(100):
        key = Key(2).fold_in(number)
        assert key.categorical(probabilities) == (0 if key.uniform() < 0.2 else 2 if key.uniform() < 0.7 else 3)


def test_a_contest_is_won_in_proportion_to_the_weights():
    """The keys are fixed, so the shares are constants. Their standard error is 0.01."""
    weights = np.array([0.1, 0.0, 0.6, 0.3])
    contests = [Key(4).fold_in(number).contest(4) for number in range(2000)]
    with np.errstate(divide="ignore"):
        won = np.bincount([contest.winner(np.log(weights)) for contest in contests], minlength=4) / len(contests)
    assert won == pytest.approx(weights, abs=0.03)


def test_a_contestant_wins_with_more_than_its_lead():
    contest = Key(4).contest(2)
    lead = contest.lead(0, 1)
    assert contest.winner(np.array([0.0, lead + 1e-9])) == 1
    assert contest.winner(np.array([0.0, lead - 1e-9])) == 0


def test_log_uniform_is_the_logarithm_of_uniform():
    assert Key(3).log_uniform() == pytest.approx(np.log(Key(3).uniform()))


def test_extreme_random_bits_give_neither_zero_nor_one(monkeypatch):
    class Extreme:
        def __init__(self, key):
            pass

        def random_raw(self, count):
            return np.array([0, 2**64 - 1], dtype=np.uint64)[:count]

    monkeypatch.setattr(np.random, "Philox", Extreme)
    low, high = Key(0).uniforms(0, 2)
    assert 0.0 < low < high < 1.0


def test_integers_of_any_type_are_equal_parts_and_bounds():
    key = Key(3)
    for kind in (np.int64, np.int32, np.uint8):
        assert key.fold_in(kind(3)).uniform() == key.fold_in(3).uniform() != key.fold_in("3").uniform()
        assert np.array_equal(key.uniforms(kind(4), kind(13)), key.uniforms(4, 13))


@pytest.mark.parametrize(("wrong", "error", "said"), [
    (lambda key: key.integer(0), ValueError, "at least 1"), (lambda key: key.uniforms(3, 2), ValueError, "start <= stop"),
    (lambda key: key.fold_in(3.0), TypeError, None), (lambda key: key.uniforms(0.0, 3), TypeError, None)],
    ids=["empty range", "bad slice", "float part", "float bound"])
def test_what_has_no_number_is_refused(wrong, error, said):
    with pytest.raises(error, match=said):
        wrong(Key(0))


def test_a_stream_returns_the_numbers_of_its_key_in_order():
    key = Key(4)
    stream = Stream(key)
    assert [stream.uniform() for _ in range(130)] == key.uniforms(0, 130).tolist()


def test_stream_choices():
    stream = Stream(Key(4))
    assert {stream.integer(2, 4) for _ in range(100)} == {2, 3, 4}
    assert {stream.choice("ab", (1.0, 0.0)) for _ in range(50)} == {"a"}
    assert sorted(stream.shuffle(list(range(10)))) == list(range(10))


# Definitions of `ops` as literal values. All engines use them, so a comparison of engines cannot test them.

def path(prompt: int, generated: int) -> Trajectory:
    """A trajectory of these lengths, with log p -1, -2, ... and log q -0.5."""
    start = Trajectory.start(np.arange(prompt))
    log_p = -np.arange(1.0, generated + 1.0)
    return start.extended(np.arange(generated), log_p, np.full(generated, -0.5), np.zeros((generated, 2)), False, None, None)


def test_the_first_slot_of_each_block_is_an_anchor():
    assert [grid_slot(number, 4) for number in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_floor_by_hand():
    floor = Floor(log_uniform=-1.0, alpha=2.0, reference=-3.0, length=4, margin=0.25)
    assert floor.weights(path(3, 3), 1).tolist() == [2.0 * -2.0 + 0.5, 2.0 * -5.0 + 1.0]
    assert floor.bound(-4.0, 2) == pytest.approx(-4.0 + 3.0 + math.log(2.0))
    assert floor._replace(length=None).bound(-4.0, 2) == -1.0
    # b + 0.25 <= -1, and b = weight + 3 + log(4 / 8)
    edge = -1.25 - 3.0 + math.log(2.0)
    assert floor.crossed(edge - 1e-9, 8)
    assert not floor.crossed(edge + 1e-9, 8)


def test_which_parameters_truncate_and_which_read_earlier_tokens():
    assert [SamplingParams(**given).truncates for given in (
        {}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 2.0})] == [
            False, True, True, True, True, False]
    assert [SamplingParams(**given).has_penalty for given in (
        {}, {"temperature": 0.5}, {"repetition_penalty": 2.0}, {"frequency_penalty": -1.0}, {"presence_penalty": 1.0})] == [
            False, False, True, True, True]


# Texts of other people's files reach a terminal as one line without control characters.

HOSTILE = "a\x1b[2J\x1b]0;title\x07\rb\nc\x9b31m\u202egnp\u2028\ud800"


def test_control_characters_are_shown_as_escapes():
    assert errors.one_line(HOSTILE) == r"a\x1b[2J\x1b]0;title\x07\rb\nc\x9b31m\u202egnp\u2028\ud800"
    assert errors.one_line(HOSTILE).isprintable()
    assert errors.printable("x\n\ty\x1b", keep="\n\t") == "x\n\ty\\x1b"
    assert errors.one_line("Zahlen ℕ, 数, e\u0301, क\u094d\u200dष") == "Zahlen ℕ, 数, e\u0301, क\u094d\u200dष"


def test_a_very_long_id_does_not_fill_the_terminal():
    line = errors.one_line(f"problem {'x' * 10_000}: not drawn")
    assert len(line) < 4_100
    assert line.startswith("problem xxx")
    assert line.endswith("x: not drawn")
    assert "[... 6,019 characters ...]" in line


def test_notes_and_errors_are_one_printable_line(capsys):
    def mistake() -> None:
        raise errors.UserError(HOSTILE)

    errors.note(HOSTILE)
    assert program.guarded(mistake) == program.USER_ERROR
    noted, said = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert noted.isprintable()
    assert said == f"error: {noted}"
