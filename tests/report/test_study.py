"""What is compared with what, what is refused, and what is said where a comparison may mislead."""

from __future__ import annotations

import re

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.report.build import build
from dflash_mcmc.report.locate import run_folders
from dflash_mcmc.report.runs import read
from dflash_mcmc.report.study import Study, study_of
from tests.report.folders import identity, record, write


def records(problems: str, correct: str, **rest) -> list[dict]:
    return [record(problem, "correct" if problem in correct else "wrong", **rest) for problem in problems]


@pytest.fixture
def runs(tmp_path):
    """Folder of four runs, in the order in which they were started."""
    for number, name in enumerate(("temp", "greedy", "blend_ps", "ps")):
        write(tmp_path / "demo", name, records("abcd", "ab"), session={"started": str(number)})
    return tmp_path / "demo"


def study_over(folder, **options) -> Study:
    """What a report of the runs below the folder would compare."""
    found, left_out = read(run_folders([folder]))
    return study_of(found, left_out=left_out, **options)


def test_baseline_and_pair_unless_given(runs):
    study = study_over(runs)
    assert study.baseline.label == "greedy"
    assert [run.label for run in study.pair] == ["ps", "blend_ps"]  # they differ in the blend alone


def test_baseline_and_pair_by_label_condition_or_identity(runs):
    study = study_over(runs, baseline="temp", pair=("greedy", "blend_ps"))
    assert study.baseline.label == "temp"
    assert [run.label for run in study.pair] == ["greedy", "blend_ps"]
    digest = study.pair[1].digest
    assert study_over(runs, baseline=digest[:8]).baseline.label == "blend_ps"


@pytest.mark.parametrize(("options", "said"), [
    ({"baseline": "gredy"}, r"--baseline: given 'gredy' \(did you mean 'greedy'\?\); allowed: 'temp', 'greedy'"),
    ({"pair": ("ps", "ps")}, "--pair: given 'ps' twice; allowed: two runs"),
    ({"pair": ("ps", "x")}, "--pair: given 'x'; allowed:"),
])
def test_a_run_that_is_not_there_is_one_line(runs, options, said):
    with pytest.raises(UserError, match=said):
        study_over(runs, **options)


def test_a_condition_of_several_runs_is_not_guessed(tmp_path):
    for seed in (0, 1):
        write(tmp_path / "demo", "ps", records("abcd", "ab"), identity("ps", seed=seed))
    with pytest.raises(UserError, match="--baseline: given 'ps', which 2 runs are; allowed: 'ps seed=0', 'ps seed=1'"):
        study_over(tmp_path / "demo", baseline="ps")


def test_several_datasets_are_refused(runs):
    write(runs, "ps", records("abcd", "ab"), identity("ps", dataset="gsm8k"))
    with pytest.raises(UserError, match=r"given several datasets, math500 .* and gsm8k .*; allowed: runs over one"):
        study_over(runs)


def test_of_several_datasets_the_one_of_most_runs_is_reported_when_asked(runs):
    other = write(runs, "ps", records("abcd", "ab"), identity("ps", dataset="gsm8k"))
    study = study_over(runs, lenient=True)
    assert [run.component("dataset") for run in study.runs] == ["math500"] * 4
    assert study.warnings == [f"left out: {other}: over dataset=gsm8k, and most runs are over another"]


def test_the_same_problem_with_another_answer_is_refused(runs):
    write(runs, "ps", records("abcd", "ab", gold="43"), identity("ps", dataset__content="c" * 32))
    with pytest.raises(UserError, match=r"problem 'a' has the answer '42' in .* and '43' in .*; allowed: runs over"):
        study_over(runs)


def test_runs_without_a_problem_in_common_are_not_compared(tmp_path):
    write(tmp_path / "demo", "greedy", records("abcd", "ab"))
    write(tmp_path / "demo", "ps", records("efgh", "ef"))
    built = build([tmp_path / "demo"])
    (row,) = next(section for section in built.sections if section.name == "paired").tables[0].rows
    assert (row["problems"], row["difference"], row["verdict"]) == (0, None, "no problem in common: not compared")
    overlap = next(section for section in built.sections if section.name == "overlap")
    assert (overlap.tables, overlap.drawings) == ((), ())
    assert "no problem in common" in overlap.text[0]
    assert any("0 of 8 are in all of them" in warning for warning in built.study.warnings)


@pytest.mark.parametrize(("changed", "session", "said"), [
    ({}, {"device": "NVIDIA H200"}, "devices are mixed .*NVIDIA H200.*: seconds do not compare"),
    ({"model__dtype": "float32"}, {}, r"dtypes are mixed \(bfloat16, float32\)"),
    ({"model__content": "e" * 32}, {}, "models are mixed"),
    ({"dataset__max_new_tokens": 512}, {}, r"lengths allowed for an answer are mixed \(1024, 512\)"),
    ({"dataset__prompt": "Why? {question}"}, {}, "prompts are mixed"),
    ({}, {"packages": {"torch": "2.14.0", "transformers": "5.23.0"}}, "versions of torch or transformers are mixed"),
])
def test_what_is_mixed_is_said(tmp_path, changed, session, said):
    write(tmp_path / "demo", "greedy", records("abcd", "ab"))
    write(tmp_path / "demo", "ps", records("abcd", "abc"), identity("ps", **changed), session=session)
    (warning,) = study_over(tmp_path / "demo").warnings
    assert re.search(said, warning)


def test_nothing_is_said_where_nothing_is_mixed(runs):
    assert study_over(runs).warnings == []
