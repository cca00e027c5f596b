"""The worker's side of vLLM: draws in pieces, and the tables of the ledger."""

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.vllm import drawing
from dflash_mcmc.engine.vllm.drawing import Ledger, Limit, Ticket
from dflash_mcmc.ops import SamplingParams

LAW = SamplingParams(0.6, top_k=30, repetition_penalty=1.3, frequency_penalty=0.2)


def ticket(number: int, length: int = 5, **changes) -> Ticket:
    own = Ticket(number, 2, 3, SamplingParams(), (), False, False, bytes(15) + bytes([number]), length, (2,))
    return own._replace(**changes)


@pytest.mark.parametrize("rows_together", [1, 2])
def test_pieces_change_no_bit(rows_together):
    """Eleven rows with three laws, scores among them, in pieces of some rows and whole."""
    logits = torch.randn(11, 700, generator=torch.Generator().manual_seed(0)) * 4
    logits[7] = torch.nan
    tickets = [ticket(number, params=(SamplingParams(), SamplingParams(0.25), LAW)[number // 2 % 3],
                      laws=(LAW,) if number % 3 else (), entropy=bool(number % 3), forced=(4, 5, 6) if number > 6 else ())
               for number in range(11)]
    asked = (np.random.Generator(np.random.Philox(0)).uniform(size=11), np.arange(40, 51),
             lambda place: ([9, 11, 5, 5, place], 2))
    whole = drawing.draw(logits, drawing.groups_of(tickets, 11), *asked)
    pieces = drawing.groups_of(tickets, rows_together)
    assert len(pieces) > len(drawing.groups_of(tickets, 11)) > 2
    for mine, expected in zip(drawing.draw(logits, pieces, *asked), whole, strict=True):
        np.testing.assert_array_equal(mine, expected)
    tokens, _, finite = whole
    assert finite.tolist() == [place != 7 for place in range(11)]
    assert (tokens[8:] == np.arange(48, 51)).all()
    assert (tokens[:6] != np.arange(40, 46)).all()


def write(ledger: Ledger, rows: list[int], numbers: list[int], tokens: list[int], finite: bool = True) -> np.ndarray:
    scores = np.arange(4.0 * len(rows)).reshape(len(rows), 4) - 6
    return ledger.write(np.array(rows), np.array(numbers), np.array(tokens), scores, np.full(len(rows), finite))


def test_tables_grow_and_keep_what_was_written():
    ledger, expected = Ledger(), {}
    for number in range(100):
        row = ledger.open(ticket(number, length=3 + 7 * number, laws=(LAW,) if number == 50 else ()))
        assert ledger.open(ticket(number)) == row  # a request that was preempted
        write(ledger, [row], [0], [number])
        np.testing.assert_array_equal(ledger.uniforms(np.array([row]), np.array([2])), ticket(number).uniforms()[2:3])
        expected[number] = [number]
    assert len(ledger) == 100
    found = ledger.take(range(200))
    assert {number: drawn.tokens.tolist() for number, drawn in found.items()} == expected
    assert found[50].scores.shape == (1, 8)
    assert found[51].scores.tolist() == [[-6.0, -5.0, -4.0, -3.0]]
    assert not len(ledger)


def test_a_row_is_used_again_without_what_was_in_it():
    ledger = Ledger()
    limit = Limit(2.0, -1.0, 0.0)
    for number in range(40):
        row = ledger.open(ticket(number, limit=limit if number % 2 else None))
        ends = write(ledger, [row], [0], [5], finite=number % 4 != 2)
        assert ends.tolist() == [number % 2 == 1 or number % 4 == 2]  # -1 + 2 * -6 + 5 is not above 0
        drawn = ledger.take([number])[number]
        assert (drawn.tokens.tolist(), drawn.failed, drawn.forwards) == (([], True, 1) if number % 4 == 2 else ([5], False, 1))


def test_a_token_that_is_written_again_takes_the_place_of_the_first():
    """A row of an incomplete prompt draws a token that is thrown away, and its weight does not stay."""
    ledger = Ledger()
    row = ledger.open(ticket(0, limit=Limit(1.0, 0.0, -1.5, np.log(4.0))))
    assert not write(ledger, [row], [0], [7])[0]  # -6 + 5 + log(4 / 4) > -1.5
    assert not write(ledger, [row], [0], [8])[0]
    assert write(ledger, [row], [1], [9])[0]  # -1 - 1 + log(4 / 5) is not
    drawn = ledger.take([0])[0]
    assert drawn.tokens.tolist() == [8, 9]
    assert drawn.forwards == 3
