"""The report of the guided-power-sampling document's counts has the document's tables and all the files that it names."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dflash_mcmc.report.build import Built, build
from dflash_mcmc.report.parts import Table
from tests import published
from tests.report.folders import identity, write

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
    headers = [column.header for column in found.columns]
    return {row[0]: dict(zip(headers, row, strict=True)) for row in found.cells()}


def _found(built: Built, name: str) -> Table:
    return next(table for section in built.sections for table in section.tables if table.name == name)


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
    section = next(section for section in document.sections if section.name == "overlap")
    assert "p = 0.070 (exact McNemar, not adjusted): it is a tie" in section.text[0]


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
    assert found["power sampling over greedy"]["Qwen2.5-Math-7B"] == "+25.2 (+50.8 %)"
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
    assert {row["verdict"] for row in found.values()} == {"tie"}
    assert int(found["blend_ps"]["problems_for_3_points"]) > 104  # only 9 of 104 problems differ, too few to detect 3 points
    assert float(found["blend_ps"]["detectable_difference"]) > 0.03


def test_pareto_front(document):
    front = {row["run"]: (row["front_token_forwards"], row["front_share_seconds"]) for row in rows(document, "cost")}
    assert front["blend_ps"] == ("True", "True")  # no run is more accurate
    assert front["draft_blend_ps"] == ("False", "False")  # ps is as accurate and not more expensive
    assert front["greedy"][0] == "True"  # no run with this accuracy costs less
    assert front["temp"] == ("False", "False")


def test_six_figures_of_the_document_and_no_empty_one(document):
    figures = document.folder / "figures"
    names = {path.stem for path in figures.iterdir()}
    assert {f"fig_math500_{name}" for name in SIX_FIGURES} <= names
    assert {"fig_pareto", "fig_math500_interaction"} <= names
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
    figures = [drawing.name for section in document.sections for drawing in section.drawings]
    assert page.count('<svg role="img"') == len(figures)
    assert all(f"](figures/{name}.png)" in markdown for name in figures)
    for section in document.sections:
        assert f'<h2>{section.title}</h2>' in page
        assert f"## {section.title}\n" in markdown
    for file in (document.folder / "tables").iterdir():
        assert f"tables/{file.name}" in page
    assert "left out" not in " ".join(document.heading.warnings)


def test_records_alone_are_enough_and_old_files_are_removed(document, tmp_path):
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
    assert [section.name for section in alone.sections] == ["overall", "samples", "strata", "cost", "provenance"]
    assert rows(alone, "levels") == [row for row in rows(document, "levels") if row["run"] == "greedy"]


def test_labels_cannot_break_the_page(tmp_path):
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
        build([run.folder for run in document.studies[0].runs], tmp_path / "taken")


@pytest.mark.slow
def test_order_of_the_arguments_is_kept(document):
    folders = [Path(run.folder) for run in document.studies[0].runs]
    other = build(folders[::-1], document.folder.parent / "other")
    assert [run.label for run in other.studies[0].runs] == list(CONDITIONS)[::-1]
