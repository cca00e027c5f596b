"""The section on budgets, from records written by hand."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_mcmc.registry import components
from dflash_mcmc.report import figure
from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.report.sections import budget
from dflash_mcmc.report.study import study_of
from dflash_mcmc.statistics.paired import problems_needed
from tests.report.folders import identity, record, write

PROBLEMS = 40


def fields(sampler: str, **changed) -> dict:
    """The fields of a sampler as `config.yaml` has them."""
    return {"name": sampler, **dataclasses.asdict(components("sampler")[sampler].cls()), **changed}


def answers(solved: range, cost: int, chains: int = 1) -> list[dict]:
    return [record(f"p{place}", "correct" if place in solved else "wrong", chain, token_forwards=cost,
                   share_seconds=cost / 100)
            for place in range(PROBLEMS) for chain in range(chains)]


def add(folder, condition: str, solved: range, cost: int, given: float, sampler: dict, *, chains: int = 1,
        unit: str = "token_forwards", **changed) -> None:
    made = identity(condition, **{"sampler": sampler["name"], **changed})
    write(folder, condition, answers(solved, cost, chains), made, num_chains=chains,
          config={"budget": given, "budget_unit": unit, "sampler": sampler, "aggregate": ["majority"] if chains > 1 else None})


def section_over(folder):
    return budget.section(study_of(read(run_folders([folder]))[0]))


def rows(section, name: str) -> dict[tuple[str, float | None], dict]:
    table = next(table for table in section.tables if table.name == name)
    return {(row["method"], row["budget"]): row for row in table.rows}


@pytest.fixture
def folder(tmp_path):
    """Budgets 1,000 and 2,000: votes of four and eight draws, and power sampling, which is better at 1,000 only."""
    add(tmp_path / "x", "greedy", range(18), 200, 1000, fields("greedy"))
    add(tmp_path / "x", "temp", range(20), 250, 2000, fields("temperature"), chains=8)
    add(tmp_path / "x", "ps", range(32), 1010, 1000, fields("power_mh", num_steps=3), sampler__num_steps=3)
    add(tmp_path / "x", "ps", range(2, 21), 1900, 2000, fields("power_mh", num_steps=6), sampler__num_steps=6)
    return tmp_path / "x"


def test_each_method_is_one_line_over_its_budgets(folder):
    found = rows(section_over(folder), "budget")
    assert {key: (row["setting"], row["spent"], row["accuracy"]) for key, row in found.items()} == {
        ("greedy", None): ("-", 200, 18 / 40), ("temp", None): ("num_chains=1", 250, 0.5),
        ("temp, majority vote", 1000.0): ("num_chains=4", 1000, 0.5),
        ("temp, majority vote", 2000.0): ("num_chains=8", 2000, 0.5),
        ("ps", 1000.0): ("sampler.num_steps=3", 1010, 0.8), ("ps", 2000.0): ("sampler.num_steps=6", 1900, 19 / 40)}
    with figure.style():
        (axes,) = section_over(folder).drawings[0].make().axes
    assert axes.get_xscale() == "log"
    lines = {container.get_label(): container.lines[0] for container in axes.containers}
    (first, second) = lines["ps"].get_xydata().tolist()
    assert (first[1], second[1]) == (80.0, 47.5)
    assert (first[0] / 1010, second[0] / 1900) == (pytest.approx(0.98), pytest.approx(0.98))  # the second of four methods
    assert set(lines) == {"greedy", "temp", "temp, majority vote", "ps"}


def test_differences_to_the_vote_at_the_same_budget_are_paired_and_adjusted(folder):
    section = section_over(folder)
    found = rows(section, "budget_paired")
    better, tied = found["ps", 1000.0], found["ps", 2000.0]
    assert len(found) == 2
    assert (better["test"], better["p_value"], better["p_holm"]) == (
        "exact McNemar", pytest.approx(2 * 0.5**12), pytest.approx(4 * 0.5**12))
    assert (better["difference"], better["verdict"]) == (pytest.approx(0.3), "resolved")
    assert (tied["difference"], tied["p_holm"], tied["verdict"]) == (pytest.approx(-0.025), 1.0, "not resolved")
    assert (tied["baseline_setting"], tied["baseline_spent"]) == ("num_chains=8", 2000)
    needed = [problems_needed(0.05, share) for share in (12 / 40, 3 / 40)]
    assert [better["problems_needed"], tied["problems_needed"]] == needed
    strict = problems_needed(0.05, 12 / 40, level=0.05 / 2)
    text = " ".join(section.text)
    assert f"To detect 5 points it takes {needed[0]:,} problems, and {strict:,} for every one of the 2 comparisons" in text
    assert "With the 40 problems of these runs" in text


def test_a_point_off_its_budget_is_shown_and_not_compared(folder):
    add(folder, "ps", range(40), 1300, 1000, fields("power_mh", num_steps=4, alpha=2.0), sampler__num_steps=4,
        sampler__alpha=2.0)
    section = section_over(folder)
    off = [row for row in rows(section, "budget").values() if row["spent"] == 1300]
    assert [row["compared"] for row in off] == ["no: off its budget"]
    assert len(rows(section, "budget_paired")) == 2


def test_seconds_are_the_shares_of_the_device(tmp_path):
    add(tmp_path / "x", "temp", range(20), 250, 10, fields("temperature"), chains=4, unit="seconds")
    add(tmp_path / "x", "ps", range(32), 1010, 10, fields("power_mh"), unit="seconds")
    section = section_over(tmp_path / "x")
    assert rows(section, "budget")["ps", 10.0]["spent"] == pytest.approx(10.1)
    assert ("ps", 10.0) in rows(section, "budget_paired")
    assert "device seconds" in section.text[0]


def test_without_a_budget_there_is_no_section_and_without_votes_no_comparison(tmp_path):
    write(tmp_path / "plain", "ps", answers(range(3), 700))
    assert section_over(tmp_path / "plain") is None
    add(tmp_path / "x", "ps", range(32), 1010, 1000, fields("power_mh"))
    section = section_over(tmp_path / "x")
    assert [table.name for table in section.tables] == ["budget"]
    assert "No number of problems can be stated" in section.text[-1]
