"""`python -m dflash_mcmc.report` over real runs, and one-line errors for mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.report.__main__ import main
from tests.report.folders import record, write
from tests.runs import execute


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with an experiment of two runs, one of which has a corrupt line."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in ("greedy", "ps"):
        run = write(folder / "outputs" / "demo", name, [record(problem) for problem in "abcd"])
    with (run / "records.jsonl").open("a") as file:
        file.write("{\n")
    return folder


@pytest.mark.slow
def test_real_runs_from_start_to_page(make_config, command, tmp_path):
    """Runs made by this code, found by their W&B ids; the table equals the run's own."""
    ids = []
    for overrides in (["condition=greedy"], ["condition=blend_ps", "sampler.num_blocks=2", "num_chains=2"]):
        config = make_config("experiment=demo", "dataset.limit=2", "dataset.max_new_tokens=32", "tracker=none",
                             f"paths.outputs={tmp_path}/outputs", *overrides)
        result = execute(config)
        ids.append(f"{config.name}-{identity_hash(config)}")
    done = command("dflash_mcmc.report", *ids)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # the runs do not differ in anything a note reports, and none is incomplete
    table, _, path = done.stdout.rstrip().rpartition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    blended = "blend_ps num_blocks=2"  # a label names the fields that differ from the condition's
    assert [row[0] for row in rows] == ["greedy", blended, f"{blended}, majority of 2", f"{blended}, best by log p of 2"]
    assert rows[1][1:4] == [str(result.summary["correct"]), "4", f"{100 * result.summary['accuracy']:.1f} %"]
    assert path.endswith("outputs/demo/report/report.html")
    assert (tmp_path / "outputs/demo/report/report.html").is_file()
    provenance = (tmp_path / "outputs/demo/report/tables/provenance.csv").read_text().splitlines()
    assert len(provenance) == 3
    assert all(",complete," in line for line in provenance[1:])


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "error: runs: given nothing; allowed: a run folder, an experiment folder"),
    (["outputs/demo"], "records.jsonl: line 5: JSON: "),
    (["outputs/demo", "--pair", "a"], "error: argument --pair: expected 2 arguments; see python -m dflash_mcmc.report --help"),
    (["outputs/demo", "--lenient", "--baseline", "x"], "error: --baseline: given 'x'; allowed: 'greedy', 'ps"),
    (["other-0123456789ab"], "error: other-0123456789ab: no run with this identity below outputs/"),
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


def test_lenient_reports_the_valid_part(outputs, command, tmp_path):
    done = command("dflash_mcmc.report", f"{outputs}/outputs/demo", "--lenient", "--out", str(tmp_path / "here"))
    assert done.returncode == 0
    assert "records.jsonl: line 5: JSON: " in done.stderr
    assert done.stderr.startswith("note: left out: ")
    assert "| ps " in done.stdout
    assert (tmp_path / "here" / "report.html").is_file()


def test_help(command):
    done = command("dflash_mcmc.report", "--help")
    assert done.returncode == 0
    assert "--lenient" in done.stdout


def test_the_command_line_is_parsed_before_heavy_libraries_are_imported():
    code = "import sys, dflash_mcmc.report.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "scipy", "matplotlib", "statsmodels", "jinja2"} & set(done.stdout.split())
