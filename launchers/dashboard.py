"""The comparison page in your Weights & Biases account, made from code.

    python -m dflash_mcmc -m experiment=demo condition=greedy,ps,blend_ps tracker=wandb    draws runs, or logs drawn ones
    wandb sync outputs/wandb/offline-run-*                                                  uploads runs drawn without a login
    make dashboard                                                                          writes the page, prints its address
    make dashboard RUNS=outputs/demo                                                        also logs the report of these runs
    python launchers/dashboard.py --experiment demo --swept sampler.alpha blend.beta        only the runs of one experiment

The page shows accuracy by condition with intervals, the sweep, acceptance, cost against accuracy, the table of samples, and
the results of probes. RUNS are folders of runs, as for `python -m dflash_mcmc.report`. Their report (paired table, figures,
the whole page) is logged next to the runs, and its lineage in W&B names the records that it is made from. An existing page
is overwritten at the same address, so make your own additions in a copy.

You need an account, which `wandb login` sets up, and the package wandb-workspaces (pip install -e '.[dashboard]').
"""

import argparse
import csv
import hashlib
import importlib.util
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import UserError, note, reason_of
from dflash_mcmc.process import program
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.tracker.wandb import WandbTracker, artifact_name

if TYPE_CHECKING:
    import wandb
    from wandb_workspaces.reports.v2.interface import PanelTypes
    from wandb_workspaces.workspaces import Section, Workspace as Page

    from dflash_mcmc.report.build import Built

_MEDIA = ("image-file", "html-file")
_TIMEOUT = 30  # seconds
_CONFLICT = 409  # HTTP status: the name is taken


class Workspace(NamedTuple):
    """The place of the runs in W&B."""

    entity: str
    project: str
    experiment: str | None
    """The W&B group of the runs; None for all runs of the project."""

    @property
    def title(self) -> str:
        """Name of the page."""
        return f"dflash_mcmc: {self.experiment or 'all experiments'}"


def connect(entity: str | None, project: str, experiment: str | None) -> "tuple[wandb.Api, Workspace]":
    """Connects to the server. Returns the connection and the place of the runs. Never prompts. Raises UserError on failure."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("not logged in to W&B: run wandb login (or set WANDB_API_KEY=...), then wandb sync "
                        "outputs/wandb/offline-run-* to upload runs made without a login, then repeat this command")
    with asking():
        api = wandb.Api(timeout=_TIMEOUT)
        entity = entity or api.default_entity
    if not entity:
        raise UserError("--entity: not given, and the account has no default; allowed: a user or a team")
    return api, Workspace(entity, project, experiment)


@contextmanager
def asking() -> Iterator[None]:
    """A context that turns every error of W&B or the network into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # W&B's client raises many types, some of them from private modules
        raise UserError(f"W&B: {type(error).__name__}: {_line(error)}") from error


def make(api: "wandb.Api", place: Workspace, swept: Sequence[str], memory: Path) -> str:
    """Creates the workspace, or updates the one that `memory` remembers. Returns its address. Raises UserError.

    Args:
        memory: JSON file with the addresses of the pages created so far.
    """
    from wandb_workspaces import expr
    from wandb_workspaces.workspaces import RunsetSettings, WorkspaceSettings

    tables, figures = logged(api, place)
    workspace, addresses = _workspace(place, memory)
    workspace.sections = sections(_preset(api, place.entity), swept, tables, figures)
    workspace.settings = WorkspaceSettings(x_axis="finished", max_runs=MANY)
    workspace.runset_settings = RunsetSettings(
        filters=[expr.Metric("Group") == place.experiment] if place.experiment else [],
        pinned_columns=[f"summary:{column}" for column in COLUMNS])
    with asking():
        workspace.save()
    write_atomically(memory, json.dumps({**addresses, _key(place): workspace.url}, indent=1) + "\n")
    return workspace.url


def logged(api: "wandb.Api", place: Workspace) -> tuple[set[str], set[str]]:
    """The keys of the logged tables, and the keys of the logged figures and pages. Raises UserError if no run exists."""
    with asking():
        filters = {"group": place.experiment} if place.experiment else None
        try:
            summaries = [dict(run.summary) for run in api.runs(f"{place.entity}/{place.project}", filters, lazy=False)]
        except ValueError:  # the project does not exist
            summaries = []
    if not summaries:
        of = f" of the experiment {place.experiment}" if place.experiment else ""
        raise UserError(f"{place.entity}/{place.project}: no runs{of} in W&B; make runs with tracker=wandb, and upload "
                        "offline runs: wandb sync outputs/wandb/offline-run-*")
    kinds = [(key, value.get("_type")) for summary in summaries for key, value in summary.items() if hasattr(value, "get")]
    return {key for key, kind in kinds if kind == "table-file"}, {key for key, kind in kinds if kind in _MEDIA}


def _workspace(workspace: Workspace, memory: Path) -> "tuple[Page, dict[str, str]]":
    """(page, addresses): the page that was created before, or a new page; and all remembered addresses."""
    from wandb_workspaces.workspaces import Workspace as Page

    addresses = json.loads(memory.read_text()) if memory.is_file() else {}
    if _key(workspace) in addresses:
        try:
            with asking():
                return Page.from_url(addresses[_key(workspace)]), addresses
        except UserError as error:  # for example because it was deleted
            note(f"{addresses[_key(workspace)]} cannot be opened; creating a new page: {error}")
    return Page(entity=workspace.entity, project=workspace.project, name=workspace.title), addresses


def _preset(api: "wandb.Api", entity: str) -> str | None:
    """Id of the chart with intervals, which is created if necessary. Prints a note and returns None if W&B refuses it."""
    name = preset_name()
    try:
        return api.create_custom_chart(entity=entity, name=name, display_name="Shares with intervals", spec_type="vega2",
                                       access="private", spec=INTERVALS)
    except Exception as error:  # from a private module of W&B's client
        if getattr(getattr(error, "response", None), "http_status", None) == _CONFLICT or "exist" in str(error):
            return f"{entity}/{name}"
        note(f"the chart with intervals is left out because W&B refuses it: {type(error).__name__}: {_line(error)}")
        return None


def _key(workspace: Workspace) -> str:
    return f"{workspace.entity}/{workspace.project}/{workspace.experiment or ''}"


def _line(error: Exception) -> str:
    return reason_of(error, 200)


SWEPT = ("sampler.alpha", "blend.beta", "sampler.num_steps", "sampler.proposal_temperature", "sampler.temperature")
"""Configuration fields whose sweeps the page shows by default."""
COLUMNS = ("accuracy", "accuracy_low", "accuracy_high", "num_samples", "acceptance", "acceptance_low", "acceptance_high",
           "moved_rate", "mean_token_forwards", "mean_share_seconds")
"""Summary columns shown next to the runs' names."""
_DARK_TO_LIGHT = ("#440154", "#31688E", "#35B779", "#FDE725")  # from matplotlib's viridis; readable in greyscale
MANY = 100
"""Number of runs that a chart shows; W&B's default is ten."""

INTERVALS = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "title": "${string:title}",
    "data": {"name": "wandb"},
    "transform": [{"filter": "isValid(datum['${field:value}'])"},
                  {"calculate": "'n = ' + format(datum['${field:n}'], ',')", "as": "counted"}],
    "encoding": {
        "y": {"field": "${field:label}", "type": "nominal", "title": None, "axis": {"labelLimit": 300},
              "sort": {"field": "${field:value}", "op": "max", "order": "descending"}},
        "tooltip": [{"field": "${field:label}"}, *({"field": f"${{field:{name}}}", "format": ".1%"}
                                                    for name in ("value", "low", "high")), {"field": "${field:n}"}],
    },
    "layer": [
        {"mark": {"type": "bar", "color": "#9CC9E5", "height": {"band": 0.7}},
         "encoding": {"x": {"field": "${field:value}", "type": "quantitative", "stack": None, "title": "${string:axis}",
                            "axis": {"format": "~%"}, "scale": {"domain": [0, 1]}}}},
        {"mark": {"type": "rule", "color": "#222222", "strokeWidth": 2},
         "encoding": {"x": {"field": "${field:low}", "type": "quantitative"}, "x2": {"field": "${field:high}"}}},
        {"mark": {"type": "tick", "color": "#0072B2", "thickness": 3, "height": {"band": 0.7}},
         "encoding": {"x": {"field": "${field:value}", "type": "quantitative"}}},
        {"mark": {"type": "text", "align": "left", "dx": 6, "color": "#222222"},
         "encoding": {"x": {"datum": 1}, "text": {"field": "counted", "type": "nominal"}}},
    ],
}
"""Vega-Lite chart: one bar per run with its interval and number of samples. W&B's own bars cannot show a run's interval."""


def preset_name() -> str:
    """Name of the chart `INTERVALS` in W&B. It contains a hash of the chart, because W&B never changes an existing chart."""
    return f"dflash-intervals-{hashlib.sha256(json.dumps(INTERVALS).encode()).hexdigest()[:8]}"


def sections(chart: str | None, swept: Sequence[str], tables: Collection[str], figures: Collection[str]) -> "list[Section]":
    """The sections of the page from top to bottom.

    Args:
        chart: id of the chart with intervals; None leaves it out.
        swept: configuration fields; the first two are the axes of the map.
        tables: keys under which runs logged tables.
        figures: keys under which runs logged figures and pages.
    """
    from wandb_workspaces.workspaces import Section

    accuracy = [_bars("Accuracy", ["accuracy"], "share of correct samples"), _running()]
    named = {
        "Accuracy by condition": [_intervals(chart), *accuracy] if chart else accuracy,
        "Sweep": _sweep(swept),
        "Acceptance": _acceptance(),
        "Cost": _cost(),
        "Report": [*_media([key for key in figures if key == "report/page"]),
                   *_tables(sorted((key for key in tables if key.startswith("report/")),
                               key=lambda key: (key != "report/overall", key != "report/paired", key))),
                   *_media(sorted(key for key in figures if key.startswith("report/") and key != "report/page"))],
        "Samples": _tables([key for key in tables if key == "samples"]),
        "Probes": [*_tables(sorted(key for key in tables if key.startswith("tables/"))),
                   *_media(sorted(key for key in figures if key.startswith("figures/")))],
    }
    return [Section(name=name, panels=panels, is_open=True) for name, panels in named.items() if panels]


def _intervals(chart: str) -> "PanelTypes":
    import wandb_workspaces.reports.v2 as wr

    fields = {"label": "label", "value": "accuracy", "low": "accuracy_low", "high": "accuracy_high", "n": "num_samples"}
    return wr.CustomChart(query={"summary": {"keys": [*fields.values()]}}, chart_name=chart, chart_fields=fields,
                          chart_strings={"title": "Accuracy with 95 % intervals, and the number of samples",
                                         "axis": "share of correct samples"})


def _running() -> "PanelTypes":
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(title="Accuracy during a run", x="finished", y=["running/accuracy"], range_y=(0.0, 1.0),
                       title_x="samples", title_y="share of correct samples", max_runs_to_show=MANY)


def _sweep(swept: Sequence[str]) -> "list[PanelTypes]":
    import wandb_workspaces.reports.v2 as wr

    colours = [wr.GradientPoint(color=colour, offset=100.0 * n / (len(_DARK_TO_LIGHT) - 1))
               for n, colour in enumerate(_DARK_TO_LIGHT)]
    columns = [wr.ParallelCoordinatesPlotColumn(metric=wr.Config(name), display_name=name) for name in swept]
    columns.append(wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric("accuracy"), display_name="accuracy"))
    panels: list[PanelTypes] = [
        wr.ParallelCoordinatesPlot(title="Accuracy over swept settings", columns=columns, gradient=colours)]
    if len(swept) > 1:
        panels.insert(0, wr.ScatterPlot(title=f"Accuracy (colour) over {swept[0]} and {swept[1]}", x=wr.Config(swept[0]),
                                        y=wr.Config(swept[1]), z=wr.SummaryMetric("accuracy"), gradient=colours))
    return panels + [wr.ScatterPlot(title=f"Accuracy over {name}", x=wr.Config(name), y=wr.SummaryMetric("accuracy"))
                     for name in swept]


def _acceptance() -> "list[PanelTypes]":
    import wandb_workspaces.reports.v2 as wr

    return [_bars("Proposals: accepted, and accepted with a change", ["acceptance", "moved_rate"], "share of proposals"),
            wr.LinePlot(title="Acceptance during a run", x="finished", y=["sample/acceptance"], range_y=(0.0, 1.0),
                        title_x="samples", title_y="share of a sample's proposals", smoothing_type="average",
                        smoothing_factor=0.8, max_runs_to_show=MANY)]


def _cost() -> "list[PanelTypes]":
    import wandb_workspaces.reports.v2 as wr

    def against(cost: str, title: str) -> "PanelTypes":
        # The running maximum is the Pareto front: the best accuracy at this cost or less.
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(cost), y=wr.SummaryMetric("accuracy"), running_ymax=True)

    return [against("mean_token_forwards", "Accuracy against token-forwards per sample"),
            against("mean_share_seconds", "Accuracy against device seconds per sample"),
            _bars("Token-forwards of the whole run", ["token_forwards"], "tokens")]


def _bars(title: str, metrics: list[str], axis: str) -> "PanelTypes":
    import wandb_workspaces.reports.v2 as wr

    return wr.BarPlot(title=title, metrics=[*metrics], title_x=axis, max_runs_to_show=MANY, max_bars_to_show=MANY)


def _tables(keys: Sequence[str]) -> "list[PanelTypes]":
    import wandb_workspaces.reports.v2 as wr

    return [wr.WeavePanelSummaryTable(table_name=key) for key in keys]


def _media(keys: Sequence[str]) -> "list[PanelTypes]":
    import wandb_workspaces.reports.v2 as wr

    return [wr.MediaBrowser(title=key.rpartition("/")[2].replace("_", " "), media_keys=[key]) for key in keys]


def publish(built: "Built", place: Workspace, folder: Path) -> None:
    """Logs a written report to the report run of its experiment, and adds a new version of the report artifact.

    Args:
        folder: folder in which wandb/ is created.
    """
    import wandb

    name = f"report-{place.experiment}" if place.experiment else "report"
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    with wandb.init(entity=place.entity, project=place.project, id=artifact_name(name), name=name.replace("-", " "),
                    group=place.experiment, job_type="report", dir=folder, mode="online", resume="allow",
                    settings=wandb.Settings(silent=True, console="off"), reinit="finish_previous") as run:
        for drawn in (drawn for study in built.studies for drawn in study.runs):
            _use(run, f"{place.entity}/{place.project}/{artifact_name('records', drawn.experiment, drawn.digest)}:latest")
        shown: dict[str, wandb.Table | wandb.Image] = {f"report/{path.stem}": _table(path)
                                                       for path in sorted((built.folder / "tables").glob("*.csv"))}
        shown.update({f"report/{path.stem}": wandb.Image(str(path))
                      for path in sorted((built.folder / "figures").glob("*.png"))})
        run.log({**shown, "report/page": wandb.Html(built.page, inject=False)})
        artifact = wandb.Artifact(artifact_name(name), "report")
        artifact.add_dir(str(built.folder))
        run.log_artifact(artifact)


def _use(run: "wandb.Run", name: str) -> None:
    try:
        run.use_artifact(name)
    except Exception as error:  # the record artifact does not exist; the type depends on the version of W&B's client
        note(f"{name} is not in W&B ({type(error).__name__}), so the report's lineage lacks it; to upload it: wandb sync "
             "outputs/wandb/offline-run-*")


def _table(path: Path) -> "wandb.Table":
    """A CSV file as a W&B table; numbers as floats, empty cells as None."""
    import wandb

    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return wandb.Table(columns=[*header], data=[[_value(cell) for cell in row] for row in rows], allow_mixed_types=True)


def _value(cell: str) -> float | str | None:
    try:
        return float(cell)
    except ValueError:
        return cell or None


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    given = _parser().parse_args(arguments)
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise UserError("the page needs the package wandb-workspaces, which is not installed: pip install wandb-workspaces")
    api, place = connect(given.entity, given.project, given.experiment)
    if given.runs:
        from dflash_mcmc.report.build import build

        built = build(given.runs)
        experiments = {run.experiment for study in built.studies for run in study.runs}
        if given.experiment is None and len(experiments) == 1:
            place = place._replace(experiment=experiments.pop())
        with asking():
            publish(built, place, given.outputs)
    print(make(api, place, given.swept, given.outputs / "wandb" / "pages.json"))


def _parser() -> argparse.ArgumentParser:
    project = WandbTracker().project
    parser = program.OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run or an experiment, whose report is logged too")
    parser.add_argument("--experiment", metavar="NAME", help="only its runs; default: that of RUNS, else all of the project")
    parser.add_argument("--project", default=project, help=f"default: {project}, that of tracker=wandb")
    parser.add_argument("--entity", help="user or team; default: that of your account")
    parser.add_argument("--swept", nargs="+", default=list(SWEPT), metavar="FIELD",
                        help=f"fields of the configuration that were swept; default: {' '.join(SWEPT)}")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER", help="default: outputs")
    return parser


if __name__ == "__main__":
    main()
