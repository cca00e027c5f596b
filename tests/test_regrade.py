"""`python -m dflash_mcmc.regrade`: new grades for recorded texts, written as a new run; the old run is not changed."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.errors import RunBusy, UserError
from dflash_mcmc.grading import VERSION
from dflash_mcmc.grading.math import MathGrader
from dflash_mcmc.grading.math.pool import MathPool
from dflash_mcmc.regrade import NotRegraded, _graders, grader_config, main, regrade, report
from dflash_mcmc.report.reading import run_folders
from dflash_mcmc.store.files import to_line
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import read_records
from tests.report import folders
from tests.runs import execute

TEXTS = {  # problem, chain -> (text, gold, old verdict, old answer, new verdict)
    ("a", 0): (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", "wrong", r"\frac{2}{4}", "correct"),
    ("a", 1): (r"so \boxed{0.5}", r"\frac{1}{2}", "correct", "0.5", "correct"),
    ("b", 0): ("no box", "7", "no_answer", None, "no_answer"),
    ("b", 1): (r"\boxed{17_9}", "17_8", "correct", "17_9", "wrong"),
    ("c", 0): (r"\boxed{\sum n}", "7", "wrong", r"\sum n", "unsupported"),
    ("c", 1): ("", "7", "not_drawn", None, "not_drawn"),
}


@pytest.fixture(scope="module")
def pool():
    started = MathPool(timeout_seconds=8, memory_gib=4, num_workers=1)
    started.submit("first", r"\boxed{2/4}", r"\frac12")  # starts its processes and threads now, not within a test
    list(started.finished(wait=True))
    yield started
    started.close()


@pytest.fixture
def run(tmp_path):
    """The folder of a run with an older version of the grader."""
    records = [folders.record(problem, verdict, chain, text=text, gold=gold, answer=answer, same_string=None,
                              grader="math 1") for (problem, chain), (text, gold, verdict, answer, _) in TEXTS.items()]
    made = {**folders.identity("ps"), "grader.timeout_seconds": 8.0, "grader.version": 1}
    return folders.write(tmp_path / "outputs/demo", "ps", records, made, num_chains=2,
                         config={"aggregate": "majority"})


def digests(folder) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_run_is_regraded_and_the_old_run_is_unchanged(run, pool):
    before = digests(run)
    found = regrade(run, grader_config([]), pool)
    assert digests(run) == before
    assert found.target.parent == run.parent
    old, new = read_records(run), read_records(found.target)
    assert new == json.loads(json.dumps(found.records))
    assert [record["verdict"] for record in new] == [verdict for *_, verdict in TEXTS.values()]
    graded = {"verdict", "answer", "rule", "reason", "same_string", "walls", "grader", "before"}
    for was, now in zip(old, new, strict=True):
        assert {name: value for name, value in now.items() if name not in graded} == {
            name: value for name, value in was.items() if name not in graded}
        assert {name: was[name] for name in now["before"]} == now["before"]
        assert now["before"].keys() >= {"verdict", "answer", "reason", "grader"}
    assert new[0]["rule"] == "number"
    assert new[0]["same_string"] is False
    assert new[0]["grader"] == f"math {VERSION}"


def test_the_new_run_has_the_identity_and_summary_of_its_grader(run, pool):
    target = regrade(run, grader_config(["grader.timeout_seconds=4"]), pool).target
    old, new = (json.loads((folder / "run.json").read_text()) for folder in (run, target))
    assert new["identity"] == {**old["identity"], "grader.timeout_seconds": 4.0, "grader.version": VERSION,
                               "grader.extract": "boxed", "grader.until": []}
    assert new["sessions"][-1]["regraded"]["from"] == run.name
    assert set(new["sessions"][-1]["regraded"]["packages"]) == {"math-verify", "latex2sympy2_extended", "sympy"}
    summary = json.loads((target / "summary.json").read_text())
    assert "majority/accuracy" in summary  # as the run's configuration asks
    assert [summary[name] for name in ("correct", "wrong", "no_answer", "unsupported", "not_drawn")] == [2, 1, 1, 1, 1]
    assert summary["condition"] == "ps"
    assert json.loads((run / "summary.json").read_text())["wrong"] == 2
    assert "timeout_seconds: 4.0" in (target / "config.yaml").read_text()


def test_the_target_depends_on_the_grader_only(run, pool):
    first = regrade(run, grader_config([]), pool).target
    content = (first / "records.jsonl").read_bytes()
    assert regrade(run, grader_config([]), pool).target == first
    assert (first / "records.jsonl").read_bytes() == content
    assert regrade(run, grader_config(["grader.timeout_seconds=4"]), pool).target != first
    again = regrade(first, grader_config([]), pool)
    assert again.target == first  # the run already has this grader
    assert (first / "records.jsonl").read_bytes() == content
    assert report(again).endswith("nothing was written")


@pytest.mark.slow
def test_a_start_with_the_new_grader_resumes_the_new_run(make_config, tmp_path, pool):
    """Three samples are drawn with an older version of the rules. After regrading, a run of four draws only the fourth."""
    arguments = ("sampler=greedy", f"paths.outputs={tmp_path}", "dataset.max_new_tokens=8", "tracker=none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MathGrader, "version", VERSION - 1)
        old = execute(make_config(*arguments, "dataset.limit=3"))
    target = regrade(old.folder, grader_config([]), pool).target
    config = make_config(*arguments, "dataset.limit=4")
    assert json.loads((target / "run.json").read_text())["identity"] == identity_of(make_config(*arguments, "dataset.limit=3"))
    new = execute(config)
    assert (new.folder, new.num_new) == (target, 1)
    assert ["before" in record for record in read_records(target)] == [True, True, True, False]
    with pytest.raises(UserError, match="has 1 samples that were drawn there"):
        regrade(old.folder, grader_config([]), pool)


def append_records(folder, verdict: str, *keys: tuple[str, int], **rest) -> None:
    """Appends records to those of a run."""
    records = [folders.record(problem, verdict, chain, text=r"\boxed{7}", gold="7", same_string=None, **rest)
               for problem, chain in keys]
    with (folder / "records.jsonl").open("a") as file:
        file.write("".join(to_line(record).decode() for record in records))


@pytest.mark.slow
def test_an_old_run_is_graded_by_another_extraction_rule(run):
    config = grader_config(["grader.extract=[boxed,last_number]"])
    started = config.grader.start()
    found = regrade(run, config, started)
    back = regrade(found.target, grader_config([]), started)
    started.close()
    records = {(record["problem"], record["chain"]): record for record in found.records}
    assert (records["a", 1]["rule"], records["b", 0]["rule"]) == ("boxed/string", "nothing_extracted")
    identity = json.loads((found.target / "run.json").read_text())["identity"]
    assert identity["grader.extract"] == ["boxed", "last_number"]
    assert json.loads((back.target / "run.json").read_text())["identity"]["grader.extract"] == "boxed"
    assert back.target != found.target


def test_a_source_with_fewer_samples_removes_none_from_the_target(run, pool):
    """Two runs that differ only in the grader have the same target, and one of them has more samples."""
    config = grader_config(["grader.timeout_seconds=2"])
    larger = regrade(run, grader_config(["grader.timeout_seconds=4"]), pool).target
    append_records(larger, "wrong", ("d", 0), ("d", 1), grader="math 1")
    target = regrade(larger, config, pool).target
    before = {(record["problem"], record["chain"]): record for record in read_records(target)}
    assert regrade(run, config, pool).target == target
    after = {(record["problem"], record["chain"]): record for record in read_records(target)}
    assert after.keys() == before.keys() == {*TEXTS, ("d", 0), ("d", 1)}
    assert [after["d", chain] for chain in (0, 1)] == [before["d", chain] for chain in (0, 1)]
    assert [record["verdict"] for key, record in after.items() if key in TEXTS] == [new for *_, new in TEXTS.values()]
    described = json.loads((target / "run.json").read_text())
    assert [session["regraded"]["from"] for session in described["sessions"] if "regraded" in session][-2:] == [
        larger.name, run.name]
    assert json.loads((target / "summary.json").read_text())["correct"] == 4


def test_a_target_with_other_texts_is_an_error_of_one_line(run, pool):
    target = regrade(run, grader_config([]), pool).target
    changed = [{**record, "text": "another one"} if number == 0 else record
               for number, record in enumerate(read_records(target))]
    (target / "records.jsonl").write_bytes(b"".join(map(to_line, changed)))
    before = digests(target)
    with pytest.raises(UserError, match="has 1 samples with other texts") as refused:
        regrade(run, grader_config([]), pool)
    assert str(target) in str(refused.value)
    assert str(run) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert digests(target) == before


class SamplesDuringGrading:
    """A pool that, during grading, writes a sample into the target, as a run could."""

    def __init__(self, pool: MathPool, target):
        self.submit, self._pool, self._target = pool.submit, pool, target

    def finished(self, wait: bool):
        self._target.mkdir(exist_ok=True)
        append_records(self._target, "correct", ("z", 0))
        return self._pool.finished(wait)


def test_samples_drawn_during_grading_are_not_lost(run, pool):
    target = regrade(run, grader_config([]), pool).target
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    with pytest.raises(UserError, match="has 1 samples that were drawn there"):
        regrade(run, grader_config([]), SamplesDuringGrading(pool, target))
    assert [record["problem"] for record in read_records(target)] == ["z"]


def test_a_run_that_is_being_written_is_an_error(run, pool):
    holder = subprocess.Popen([sys.executable, "-c", "import sys; from pathlib import Path\n"
                               "from dflash_mcmc.store.folder import RunStore\n"
                               f"with RunStore.open(Path({str(run)!r})):\n    print('open', flush=True); sys.stdin.read()"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(RunBusy, match="being written by"):
            regrade(run, grader_config([]), pool)
    finally:
        holder.communicate("")
    assert list(run.parent.iterdir()) == [run]
    regrade(run, grader_config([]), pool)


def test_an_interrupted_write_leaves_all_records_or_none(run, pool, monkeypatch):
    replaced = []

    def stops(source, target):
        replaced.append(target.name)
        if target.name == "records.jsonl":
            raise KeyboardInterrupt
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        regrade(run, grader_config([]), pool)
    monkeypatch.undo()
    target, = (folder for folder in run.parent.iterdir() if folder != run)
    assert "records.jsonl" in replaced
    assert read_records(target) == []
    with RunStore.open(target):  # opening the folder removes temporary files
        pass
    assert len(read_records(regrade(run, grader_config([]), pool).target)) == len(TEXTS)


def test_the_report_has_accuracy_verdicts_and_changes(run, pool):
    text = report(regrade(run, grader_config([]), pool))
    lines = text.splitlines()
    assert any(line.startswith("accuracy 33.3 %") and "-> 33.3 %" in line and "3 verdicts changed" in line for line in lines)
    header = next(line for line in lines if line.startswith("| recorded / now"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    wrong = next(line for line in lines if line.startswith("| wrong")).strip("|").split("|")
    cells = dict(zip(columns, (cell.strip() for cell in wrong), strict=True))
    assert (cells["correct"], cells["unsupported"], cells["all"]) == ("1", "1", "2")
    assert any("17_8" in line and "17_9" in line and "correct -> wrong" in line and "base" in line for line in lines)
    assert not any("0.5" in line for line in lines)  # unchanged


@pytest.fixture
def shared_pool(pool, monkeypatch):
    """Makes commands use the pool of the module, because starting its processes takes seconds."""
    monkeypatch.setattr(MathGrader, "start", lambda self: pool)
    monkeypatch.setattr(MathPool, "close", lambda self: None)


@pytest.mark.usefixtures("shared_pool")
def test_command_takes_runs_and_overrides_and_skips_runs_without_texts(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[2])
    probe = folders.write(run.parent, "greedy", [{"problem": "a", "chain": 0, "layer": 3}],
                          {**folders.identity("greedy"), "probe": "layer_rank"}, finished=False)
    with pytest.raises(SystemExit) as ended:
        main(["outputs", "grader=math"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "3 verdicts changed" in printed
    assert f"left out: {probe.relative_to(run.parents[2])}: cannot be graded again" in printed
    (target,) = (folder for folder in run.parent.iterdir() if folder not in (run, probe))
    append_records(target, "correct", ("z", 0))
    later = folders.write(run.parent, "temp", read_records(run), {**folders.identity("temp"), "grader.version": 1})
    with pytest.raises(SystemExit):
        main(["outputs", "grader=math"])
    printed = capsys.readouterr().out
    assert "has 1 samples that were drawn there" in printed
    assert printed.index("left out") < printed.index(later.name)  # the next run is graded


@pytest.mark.usefixtures("shared_pool")
@pytest.mark.parametrize(("arguments", "message"), [
    (["grader=choice"], "gold answer"), (["grader=code"], "grader.allow_execution: given False"),
    (["sampler=greedy"], "sampler: given 'greedy'; allowed: grader=..."), (["grader=nothing"], "unknown option 'nothing'"),
    (["grader.timeout_seconds=0"], "grader.timeout_seconds: given 0"),
])
def test_a_mistake_is_an_error_of_one_line_and_writes_nothing(run, arguments, message, capsys):
    before = digests(run.parent)
    with pytest.raises(SystemExit) as ended:
        main([str(run), *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert digests(run.parent) == before


def test_runs_without_texts_are_an_error(run, pool):
    probe = folders.write(run.parent, "greedy", [{"problem": "a", "chain": 0, "layer": 3}],
                          {**folders.identity("greedy"), "probe": "layer_rank"}, finished=False)
    with pytest.raises(NotRegraded, match="cannot be graded again: it has no texts"):
        regrade(probe, grader_config([]), pool)
    (run / "records.jsonl").write_bytes(to_line({"problem": "a", "chain": 0, "layer": 3}))
    with pytest.raises(UserError, match="line 1: level: given nothing; allowed: a value"):
        regrade(run, grader_config([]), pool)
    (run / "records.jsonl").write_text("")
    with pytest.raises(NotRegraded, match="it has no records"):
        regrade(run, grader_config([]), pool)
    (run / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json: cannot be parsed"):
        regrade(run, grader_config([]), pool)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_pool")
def test_a_run_is_graded_by_its_own_grader(run, tmp_path):
    own = {"name": "math", "extract": ["boxed", "last_number"], "timeout_seconds": 8.0}
    other = folders.write(tmp_path / "outputs/demo", "temp", read_records(run), config={"grader": own})
    program = folders.write(tmp_path / "outputs/demo", "greedy", read_records(run), config={"grader": {
        "name": "code", "allow_execution": True}})
    found = {entry.folder: entry for entry in run_folders([run.parent])}
    first, second = _graders([found[run], found[other]], ["grader.timeout_seconds=4"])
    assert (first.grader.extract, first.grader.timeout_seconds) == (MathGrader().extract, 4.0)
    assert (second.grader.extract, second.grader.timeout_seconds) == (["boxed", "last_number"], 4.0)
    assert _graders([found[other]], ["grader=math"])[0].grader.extract == MathGrader().extract
    with pytest.raises(UserError, match=r"grader\.allow_execution: given False"):
        _graders([found[program]], [])
    mixed = _graders([found[other], found[program]], ["grader.allow_execution=true"])  # a field of one of them
    assert [type(config.grader).__name__ for config in mixed] == ["MathGrader", "CodeGrader"]
    with pytest.raises(UserError, match=r"grader\.nothing"):
        _graders([found[other]], ["grader.nothing=1"])
