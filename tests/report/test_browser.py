"""The page in a real browser: it fits, logs nothing to the console, has a dark and a light scheme, and sorts tables."""

import itertools
import re
from pathlib import Path

import pytest

from dflash_mcmc.report import build as report
from dflash_mcmc.report.build import build
from dflash_mcmc.report.sections import overall, samples
from dflash_mcmc.store.records import PROBLEMS, as_lines
from tests import published
from tests.report.chromium import DARK, LIGHT, browser, look, needed
from tests.report.folders import identity, record, write

LOOK = """
const root = page.documentElement;
const scrolls = element => getComputedStyle(element).overflowX === "auto";
const inside = element => element.parentElement && (scrolls(element.parentElement) || inside(element.parentElement));
const beyond = element => element.getBoundingClientRect().right > root.clientWidth + 1;
const wide = [...page.querySelectorAll("body *")].filter(element => beyond(element) && !inside(element));
const head = page.querySelector("#overall thead th:nth-child(2) [role=button]");
const column = () => [...head.closest("table").tBodies[0].rows].map(row => row.cells[1].textContent);
const before = column();
head.click(); const named = e => e.ariaLabel;
const scrolled = () => [...page.querySelectorAll(".scroller")].filter(e => e.scrollWidth > e.clientWidth + 1).map(named);
const hints = () => [...page.querySelectorAll(".frame > .hint")].filter(e => e.offsetHeight).map(e => named(e.nextSibling));
for (let n = 0; n < 200 && scrolled().length !== hints().length; n++) await new Promise(done => setTimeout(done, 20));
return {
  width: root.clientWidth, scroll: root.scrollWidth, wide: wide.map(e => e.outerHTML.slice(0, 80)),
  figures: page.querySelectorAll("figure svg").length,
  empty: [...page.querySelectorAll("figure svg")].filter(e => !(e.getBoundingClientRect().height > 50)).length,
  scrolled: scrolled(), hints: hints(),
  figure_grounds: [...page.querySelectorAll("figure svg")].map(e => getComputedStyle(e.querySelector("path")).fill)
    .filter(fill => fill !== "none"),
  hidden: [...page.querySelectorAll(".table")].filter(e => scrolls(e) && e.scrollHeight > e.clientHeight).length,
  dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
  ground: view.getComputedStyle(page.body).backgroundColor,
  before, after: column(), sorted: head.parentNode.getAttribute("aria-sort"),
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of the document's conditions, of a sweep with several chains and long labels, and of an interrupted run."""
    needed()
    folder = tmp_path_factory.mktemp("outputs") / "document"
    for name in ("greedy", "temp", "ps", "blend_greedy", "blend_ps", "draft_blend_ps"):
        write(folder, name, published.records(name))
    for steps in (4, 10):
        for beta in (0.05, 0.2):
            chains = [{**line, "chain": chain} for chain in range(2) for line in published.records("blend_ps")]
            made = identity("blend_ps", blend__beta=beta, sampler__num_steps=steps, dataset__prompt="{question} Reason " * 20)
            write(folder, "blend_ps", chains, made, num_chains=2)
    write(folder, "ps", [record("test/algebra/0.json", gold="2")], identity("ps", seed=1), limit=104, finished=False)
    return build([folder]).page


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [*itertools.product((1280, 400), (LIGHT, DARK))])
def test_the_page_fits_and_logs_nothing(page, tmp_path, width, scheme):
    """Tables whose columns are runs or settings scroll inside themselves, others only on a narrow screen, with a hint."""
    seen = look(page.read_text(), tmp_path, LOOK, width, scheme)
    assert (seen["width"], seen["scroll"], seen["wide"]) == (width, width, [])
    assert seen["scrolled"] == seen["hints"]
    if width == 1280:
        assert seen["scrolled"] == ["problems", "Differences of configuration"]
    else:
        assert {"All runs", "Compared with greedy",
                "Accuracy of every run with its 95 % interval. Diamond: the highest."} <= set(seen["scrolled"])
    assert (seen["empty"], seen["figures"] >= 9) == (0, True)
    assert seen["dark"] == (scheme == DARK)
    grounds = [max(map(int, re.findall(r"\d+", colour))) < 60 for colour in (seen["ground"], *seen["figure_grounds"])]
    assert set(grounds) == {scheme == DARK}
    assert seen["sorted"] == "descending"
    assert seen["after"] == sorted(seen["before"], key=float, reverse=True) != seen["before"]


@pytest.mark.slow
def test_on_paper_nothing_is_cut_off(page, tmp_path):
    """A4 landscape, 1047 pixels between its margins: tables that scroll on a screen are expanded and fit."""
    text = page.read_text()
    assert text.count("@media print") == 1
    seen = look(text.replace("@media print", "@media screen"), tmp_path, LOOK, 1032, LIGHT)
    assert (seen["scroll"], seen["wide"], seen["scrolled"], seen["hidden"]) == (1032, [], [], 0)
    paper = tmp_path / "page.pdf"
    browser("--no-pdf-header-footer", f"--print-to-pdf={paper}", f"file://{page}")
    assert paper.stat().st_size > 50_000


def traced(log_ps: dict[tuple[int, int], float], decisions: str) -> list[dict]:
    words = {"a": "accept", "r": "reject"}
    return [{"block": block, "step": step, "log_p": log_p, "decision": words[decision]}
            for ((block, step), log_p), decision in zip(log_ps.items(), decisions, strict=True)]


@pytest.fixture
def three_runs(tmp_path, monkeypatch) -> Path:
    """Greedy decoding without questions, temperature with two chains, and power sampling with traces. Two sections alone."""
    needed()
    monkeypatch.setattr(report, "_SECTIONS", (overall.section, samples.section))
    folder, steps = tmp_path / "outputs" / "demo", {(1, 1): -4.0, (1, 2): -2.5, (2, 1): -7.25}
    rights = {"greedy": "abc", "temp": "ab", "ps": "ad"}
    for name, right in rights.items():
        records = [record(problem, "correct" if problem in right else "no_answer" if problem == "e" else "wrong", chain,
                          text=f"{name} says {problem} in chain {chain}", ended=problem != "c",
                          finish_reason="length" if problem == "c" else "stop_string", level=1 + (problem in "de"),
                          trace=traced(steps, "ara") if name == "ps" else [])
                   for problem in "abcde" for chain in range(2 if name == "temp" else 1)]
        run = write(folder, name, records, num_chains=2 if name == "temp" else 1)
        if name != "greedy":
            (run / PROBLEMS).write_bytes(as_lines([{"id": problem, "question": f"Question {problem}?", "gold": "42", "prompt":
                                                    f"{name}: Question {problem}?"} for problem in "abcde"]))
    return build([folder]).page


def test_the_browser_of_samples(three_runs, tmp_path):
    script = """
    const root = page.querySelector(".samples"), [show, first, second, stratum] = root.querySelectorAll("select");
    const ids = () => [...root.querySelectorAll(".list tbody th")].map(cell => cell.textContent).join("");
    const wait = async test => { for (let n = 0; n < 200 && !test(); n++) await new Promise(done => setTimeout(done, 20)); };
    const chosen = async values => {
      for (const [select, value] of values) { select.value = value; select.dispatchEvent(new Event("change")); }
      await wait(() => !root.querySelector(".found").textContent.startsWith("search"));
      return ids();
    };
    const runs = [...second.options].map(option => option.textContent);
    const number = name => String(runs.indexOf(name));
    const found = {runs, all: ids(), cells: [...root.querySelectorAll(".list tbody tr")].map(row => row.innerText)};
    found.pair = await chosen([[show, "pair"], [first, number("greedy")], [second, number("ps")]]);
    found.cut = await chosen([[show, "cut"], [first, "any"]]);
    found.none = await chosen([[show, "none"], [first, "every"]]);
    found.right = await chosen([[show, "right"], [first, number("ps")]]);
    found.level = await chosen([[show, "all"], [stratum, "2"]]);
    await chosen([[stratum, ""]]);
    const search = root.querySelector("input");
    const searched = async text => {
      search.value = text;
      search.dispatchEvent(new Event("input"));
      const before = root.dataset.milliseconds;
      await wait(() => root.dataset.milliseconds !== before);
      return ids();
    };
    found.answer = await searched("TEMP SAYS D IN CHAIN 1");
    found.question = await searched("question b?");
    await searched("");
    root.querySelector(".list tbody tr").click();
    await wait(() => root.querySelector(".answer"));
    found.question_shown = root.querySelector("pre.question").textContent;
    found.prompts = [...root.querySelectorAll("details")].map(e => e.textContent);
    found.answers = [...root.querySelectorAll(".answer")].map(e => e.innerText);
    found.points = [...root.querySelectorAll("polyline")].map(
      e => e.getAttribute("points").split(" ").map(point => Number(point.split(",")[1])));
    found.circles = [...root.querySelectorAll("circle")].map(e => e.getAttribute("class")).join(" ");
    found.titles = [...root.querySelectorAll("circle title")].map(e => e.textContent);
    found.blocks = root.querySelectorAll(".answer rect").length;
    root.querySelectorAll(".chains button")[1].click();
    found.second = [...root.querySelectorAll(".answer pre")].map(e => e.textContent);
    [...root.querySelectorAll("button")].find(e => e.textContent.startsWith("next")).click();
    await wait(() => root.querySelector(".detail h3").textContent === "b");
    found.next = root.querySelector("pre.question").textContent;
    return found;
    """
    found = look(three_runs.read_text(), tmp_path, script)
    assert "error" not in found, found
    assert (found["all"], found["pair"], found["cut"], found["none"]) == ("abcde", "bc", "c", "e")
    assert (found["right"], found["level"], found["answer"], found["question"]) == ("ad", "de", "d", "b")
    assert [cells.split() for cells in found["cells"]][2] == ["c", "✓", "✂", "✗", "✂", "0/2", "✂"]
    assert found["question_shown"] == "Question a?"
    assert found["prompts"] == ["prompt of psps: Question a?", "prompt of temptemp: Question a?"]
    assert "ended with a string of dataset.stop; 600 tokens; log p -2.00" in found["answers"][0]
    assert "greedy says a in chain 0" in found["answers"][0]
    (heights,) = found["points"]  # only power sampling has a trace
    assert heights[1] < heights[0] < heights[2]  # the highest log p is at the top
    assert (heights[0] - heights[1]) / (heights[2] - heights[1]) == pytest.approx(1.5 / 4.75, abs=0.01)
    assert (found["circles"], found["blocks"]) == ("taken refused taken", 1)
    assert found["titles"][2] == "step 3: log p -7.250; accepted"
    assert found["second"] == ["greedy says a in chain 0", "ps says a in chain 0", "temp says a in chain 1"]
    assert found["next"] == "Question b?"
