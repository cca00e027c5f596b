"""Texts of other people's files reach a terminal as one line without control characters."""

from __future__ import annotations

from dflash_mcmc import errors
from dflash_mcmc.process import program

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
