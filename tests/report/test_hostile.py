"""Hostile text in ids, questions, answers and names: formulas in CSV files, and control characters in tables."""

from __future__ import annotations

import csv
import io

from dflash_mcmc.report import page
from dflash_mcmc.report.parts import Table, counted, named
from dflash_mcmc.report.probed import csv_of, text_of

FORMULAS = ('=HYPERLINK("http://x","y")', "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\uff1d1")
QUOTED = ("a-b=c", '"', 'a"b', "a\rb", "a\nb", ",")


def test_formulas_in_text_are_texts_and_numbers_stay():
    rows = [{"run": text, "n": -3, "p": -0.5, "gold": "-3.5e2"} for text in FORMULAS]
    rows += [{"run": text, "n": None} for text in QUOTED]
    read = list(csv.DictReader(io.StringIO(csv_of(rows), newline="")))
    assert [row["run"] for row in read] == [*(f"'{text}" for text in FORMULAS), *QUOTED]
    assert [(row["n"], row["p"], row["gold"]) for row in read[: len(FORMULAS)]] == [("-3", "-0.5", "-3.5e2")] * len(FORMULAS)
    assert (read[-1]["n"], read[-1]["p"]) == ("", "")
    assert csv_of([{"=1+1": 1}]).startswith("'=1+1\n")


def test_tables_of_a_terminal_have_no_control_characters():
    hostile = "a\x1b[31m\nb\u202e"
    for text in (page.text_of(Table("t", "t", [named(hostile, "run"), counted("n", "n")], [{"run": hostile, "n": 1}])),
                 text_of([{hostile: hostile}])):
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text.splitlines()) == 3
        assert r"a\x1b[31m\nb\u202e" in text
