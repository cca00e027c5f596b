"""Hostile text in ids, questions, answers and names: markup in the page, formulas in CSV files, control characters."""

import csv
import io
import re
from xml.etree import ElementTree

import pytest

from dflash_mcmc.report.build import Built, build
from dflash_mcmc.report.parts import ReportTable, as_text, csv_of, table_of
from dflash_mcmc.store.records import PROBLEMS, as_lines
from tests.report.chromium import look, needed
from tests.report.folders import record, write

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
    for text in (as_text(ReportTable("t", "t", {hostile: "run", "n": ("n", "count")}, [{"run": hostile, "n": 1}])),
                 as_text(table_of("", "", [{hostile: hostile}]))):
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text.splitlines()) == 3
        assert r"a\x1b[31m\nb\u202e" in text


HOSTILE = (
    "</script><script>parent.fired = view.fired = 1</script>", "<img src=x onerror='window.fired = 1'>", "$\\frac{$",
    "<!--<script>", "-->", '"><svg onload="window.fired = 1">', "' onmouseover='window.fired = 1' '", "{{ 7 * 7 }}",
    "javascript:window.fired = 1", "{% raw %}${window.fired = 1}", "]]><iframe srcdoc='<script>parent.fired = 1</script>'>",
    "</style><style>body{display:none}", "</pre></textarea></title><a href='javascript:fired = 1'>x</a>",
    "\u2028\u2029\u202e\x00\x1b[2J\ud800", "a\r\n\tb", "../../../../etc/passwd", "&lt;b&gt;&amp;", "=cmd|' /C calc'!A0",
    "x" * 10_000)
"""Markup, event handlers, templates, formulas, control characters, half a character, broken mathematics, long texts."""
WALK = """
const root = page.querySelector(".samples");
const wait = async test => { for (let n = 0; n < 200 && !test(); n++) await new Promise(done => setTimeout(done, 20)); };
const search = root.querySelector("input");
const before = root.dataset.milliseconds;
search.value = "<";
search.dispatchEvent(new Event("input"));
await wait(() => root.dataset.milliseconds !== before);
search.value = "";
await root.browser.filter();
const texts = [];
for (const row of [...root.querySelectorAll(".list tbody tr")]) {
  row.click();
  const gone = root.querySelector(".detail h3");
  await wait(() => root.querySelector(".detail h3") !== gone && root.querySelector(".answer"));
  for (const element of root.querySelectorAll("*")) element.dispatchEvent(new MouseEvent("mouseover"));
  texts.push([...root.querySelectorAll("pre")].map(element => element.textContent));
}
for (const head of page.querySelectorAll("th [role=button]")) head.click();
await new Promise(done => setTimeout(done, 200));
return {fired: view.fired ?? window.fired ?? null, texts, title: page.title, scripts: page.querySelectorAll("script").length,
        strange: page.querySelectorAll("img, iframe, a:not([href^='#']), [onload], [onerror], [onmouseover], style ~ style")
          .length,
        shown: getComputedStyle(page.body).display};
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Built:
    """Two runs whose ids, questions, prompts, gold answers, answers, reasons and conditions are hostile."""
    folder = tmp_path_factory.mktemp("outputs") / "demo"
    ids = [f"{number} {text}" for number, text in enumerate(HOSTILE)]
    for name, number in (("ps", 0), ("greedy", 1)):
        records = [record(problem, "wrong", text=f"{name} {text}", answer=text, gold=text, rule=text, reason=text,
                          subject=text, level=text[:50],
                          trace=[{"log_p": -1.0, "decision": text, "block": text, "rung": text}])
                   for problem, text in zip(ids, HOSTILE, strict=True)]
        run = write(folder, name, records, name=HOSTILE[0], config={"condition": {"name": HOSTILE[number] + HOSTILE[2]}})
        (run / PROBLEMS).write_bytes(as_lines([{"id": problem, "question": text, "gold": text, "prompt": f"{name} {text}"}
                                               for problem, text in zip(ids, HOSTILE, strict=True)]))
    return build([folder])


@pytest.mark.slow
@pytest.mark.parametrize("policy", [False, True])
def test_no_hostile_text_becomes_markup_or_runs(hostile, tmp_path, policy):
    """The page's policy alone would stop a script; without the policy nothing runs either."""
    needed()
    page = hostile.page.read_text()
    if not policy:
        page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page, count=1)
    seen = look(page, tmp_path, WALK)
    assert "error" not in seen, seen
    assert (seen["fired"], seen["strange"], seen["shown"]) == (None, 0, "block")
    assert seen["scripts"] == 2 + page.count('<script type="text/plain"')
    assert seen["title"].startswith(HOSTILE[0])
    assert len(seen["texts"]) == len(HOSTILE)
    for text, shown in zip(HOSTILE, seen["texts"], strict=True):
        written = re.sub("[\ud800-\udfff]", "\ufffd", text)  # what the browser's output has in place of half a character
        assert sorted(re.sub("[\ud800-\udfff]", "\ufffd", found) for found in shown) == sorted(
            [written, *[f"ps {written}"] * 2, *[f"greedy {written}"] * 2])  # the question, prompts and answers


@pytest.mark.slow
def test_the_canary_fires_where_a_text_is_markup(hostile, tmp_path):
    """The test above can fail: one text as markup runs without the policy, and the policy stops it."""
    needed()
    page = hostile.page.read_text().replace("</main>", f"{HOSTILE[1]}</main>")
    assert look(page, tmp_path, WALK, quiet=False)["fired"] is None
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page, count=1)
    assert look(page, tmp_path, WALK, quiet=False)["fired"] == 1


@pytest.mark.slow
def test_files_of_a_hostile_run_are_inert(hostile):
    """No file is outside the report's folder, no cell is a formula, no figure has a script, no table a control character."""
    folder = hostile.folder
    assert {path.name for path in folder.parent.iterdir() if path.is_dir() and path != folder} == {
        study.folder.name for study in hostile.studies[0].runs}
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in folder.rglob("*"))
    for path in (folder / "tables").glob("*.csv"):
        for row in csv.reader(path.open(newline="", encoding="utf-8")):
            assert not [cell for cell in row if cell[:1] in ("=", "@", "\t", "\r")], path
    for path in (folder / "figures").glob("*.svg"):
        for element in ElementTree.parse(path).getroot().iter():
            assert element.tag.rpartition("}")[2] not in ("script", "a", "foreignObject"), path
            assert not [name for name in element.attrib if name.startswith("on")], path
    assert all(line.isprintable() for line in hostile.overall.splitlines())
    assert all(line.isprintable() for line in (folder / "report.md").read_text().splitlines())
