"""`launchers/dashboard.py` with a server on this machine: the page and report that it creates, and errors of one line."""

import json
import os
import re
import subprocess

import pytest

from dflash_mcmc.config.identity import plain
from dflash_mcmc.runner.loop import RunningAccuracy
from dflash_mcmc.runner.tasks import metrics_of
from dflash_mcmc.store.records import read_records
from dflash_mcmc.tracker import RunInfo
from dflash_mcmc.tracker.wandb import WandbRun
from launchers import dashboard as pages
from tests import processes
from tests.conftest import ROOT
from tests.runs import execute
from tests.tracker.loopback import Artifact, Loopback, Run

pytestmark = pytest.mark.usefixtures("python_random")


@pytest.fixture
def server():
    """A server with two tracked runs of the experiment `demo`. One of them has figures of a probe."""
    with Loopback() as server:
        logged = {"ps": {"accuracy": 0.5, "samples": {"_type": "table-file"}},
                  "ranks": {"figures/ranks": {"_type": "image-file"}, "tables/ranks": {"_type": "table-file"}}}
        for name, summary in logged.items():
            labels = {"displayName": name, "groupName": "demo", "jobType": name, "tags": []}
            server.runs["p", name] = Run("p", name, name, labels, summary=summary)
        yield server


@pytest.fixture
def dashboard(tmp_path):
    """A function that runs the launcher: dashboard(environment, "--experiment", "demo")."""
    def run(environment: dict[str, str], *arguments: str, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        absent = dict.fromkeys(name for name in os.environ if name.startswith("WANDB_"))
        return processes.run([*(program or [ROOT / "launchers/dashboard.py"]), "--project", "p", *arguments], tmp_path, 120,
                             **{**absent, "HOME": str(tmp_path), **environment})

    return run


IMPATIENT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from launchers import dashboard
dashboard._TIMEOUT = 2
dashboard.main()
"""
"""The launcher with a timeout of two seconds for answers of the server."""


def spec_of(server: Loopback) -> dict:
    """The specification of the only page on the server."""
    (view,) = server.views.values()
    return json.loads(view["spec"])["section"]


def panels_of(spec: dict) -> dict[str, list[dict]]:
    """Kind and settings of the panels, by section."""
    return {section["name"]: [{"kind": panel["viewType"], **panel["config"]} for panel in section["panels"]]
            for section in spec["panelBankConfig"]["sections"]}


@pytest.mark.slow
def test_the_page_and_the_report_of_local_runs(server, dashboard, make_config, tmp_path):
    setting = ("experiment=demo", "dataset.limit=4", f"paths.outputs={tmp_path / 'o'}")
    greedy = execute(make_config(*setting, "condition=greedy"))
    sampled = execute(make_config(*setting, "condition=temp"))
    known, unknown = (run.folder.name.rpartition("-")[2] for run in (greedy, sampled))
    server.artifacts["a"] = Artifact("a", f"records-demo-{known}", "records", "r", "d", {}, 0, committed=True)
    environment = server.environment(tmp_path)
    done = dashboard(environment, str(tmp_path / "o/demo"), "--swept", "sampler.alpha", "blend.beta")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{server.url}/tester/p\?nw=\w+", done.stdout.strip())
    assert server.unknown == []

    report = server.run("report-demo")
    assert (report.labels["groupName"], report.labels["jobType"]) == ("demo", "report")
    assert server.artifacts["a"].used_by == ["report-demo"]  # the report uses the records
    assert f"records-demo-{unknown}:latest is not in W&B" in done.stderr
    paired = json.loads(report.files[report.summary["report/paired"]["path"]])
    assert paired["columns"] == (tmp_path / "o/demo/report/tables/paired.csv").read_text().splitlines()[0].split(",")
    assert any(isinstance(cell, float) for row in paired["data"] for cell in row)
    page = report.files[report.summary["report/page"]["path"]]
    assert page == (tmp_path / "o/demo/report/report.html").read_bytes()
    (kept,) = [artifact for artifact in server.artifacts.values() if artifact.type == "report"]
    assert server.files(kept)["report.html"] == page

    spec = spec_of(server)
    assert json.dumps(spec["runSets"][0]["filters"]).count('"demo"') == 1
    shown = panels_of(spec)
    assert list(shown) == ["Accuracy by condition", "Sweep", "Acceptance", "Cost", "Report", "Samples", "Probes"]
    (intervals, bars, running), (area, coordinates, *_) = shown["Accuracy by condition"], shown["Sweep"]
    (chart, drawn), = server.charts.items()
    assert intervals["panelDefId"] == f"tester/{chart}"
    assert {*re.findall(r"\$\{field:(\w+)\}", json.dumps(drawn))} == {*intervals["fieldSettings"]}
    assert bars["metrics"] == ["accuracy"]
    assert (running["xAxis"], running["metrics"]) == ("finished", ["running/accuracy"])
    assert (area["xAxis"], area["yAxis"]) == ("config:sampler.value.alpha", "config:blend.value.beta")
    assert area["zAxis"] == "summary:accuracy"
    assert [column["accessor"] for column in coordinates["columns"]] == [area["xAxis"], area["yAxis"], area["zAxis"]]
    assert [panel["xAxis"] for panel in shown["Cost"][:2]] == ["summary:mean_token_forwards", "summary:mean_share_seconds"]
    assert shown["Report"][0]["mediaKeys"] == ["report/page"]
    assert '"report/overall"' in json.dumps(shown["Report"][1])
    assert '"report/paired"' in json.dumps(shown["Report"][2])
    assert '"samples"' in json.dumps(shown["Samples"])
    assert [panel["kind"] for panel in shown["Probes"]] == ["Weave", "Media Browser"]

    again = dashboard(environment, "--experiment", "demo", "--outputs", "outputs")
    assert (again.returncode, again.stdout, len(server.views)) == (0, done.stdout, 1)  # the same page
    assert '"config:sampler.value.num_steps"' in json.dumps(spec_of(server))  # the page is updated
    server.views.clear()
    recreated = dashboard(environment, "--experiment", "demo")
    assert "cannot be opened; creating a new page" in recreated.stderr
    assert len(server.views) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("given", "arguments", "said"), [
    (None, [], "error: not logged in to W&B: run wandb login"),
    ({}, ["--experiment", "other"], "error: tester/p: no runs of the experiment other in W&B"),
    # W&B's client tries an unreachable server again for ten seconds, and its own service rarely does not end then.
    ({"WANDB_BASE_URL": "http://127.0.0.1:9"}, ["--entity", "tester"], "error: W&B: ")])
def test_errors_have_one_line(server, dashboard, tmp_path, given, arguments, said):
    environment = {} if given is None else {**server.environment(tmp_path), **given}
    done = dashboard(environment, *arguments, program=("-c", IMPATIENT))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1, done.stderr
    assert not server.views


def test_the_page_uses_the_names_that_the_tracker_writes(make_config):
    """Compares names of the summary, the history and the configuration with those of a run."""
    result = execute(make_config("condition=blend_ps", "sampler.num_blocks=2", "dataset.limit=2"))
    sent = {}

    class Silent:
        dir, summary = "x/y", sent

        def define_metric(self, name, **given):
            pass

        def log(self, values, step, commit):
            sent.update(values)

    running, records = RunningAccuracy(), read_records(result.folder)
    run = WandbRun(Silent, RunInfo("i", "e", "c", {}, result.folder), "online", "")
    for step, record in enumerate(records, start=1):
        running.add(record)
        run.log({**metrics_of(record), **running.metrics()}, step)
    run.summary(result.summary, records)
    asked = json.dumps([section._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")
                        for section in pages.sections("e/c", pages.SWEPT, ["samples"], [])])
    for name in {*pages.COLUMNS, "label", "running/accuracy", "sample/acceptance", "finished", "samples"}:
        assert name in sent
        assert name in asked or name in pages.COLUMNS
    configs = [plain(make_config(f"condition={condition}")) for condition in ("blend_ps", "temp")]
    for name in pages.SWEPT:
        group, _, field = name.partition(".")
        assert any(field in config[group] for config in configs)
        assert f"config:{group}.value.{field}" in asked


def test_a_changed_chart_has_another_name(monkeypatch):
    before = pages.preset_name()
    monkeypatch.setitem(pages.INTERVALS, "title", "x")
    assert re.fullmatch(r"[a-z0-9-]+", before)
    assert pages.preset_name() != before
