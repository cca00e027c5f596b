"""The samples of a page: what is packed, what is left out where they are too many, and where questions come from."""

import base64
import json
import zlib

from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.report.sections import samples
from dflash_mcmc.report.sections.samples import section
from dflash_mcmc.report.study import study_of
from dflash_mcmc.store.files import to_line
from dflash_mcmc.store.records import PROBLEMS, as_lines
from tests.refusals import refused
from tests.report.folders import record, write

STEPS = [{"block": 1, "step": 1, "log_p": -1.0004, "decision": "accept", "rung": 1},
         {"block": 1, "step": 1, "log_p": -3.0, "decision": "abandon", "rung": 2},
         {"block": 2, "step": 1, "log_p": -2.5, "decision": "reject", "rung": 1}]


def runs_of(folder):
    return read(run_folders([folder]))[0]


def unpacked(text: str):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def problems_of(packed: samples.EmbeddedSamples) -> dict[str, dict]:
    """The content of each problem by its id."""
    parts = [unpacked(part) for part in packed.parts]
    return {name: parts[part][place] for name, part, place, *_ in unpacked(packed.overview)["problems"]}


def test_a_packed_sample_has_what_its_record_has(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_PART", 500)  # characters
    write(tmp_path / "demo", "ps", [record(problem, verdict, text=f"text {problem}", trace=STEPS, ended=problem == "a")
                                    for problem, verdict in zip("abc", ("correct", "wrong", "not_drawn"), strict=True)])
    write(tmp_path / "demo", "greedy", [record("b", chain=chain) for chain in (1, 0)])
    packed = samples.samples_of(runs_of(tmp_path), {"b": ("b?", [("prompt b", [1])])})
    overview, found = unpacked(packed.overview), problems_of(packed)
    assert len(packed.parts) > 1
    assert (packed.num_chains, packed.longest) == (2, None)
    names, ends = overview["verdicts"], overview["reasons"]
    letters = dict(zip(overview["runs"], overview["samples"], strict=True))
    assert [(names[ord(a) - 97], ends[ord(b) - 97]) for a, b in letters["ps"]] == [
        ("wrong", "length"), ("correct", "stop_id"), ("not_drawn", "not_drawn")]  # greedy's problem is the first
    assert [len(each) for each in letters["greedy"]] == [4, 0, 0]  # two letters for each chain
    assert (found["b"]["q"], found["b"]["p"], found["a"]["q"], found["a"]["g"]) == ("b?", [["prompt b", [1]]], None, "42")
    (own,) = found["a"]["r"][1]
    assert (own["t"], own["a"], own["n"], own["l"]) == ("text a", "42", 600, -2.0)
    assert own["x"] == [{"k": 1, "b": [[1, 1], [2, 1]], "p": [-1000, -1500], "d": "ar"},
                        {"k": 2, "b": [[1, 1]], "p": [-3000], "d": "x"}]
    assert [sample["c"] for sample in found["b"]["r"][0]] == [0, 1]


def test_a_page_does_not_grow_without_bound(tmp_path, monkeypatch):
    """Chains are left out first, then ends of texts, and the page says so."""
    write(tmp_path / "demo", "ps", [record(problem, chain=chain, text="x" * 100) for problem in "ab" for chain in range(3)])
    runs = runs_of(tmp_path)
    for most, expected in ((600, (3, None)), (599, (2, None)), (200, (1, None)), (199, (1, 99))):
        monkeypatch.setattr(samples, "MOST_CHARACTERS", most)
        packed = samples.samples_of(runs, {})
        assert (packed.num_chains, packed.longest) == expected
    cut = problems_of(packed)["a"]["r"][0][0]["t"]
    assert cut == "x" * 99 + " [... 1 more characters are in the run folder]"


def test_the_page_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MOST_CHARACTERS", 100)
    write(tmp_path / "demo", "ps", [record("a", chain=chain, text="x" * 300) for chain in range(3)])
    text = section(study_of(runs_of(tmp_path))).text
    assert "The browser has the first 1 of 3 chains of each problem; all are in the run folders." in text
    assert "Answers are cut after 100 characters here; they are whole in the run folders." in text


def test_questions_come_from_the_folder_of_the_run(tmp_path):
    """From `problems.jsonl`; without it there are none, which is said."""
    for name in ("new", "gone"):
        run = write(tmp_path / name, "ps", [record("q")])
        if name == "new":
            (run / PROBLEMS).write_bytes(as_lines([{"id": "q", "question": "From the run?", "gold": "42", "prompt": "P"}]))
        browser = section(study_of(runs_of(tmp_path / name)))
        assert problems_of(browser.samples)["q"]["q"] == ("From the run?" if name == "new" else None)
        assert ("have no problems.jsonl: ps." in browser.text[-1]) == (name == "gone")


def test_damaged_problems_are_an_error_and_left_out_if_lenient(tmp_path):
    run = write(tmp_path / "demo", "ps", [record("a")])
    (run / PROBLEMS).write_bytes(to_line({"id": "a"}))
    with refused("line 1: question: given nothing; allowed: a value; delete the file, and the next start of the run"):
        runs_of(tmp_path)
    (lenient,), left_out = read(run_folders([tmp_path]), lenient=True)
    assert (dict(lenient.asked), len(left_out)) == ({}, 1)
    assert "problems.jsonl: line 1" in left_out[0]
