"""Progress bars: a unit that takes long shows its tokens and their rate, whatever draws them, and the last line is right."""

import itertools
import re

import pytest

import dflash_mcmc as dm
from dflash_mcmc.process import bars
from dflash_mcmc.store.records import read_records
from tests.runs import QUICK, execute

_LINE = re.compile(r" (\d)/1 \[(\d+):(\d+)<.*?(?:, ([\d,]+) tokens, ([\d,.]+) tokens/s)?\]")


@pytest.fixture
def lines(monkeypatch, capsys):
    """The lines that bars have shown: (units done, seconds, tokens, tokens a second). A look at the clock takes a second."""
    ticks = itertools.count(1)
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(ticks)))
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)  # somebody looks on

    def shown() -> list[tuple[int, int, int, float]]:
        return [(int(done), 60 * int(minutes) + int(seconds), int((tokens or "0").replace(",", "")),
                 float((rate or "0").replace(",", "")))
                for done, minutes, seconds, tokens, rate in _LINE.findall(capsys.readouterr().err)]

    return shown


def moves(found) -> None:
    """Before the only unit is done, the count of tokens grows; each rate is that of its line; the unit is done once."""
    before = [tokens for done, _, tokens, _ in found if not done]
    assert len(set(before)) > 3
    assert before == sorted(before)
    # The clock is looked at a few times more before the line is written.
    assert all(tokens / seconds - 0.05 <= rate <= tokens / (seconds - 4) + 0.05
               for _, seconds, tokens, rate in found if seconds > 4)
    assert [done for done, *_ in found] == sorted(done for done, *_ in found)
    assert found[-1][0] == 1
    assert found[-1][2] >= before[-1]


@pytest.mark.parametrize("decoder", [(), ("decoder=speculative_match", "draft=tiny")], ids=["plain", "speculative"])
def test_one_chain_of_a_run_shows_its_tokens(make_config, lines, decoder):
    result = execute(make_config(*QUICK, "dataset.limit=1", *decoder))
    found = lines()
    moves(found)
    assert found[-1][2] == sum(record["tokens_drawn"] for record in read_records(result.folder))


def test_one_chain_of_a_program_shows_its_tokens(lines):
    dm.sample("tiny", None, ["12 + 7 ="], sampler=dm.PowerMH(num_blocks=2, num_steps=1), max_new_tokens=16)
    moves(lines())


def test_tokens_count_for_the_innermost_bar_of_their_thread(lines):
    with bars.Bar(1, "job") as outer:
        with bars.Bar(1, "sample", shown=False):
            bars.drew(5)
        bars.drew(2)
        outer.update()
    bars.drew(7)
    assert [tokens for *_, tokens, _ in lines()] == [0, 2, 2, 2]


def test_a_log_has_a_line_each_ten_seconds(lines, monkeypatch):
    monkeypatch.delattr("sys.ps1")
    with bars.Bar(1, "sample") as shown:
        for _ in range(60):
            bars.drew(1)
        shown.update()
    seconds = [at for _, at, *_ in lines()]
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(seconds[:-1]))
    assert len(seconds) > 5
