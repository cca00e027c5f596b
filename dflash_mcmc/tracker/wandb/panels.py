"""The panels of the W&B page: the charts and the values that they compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import PanelTypes
    from wandb_workspaces.workspaces import Section

SWEPT = ("sampler.alpha", "blend.beta", "sampler.num_steps", "sampler.proposal_temperature")
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


def sections(chart: str | None, swept: Sequence[str], tables: Collection[str], figures: Collection[str]) -> list[Section]:
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
                   *_tables(sorted((key for key in tables if key.startswith("report/")), key=_by_weight)),
                   *_media(sorted(key for key in figures if key.startswith("report/") and key != "report/page"))],
        "Samples": _tables([key for key in tables if key == "samples"]),
        "Probes": [*_tables(sorted(key for key in tables if key.startswith("tables/"))),
                   *_media(sorted(key for key in figures if key.startswith("figures/")))],
    }
    return [Section(name=name, panels=panels, is_open=True) for name, panels in named.items() if panels]


def _intervals(chart: str) -> PanelTypes:
    import wandb_workspaces.reports.v2 as wr

    fields = {"label": "label", "value": "accuracy", "low": "accuracy_low", "high": "accuracy_high", "n": "num_samples"}
    return wr.CustomChart(query={"summary": {"keys": [*fields.values()]}}, chart_name=chart, chart_fields=fields,
                          chart_strings={"title": "Accuracy with 95 % intervals, and the number of samples",
                                         "axis": "share of correct samples"})


def _running() -> PanelTypes:
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(title="Accuracy during a run", x="finished", y=["running/accuracy"], range_y=(0.0, 1.0),
                       title_x="samples", title_y="share of correct samples", max_runs_to_show=MANY)


def _sweep(swept: Sequence[str]) -> list[PanelTypes]:
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


def _acceptance() -> list[PanelTypes]:
    import wandb_workspaces.reports.v2 as wr

    return [_bars("Proposals: accepted, and accepted with a change", ["acceptance", "moved_rate"], "share of proposals"),
            wr.LinePlot(title="Acceptance during a run", x="finished", y=["sample/acceptance"], range_y=(0.0, 1.0),
                        title_x="samples", title_y="share of a sample's proposals", smoothing_type="average",
                        smoothing_factor=0.8, max_runs_to_show=MANY)]


def _cost() -> list[PanelTypes]:
    import wandb_workspaces.reports.v2 as wr

    def against(cost: str, title: str) -> PanelTypes:
        # The running maximum is the Pareto front: the best accuracy at this cost or less.
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(cost), y=wr.SummaryMetric("accuracy"), running_ymax=True)

    return [against("mean_token_forwards", "Accuracy against token-forwards per sample"),
            against("mean_share_seconds", "Accuracy against device seconds per sample"),
            _bars("Token-forwards of the whole run", ["token_forwards"], "tokens")]


def _bars(title: str, metrics: list[str], axis: str) -> PanelTypes:
    import wandb_workspaces.reports.v2 as wr

    return wr.BarPlot(title=title, metrics=[*metrics], title_x=axis, max_runs_to_show=MANY, max_bars_to_show=MANY)


def _tables(keys: Sequence[str]) -> list[PanelTypes]:
    import wandb_workspaces.reports.v2 as wr

    return [wr.WeavePanelSummaryTable(table_name=key) for key in keys]


def _by_weight(key: str) -> tuple[bool, bool, str]:
    return key != "report/overall", key != "report/paired", key


def _media(keys: Sequence[str]) -> list[PanelTypes]:
    import wandb_workspaces.reports.v2 as wr

    return [wr.MediaBrowser(title=key.rpartition("/")[2].replace("_", " "), media_keys=[key]) for key in keys]
