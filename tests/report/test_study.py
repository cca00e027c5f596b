"""The choice of baseline and pair, what is refused, and the warnings about misleading comparisons."""

import re

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.report import build as report
from dflash_mcmc.report.build import build, by_dataset
from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.report.sections import overall, samples
from dflash_mcmc.report.study import study_of
from tests.report.folders import identity, record, study_over, write


def records(problems: str, correct: str, **rest) -> list[dict]:
    return [record(problem, "correct" if problem in correct else "wrong", **rest) for problem in problems]


@pytest.fixture
def runs(tmp_path):
    """A folder of four runs, in the order of their start."""
    for number, name in enumerate(("temp", "greedy", "blend_ps", "ps")):
        write(tmp_path / "demo", name, records("abcd", "ab"), session={"started": str(number)})
    return tmp_path / "demo"


def test_baseline_and_pair(runs):
    """By label, condition or identity; without a name greedy decoding, and two runs that differ only in the blend."""
    study = study_over(runs)
    assert (study.baseline.label, [run.label for run in study.pair], study.warnings) == ("greedy", ["ps", "blend_ps"], [])
    study = study_over(runs, baseline="temp", pair=("greedy", "blend_ps"))
    assert study.baseline.label == "temp"
    assert [run.label for run in study.pair] == ["greedy", "blend_ps"]
    digest = study.pair[1].digest
    assert study_over(runs, baseline=digest[:8]).baseline.label == "blend_ps"


@pytest.mark.parametrize(("options", "message"), [
    ({"baseline": "gredy"}, r"--baseline: given 'gredy' \(did you mean 'greedy'\?\); allowed: 'temp', 'greedy'"),
    ({"pair": ("ps", "ps")}, "--pair: given 'ps' twice; allowed: two runs"),
    ({"pair": ("ps", "x")}, "--pair: given 'x'; allowed:"),
    ({"baseline": "blend_ps"}, "--baseline: given 'blend_ps', which matches 2 runs; allowed: 'blend_ps seed=0', 'blend_ps s"),
])
def test_an_unknown_run_is_a_one_line_error(runs, options, message):
    write(runs, "blend_ps", records("abcd", "ab"), identity("blend_ps", seed=1))
    with pytest.raises(UserError, match=message):
        study_over(runs, **options)


def test_each_dataset_is_a_part_of_the_page(runs, undrawn, monkeypatch):
    """Three datasets, one of them in two versions under one name. Baselines and labels are those of each part."""
    write(runs, "ps", records("abcd", "ab"), identity("ps", dataset="gsm8k"))
    write(runs, "greedy", records("abcd", "abc", gold="43"), identity("greedy", dataset__content="c" * 32))
    quick = overall.section, samples.section, overall.cost_section
    monkeypatch.setattr(report, "_SECTIONS", quick)  # the others take longer
    built = build([runs], baseline="greedy")
    assert [(part.name, [run.label for run in study.runs], study.baseline.label)
            for part, study in zip(built.parts[1:], built.studies, strict=True)] == [
        ("math500", ["temp", "greedy", "blend_ps", "ps"], "greedy"), ("math500-2", ["greedy"], "greedy"),
        ("gsm8k", ["ps"], "ps")]
    assert [row["run"] for row in built.parts[0].sections[0].tables[0].rows] == ["temp", "greedy", "blend_ps", "ps"]
    assert built.parts[0].sections[0].tables[0].cells()[1] == ["greedy", "50.0 % [15.0, 85.0]", "75.0 % [30.1, 95.4]", ""]
    (note,) = built.parts[0].warnings
    assert re.fullmatch(r"two versions of math500 are here: problem 'a' has the answer '42' in .* and '43' in .*; they are "
                        "separate datasets", note)
    page, files = built.page.read_text(), {path.name for path in (built.folder / "tables").iterdir()}
    assert {"datasets.csv", "math500_overall.csv", "gsm8k_overall.csv", "math500-2_overall.csv"} <= files
    assert all(f'id="{part.name}-overall"' in page and f"# {part.name}\n" in (built.folder / "report.md").read_text()
               for part in built.parts[1:])
    names = [line for line in built.overall.splitlines() if line and not line.startswith("|")]
    assert names == ["math500", "math500-2", "gsm8k"]
    ids = re.findall(r'(?<![\w-])id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_files_with_the_same_ids_are_datasets_with_their_names(tmp_path):
    for number, name in enumerate(("first", "second")):
        for condition in ("greedy", "temp"):
            write(tmp_path / "demo", condition, records("abcd", "ab", gold=name),
                  identity(condition, dataset="jsonl", dataset__content=name), config={"dataset": {
                      "name": "jsonl", "path": f"{tmp_path}/{name}.jsonl", "limit": 4}}, session={"started": str(number)})
    found, notes = by_dataset(read(run_folders([tmp_path]))[0])
    assert [(name, [run.label for run in of]) for name, of in found] == [
        ("first.jsonl", ["greedy", "temp"]), ("second.jsonl", ["greedy", "temp"])]
    assert notes == []


def test_a_run_that_no_dataset_has_is_refused(runs):
    write(runs, "ps", records("abcd", "ab"), identity("ps", dataset="gsm8k"))
    with pytest.raises(UserError, match="--baseline: given x, which no dataset has; allowed: 'temp', 'greedy'"):
        build([runs], baseline="x")


def test_records_that_disagree_with_their_dataset_are_refused(runs):
    write(runs, "ps", records("abcd", "ab", gold="43"), identity("ps", seed=1))
    with pytest.raises(UserError, match=r"problem 'a' has the answer '42' in .* and '43' in .*, though both say that"):
        build([runs])


def test_runs_without_a_problem_in_common_are_not_compared(undrawn, tmp_path):
    write(tmp_path / "demo", "greedy", records("abcd", "ab"))
    write(tmp_path / "demo", "ps", records("efgh", "ef"))
    built = build([tmp_path / "demo"])
    (row,) = next(section for section in built.parts[0].sections if section.name == "paired").tables[0].rows
    assert (row["problems"], row["difference"], row["verdict"]) == (0, None, "not compared: no problem in common")
    overlap = next(section for section in built.parts[0].sections if section.name == "overlap")
    assert (overlap.tables, overlap.drawings) == ((), ())
    assert "no problem in common" in overlap.text[0]
    assert any("0 of 8 problems are in all runs" in warning for warning in built.parts[0].warnings)


@pytest.mark.parametrize(("changed", "session", "message"), [
    ({}, {"device": "NVIDIA H200"}, "differ in devices .*NVIDIA H200.*: seconds are not comparable"),
    ({"model__dtype": "float32"}, {}, r"differ in dtypes \(bfloat16; float32\)"),
    ({"model__content": "e" * 32}, {}, "differ in models"),
    ({"engine": "api", "engine__content": "vllm toy"}, {}, "weights of ps are a server's, which names its model vllm toy;"),
    ({"dataset__max_new_tokens": 512}, {}, r"differ in limits of the answer length \(1024; 512\)"),
    ({"dataset__prompt": "Why? {question}"}, {}, "differ in prompts"),
    ({}, {"packages": {"torch": "2.14.0", "transformers": "5.23.0"}}, "differ in versions of torch or transformers"),
])
def test_differences_between_runs_are_reported(tmp_path, changed, session, message):
    write(tmp_path / "demo", "greedy", records("abcd", "ab"))
    write(tmp_path / "demo", "ps", records("abcd", "abc"), identity("ps", **changed), session=session)
    (warning,) = study_over(tmp_path / "demo").warnings
    assert re.search(message, warning)


@pytest.mark.parametrize(("conditions", "chosen", "warned"), [
    ([("ps", {}), ("greedy", {})], "greedy", False),
    ([("blend_ps", {}), ("blend_ps", {"blend__beta": 0.0})], "blend_ps beta=0", False),
    ([("temp", {}), ("blend_ps", {}), ("ps", {})], "ps", False),
    ([("ps", {"sampler__alpha": 2.0}), ("ps", {"sampler__alpha": 8.0})], "ps alpha=2", True),
])
def test_the_baseline_is_plain_greedy_else_the_model_alone_else_the_first_with_a_warning(tmp_path, conditions, chosen, warned):
    folders = [write(tmp_path / "demo", name, [record("a")], identity(name, **made)) for name, made in conditions]
    study = study_of(read(run_folders(folders))[0])
    assert study.baseline.label == chosen
    assert any("--baseline names another" in warning for warning in study.warnings) is warned
