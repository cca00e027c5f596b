"""The report of the guided-power-sampling document's counts has the document's tables and all the files that it names."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dflash_mcmc.config.command import check_command
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.report.__main__ import main
from dflash_mcmc.report.build import Built, build
from dflash_mcmc.report.parts import ReportTable
from dflash_mcmc.runner.tasks import tasks_of
from dflash_mcmc.store.files import to_line
from dflash_mcmc.store.folder import RunStore
from tests import published
from tests.golden.runs import RUNS, overrides, stored
from tests.report.folders import identity, record, write

CONDITIONS = ("greedy", "temp", "ps", "blend_greedy", "blend_ps", "draft_blend_ps")
SIX_FIGURES = ("accuracy", "architecture", "difficulty", "overlap", "paper_comparison", "draft_comparison")


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> Built:
    """The report of the document's six conditions."""
    folder = tmp_path_factory.mktemp("outputs") / "document"
    for number, name in enumerate(CONDITIONS):
        write(folder, name, published.records(name), session={"started": f"2026-02-14T0{number}:00:00+00:00"})
    return build([folder])


def table(built: Built, name: str) -> dict[str, dict[str, str]]:
    """The displayed cells of a table, by first column and heading."""
    found = _found(built, name)
    return {row[0]: dict(zip(found.columns, row, strict=True)) for row in found.cells()}


def _found(built: Built, name: str) -> ReportTable:
    return next(table for section in built.parts[0].sections for table in section.tables if table.name == name)


def rows(built: Built, name: str) -> list[dict[str, str]]:
    """The rows of a table's CSV file."""
    with (built.folder / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_4_1(document):
    columns = ("correct", "total", "accuracy", "avg tokens", "avg time (s)", "MH accept")
    found = {name: tuple(row[column] for column in columns) for name, row in table(document, "overall").items()}
    assert found == {
        "greedy": ("74", "104", "71.2 %", "626.0", "64.00", "-"),
        "temp": ("73", "104", "70.2 %", "626.0", "65.00", "-"),
        "ps": ("75", "104", "72.1 %", "613.0", "511.00", "55.8 %"),
        "blend_greedy": ("71", "104", "68.3 %", "627.0", "62.00", "-"),
        "blend_ps": ("81", "104", "77.9 %", "604.0", "471.00", "50.4 %"),
        "draft_blend_ps": ("75", "104", "72.1 %", "613.0", "511.00", "51.6 %"),
    }
    assert list(found) == list(CONDITIONS)  # in the order in which they were started
    assert table(document, "overall")["greedy"]["95 % interval"] == "61.8 - 79.0"  # Wilson 1927, by hand


def test_table_4_2(document):
    found = table(document, "difficulty")
    easy, hard = "easy (greedy right), n = 74", "hard (greedy wrong), n = 30"
    assert {name: (row[easy], row[hard]) for name, row in found.items() if name != "draft_blend_ps"} == {
        "greedy": ("100.0 % (74/74)", "0.0 % (0/30)"), "temp": ("97.3 % (72/74)", "3.3 % (1/30)"),
        "ps": ("94.6 % (70/74)", "16.7 % (5/30)"), "blend_greedy": ("91.9 % (68/74)", "10.0 % (3/30)"),
        "blend_ps": ("98.6 % (73/74)", "26.7 % (8/30)")}


def test_table_4_3_and_its_p_value(document):
    assert {name: row["problems"] for name, row in table(document, "overlap").items()} == {
        "both correct": "74", "ps only": "1", "blend_ps only": "7", "neither": "22"}
    section = next(section for section in document.parts[0].sections if section.name == "overlap")
    assert "p = 0.070 (exact McNemar, not adjusted): it is not resolved" in section.text[0]


def test_table_4_4_with_the_interval_that_the_document_lacks(document):
    (row,) = table(document, "interaction").values()
    assert (row["greedy"], row["greedy, blend"]) == ("71.2 %", "68.3 % (-2.9)")
    assert (row["sampler"], row["sampler, blend"]) == ("72.1 %", "77.9 % (+5.8)")
    assert row["sum of the two effects (points)"] == "-1.9"  # the document's -2.0 adds rounded numbers
    assert row["effect of both (points)"] == "+6.7"
    (full,) = rows(document, "interaction")
    assert float(full["interaction"]) == pytest.approx((81 - 75 - 71 + 74) / 104)
    assert float(full["interaction_low"]) < float(full["interaction"]) < float(full["interaction_high"])


def test_table_6_3(document):
    found = table(document, "blend_sources")
    assert {name: (row["correct"], row["total"], row["accuracy"].partition(" [")[0], row["MH accept"], row["blend source"])
            for name, row in found.items()} == {
        "ps": ("75", "104", "72.1 %", "55.8 %", "-"), "draft_blend_ps": ("75", "104", "72.1 %", "51.6 %", "draft"),
        "blend_ps": ("81", "104", "77.9 %", "50.4 %", "layer 33")}


def test_improvements_are_next_to_the_published_ones(document):
    found = table(document, "improvements")
    assert found["power sampling over base (temperature 1)"]["Qwen2.5-Math-7B"] == "+25.2 (+50.8 %)"
    assert found["power sampling over low temperature"]["Qwen2.5-7B"] == "+7.8 (+12.4 %)"
    ours, theirs = (found["blend, power sampling over power sampling"][name] for name in (
        "these runs", "Qwen3-4B, guided power sampling document"))
    assert theirs == "+5.8 (+8.0 %)"
    later = found["blend, power sampling over power sampling"]["Qwen3-4B, its project later"]
    assert later == "+1.2 (+1.4 %)"
    assert re.fullmatch(r"\+5\.8 \[[+-]\d\.\d, \+1\d\.\d\] \(\+8\.0 %\)", ours)  # these runs repeat the document's counts


def test_comparisons_with_the_baseline_are_adjusted_and_ties_are_called_ties(document):
    found = {row["run"]: row for row in rows(document, "paired")}
    assert set(found) == set(CONDITIONS) - {"greedy"}
    assert float(found["blend_ps"]["p_value"]) == pytest.approx(2 * sum((1, 9)) / 2**9)  # by hand: 8 against 1 problems
    assert all(float(row["p_holm"]) >= float(row["p_value"]) for row in found.values())
    assert {row["verdict"] for row in found.values()} == {"not resolved"}
    assert int(found["blend_ps"]["problems_needed"]) > 104  # only 9 of 104 problems differ, too few to detect 3 points
    assert float(found["blend_ps"]["detectable_difference"]) > 0.03
    assert (found["blend_ps"]["chains_needed"], found["blend_ps"]["cheaper"]) == ("7", "problems")


def test_six_figures_of_the_document_and_no_empty_one(document):
    figures = document.folder / "figures"
    names = {path.stem for path in figures.iterdir()}
    assert {f"fig_math500_{name}" for name in SIX_FIGURES} <= names
    assert "fig_pareto" in names
    for name in names:
        assert (figures / f"{name}.svg").stat().st_size > 5_000
        with Image.open(figures / f"{name}.png") as image:
            ink = (np.asarray(image.convert("L")) < 200).mean()
        assert 0.002 < ink < 0.5, name


def test_the_page_is_complete_and_loads_nothing(document):
    page, markdown = document.page.read_text(), (document.folder / "report.md").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    namespace = "http://www.w3.org/2000/svg"  # a name that no browser loads
    assert not re.search(r"@import|url\((?!#)|https?:", page.replace("http-equiv", "").replace(namespace, ""))
    figures = [drawing.name for section in document.parts[0].sections for drawing in section.drawings]
    assert page.count('<svg role="img"') == len(figures)
    assert all(f"](figures/{name}.png)" in markdown for name in figures)
    for section in document.parts[0].sections:
        assert f'<h2>{section.title}</h2>' in page
        assert f"## {section.title}\n" in markdown
    for file in (document.folder / "tables").iterdir():
        assert f"tables/{file.name}" in page
    assert "left out" not in " ".join(document.parts[0].warnings)


def test_records_alone_are_enough_and_old_files_are_removed(document, undrawn, tmp_path):
    """Without summaries the tables are the same; a figure of an earlier report in the folder is removed."""
    folder = tmp_path / "document"
    for name in CONDITIONS[:2]:
        (write(folder, name, published.records(name)) / "summary.json").unlink()
    first = build([folder])
    old = first.folder / "figures" / "fig_math500_paired.png"
    assert old.is_file()
    alone = build([folder / f"greedy-{first.studies[0].runs[0].digest}"], first.folder)
    assert not old.exists()
    assert table(alone, "overall")["greedy"] == table(document, "overall")["greedy"]
    assert [section.name for section in alone.parts[0].sections] == ["overall", "samples", "strata", "cost", "provenance"]
    assert rows(alone, "levels") == [row for row in rows(document, "levels") if row["run"] == "greedy"]


def test_labels_cannot_break_the_page(undrawn, tmp_path):
    made = identity("ps", dataset__prompt="<script>alert(1)</script> | {question}")
    built = build([write(tmp_path, "ps|<i>", published.records("ps"), made, name="a|b<i>")])
    page, markdown = built.page.read_text(), (built.folder / "report.md").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | {question}" in page
    assert r"\<script>alert(1)\</script> \| {question}" in markdown
    assert r"compared with ps\|\<i>" in markdown
    assert re.search(r"(?<!\\)<", markdown) is None


def test_the_report_of_a_folder_that_cannot_be_written_is_one_line(document, tmp_path):
    from dflash_mcmc.errors import UserError

    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="--out: cannot write to"):
        build([document.studies[0].runs[0].folder], tmp_path / "taken")


# `python -m dflash_mcmc.report` over real runs, and one-line errors for mistakes.

@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with an experiment of two runs, one of which has a corrupt line."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in ("greedy", "ps"):
        run = write(folder / "outputs" / "demo", name, [record(problem) for problem in "abcd"])
    with (run / "records.jsonl").open("a") as file:
        file.write("{\n")
    return folder


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "error: runs: given nothing; allowed: a run folder, an experiment folder"),
    (["outputs/demo"], "records.jsonl: line 5: JSON: "),
    (["outputs/demo", "--pair", "a"], "error: argument --pair: expected 2 arguments; see python -m dflash_mcmc.report --help"),
    (["outputs/demo", "--lenient", "--baseline", "x"], "error: --baseline: given 'x'; allowed: 'greedy', 'ps"),
    (["other-0123456789ab"], "error: runs: given 'other-0123456789ab', which is not a folder; allowed: a run folder"),
    (["outputs/demo", "--what"], "error: unrecognized arguments: --what"),
])
def test_a_mistake_is_one_line(outputs, capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([text.replace("outputs", f"{outputs}/outputs") for text in arguments])
    assert ended.value.code == 2
    done = capsys.readouterr()
    assert message in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def told(capsys, *arguments: str) -> tuple[str, str]:
    """Standard output and error of a report that is made."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code in (0, None)
    return capsys.readouterr()


def test_lenient_reports_the_valid_part(outputs, undrawn, capsys, tmp_path):
    output, errors = told(capsys, f"{outputs}/outputs/demo", "--lenient", "--out", str(tmp_path / "here"))
    assert "records.jsonl: line 5: JSON: " in errors
    assert errors.startswith("note: left out: ")
    assert "| ps " in output
    assert (tmp_path / "here" / "report.html").is_file()


def test_the_command_line_is_parsed_before_heavy_libraries_are_imported():
    code = "import sys, dflash_mcmc.report.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "scipy", "matplotlib", "pandas", "jinja2"} & set(done.stdout.split())


# Summaries, figures and reports of probes of which few units are recorded, or none could be measured.

QUICK = ("probe_layer_rank", "probe_rejection_sampling")
PROBES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS if name.startswith("probe_")]


@pytest.mark.parametrize("name", PROBES)
def test_a_report_of_few_units_is_made(name, tmp_path):
    """The stored records of each probe: none, the first, and one that has nothing to measure or was not measured."""
    job, = check_command([*overrides(name), f"paths.outputs={tmp_path}"]).jobs
    tasks, (first, *_) = tasks_of(job.config), stored(name)["records"]
    if name in ("probe_speculative_mcmc", "probe_layer_rank", "probe_logit_blend"):  # stored records have no times
        first |= {"seconds": 0.5}
    key = {"problem": first["problem"], "chain": first["chain"]}
    graded = {field: first[field] for field in ("level", "verdict", "num_tokens") if field in first}
    nothing = {**graded, "skipped": "too short"}
    cases = {"first": [first], "failed": [{**key, "failure": "it died"}]}
    if name != "probe_rejection_sampling":  # which skip no unit
        cases |= {"skipped": [{**key, **nothing}], "both": [first, {**key, "chain": 9, **nothing}]}
    for case, records in cases.items():
        folder = tmp_path / "demo" / case
        with RunStore.open(folder, schema=tasks.schema()) as store:
            for record in records:
                store.append(record)
            results = tasks.summarise(store.records)
            store.write_session(identity_of(job.config) | {"seed": case}, {"started": case})
            store.write_config(json.dumps({"name": "demo", "probe": {"name": name.removeprefix("probe_")}}))
            store.write_summary(results.summary)
            if hasattr(results, "records") and results.records:
                job.config.probe.figures(job.config, results.records, results.of_probe)
        assert (folder / "records.jsonl").read_bytes() == b"".join(map(to_line, records))
    assert build([tmp_path / "demo"]).page.is_file()


@pytest.mark.slow
def test_figures_as_pdf_with_embedded_fonts_and_tables_as_latex(outputs, tmp_path):
    built = build([f"{outputs}/outputs/demo"], tmp_path, lenient=True, formats=("pdf", "latex"))
    assert {path.stem for path in (built.folder / "figures").glob("*.pdf")} == {
        path.stem for path in (built.folder / "figures").glob("*.png")}
    assert b"/Type3" not in (built.folder / "figures/fig_pareto.pdf").read_bytes()
    assert "\\toprule" in (built.folder / "tables/overall.tex").read_text()
    build([f"{outputs}/outputs/demo"], tmp_path, lenient=True)
    assert not [*tmp_path.rglob("*.pdf"), *tmp_path.rglob("*.tex")]
