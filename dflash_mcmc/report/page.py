"""The report as HTML and as Markdown, from the same sections.

The page is one self-contained file; its figures are SVG elements whose colours are those of the page's scheme. The Markdown
refers to the figure files.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
from collections.abc import Sequence
from html import escape as escaped_html
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import printable
from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import ReportPart, Section, text_of
from dflash_mcmc.report.study import Study

if TYPE_CHECKING:
    from dflash_mcmc.report.parts import Drawing

_TEMPLATE = Path(__file__).with_name("template")
_BOUND = re.compile(r"(?<=\d) (?=%)|(?<=,) (?=[^\[\]]*\])")
"""Spaces of a cell at which no line is broken: before a per cent sign, and inside an interval."""
_BREAKS = re.compile(r"(?<=[A-Za-z\]\}])[.=/](?=[A-Za-z#\[\{])")
"""Signs inside names, such as `dataset.max_new_tokens`, after which a line can be broken."""


class Heading(NamedTuple):
    """The head of a report."""

    title: str
    counts: str
    """A sentence on the size of the data."""
    warnings: Sequence[str]
    """Notes to read before the comparison."""
    verdict: Sequence[str] = ()
    """As of `ReportPart`; empty for several datasets."""


def heading_of(studies: Sequence[Study], verdict: Sequence[str], notes: Sequence[str] = ()) -> Heading:
    """The head of a report of samples. Notes on one of several datasets are in its part."""
    if len(studies) == 1:
        return Heading(title_of(studies), counts_of(studies[0]), [*notes, *studies[0].warnings], verdict)
    records = sum(len(run.records) for study in studies for run in study.runs)
    return Heading(title_of(studies), f"{records:,} samples of {len(studies)} datasets.", notes)


def html(heading: Heading, parts: Sequence[ReportPart], figures: Path) -> str:
    """The page as HTML. Its figures are SVG elements, which follow the page's colours. The page loads nothing over a network.

    No other script than the page's own can run, because the page's policy names them by their hashes.

    Args:
        figures: folder of the figure files.
    """
    from jinja2 import Environment
    from markupsafe import Markup, escape

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breaks"] = lambda text: Markup(_BREAKS.sub(r"\g<0><wbr>", str(escape(text))))
    environment.filters["bound"] = lambda cell: _BOUND.sub("\u00a0", cell)
    samples = any(section.samples for part in parts for section in part.sections)
    scripts = [_file("tables.js"), *([_file("samples.js")] if samples else [])]

    def picture(drawing: Drawing) -> Markup:
        return Markup(svg((figures / f"{drawing.name}.svg").read_text(encoding="utf-8"), drawing.name, drawing.title))

    return environment.from_string(_file("page.html.j2")).render(
        heading=heading, parts=parts, picture=picture,
        version=importlib.metadata.version("dflash_mcmc"), style=Markup(_file("page.css")), scripts=list(map(Markup, scripts)),
        hashes=Markup(" ".join(  # of the Content-Security-Policy
            f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)))


def markdown(heading: Heading, parts: Sequence[ReportPart]) -> str:
    """The report's text and tables as Markdown, with links to the figure files."""
    lines = [f"# {_escaped(heading.title)}", *map(_escaped, [*heading.verdict, heading.counts]), *map(_note, heading.warnings)]
    for part in parts:
        if part.name:
            lines += [f"# {_escaped(part.name)}", *map(_escaped, [*part.verdict, part.counts]), *map(_note, part.warnings)]
        for section in part.sections:
            lines += _lines(section)
    return "\n\n".join(lines) + "\n"


def _lines(section: Section) -> list[str]:
    lines = [f"## {_escaped(section.title)}", *map(_escaped, section.text)]
    lines += [f"![{_escaped(drawing.title)}](figures/{drawing.name}.png)" for drawing in section.drawings]
    for table in section.tables:
        lines += [f"**{_escaped(table.title)}**", text_of(table, _escaped)]
    return lines


def title_of(studies: Sequence[Study]) -> str:
    """The page title: experiments, number of runs and datasets."""
    runs = [run for study in studies for run in study.runs]
    experiments, datasets = (_few(names) for names in ([run.experiment for run in runs], [study.dataset for study in studies]))
    return f"{experiments}: {len(runs)} run{'s' * (len(runs) > 1)} on {datasets}"


def _few(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def counts_of(study: Study) -> str:
    """A sentence on the size of a study."""
    records = sum(len(run.records) for run in study.runs)
    problems = len({problem for run in study.runs for problem in run.problems})
    return f"{records:,} samples of {problems:,} problems; runs are compared with {study.baseline.label}."


def _note(warning: str) -> str:
    return f"> **Note:** {_escaped(warning)}"


def _escaped(text: str) -> str:
    for sign in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(sign, "\\" + sign)
    return printable(text.replace("\n", " "))


def _file(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


_VARIABLES = {"#ffffff": "ground", "#000000": "ink", figure.INK: "ink", figure.RIGHT: "right", figure.WRONG: "wrong",
              figure.OTHER: "other", figure.GREEN: "green", figure.PURPLE: "purple", figure.ORANGE: "orange",
              figure.SKY: "sky", figure.GRID: "grid", figure.PALE: "pale"}
"""The variables `--fig-...` of `template/page.css` for the colours of figures. Other colours, as of heat maps, stay."""
_NAMES = {colour.lower(): name for colour, name in _VARIABLES.items()}
_COLOUR = re.compile(r"(?<=[:\s\"])#[0-9a-fA-F]{6}(?=[;\"])")
_LEFT_OUT = re.compile(r'<!--.*?-->|<metadata>.*?</metadata>|<style type="text/css">.*?</style>', re.DOTALL)
_PIXELS = 4.0 / 3.0
"""Pixels of CSS in a point."""


def svg(text: str, name: str, title: str) -> str:
    """An SVG file of matplotlib as an element of an HTML page.

    Args:
        name: name of the figure, which is unique in the page: ids of different figures may be the same otherwise.
        title: alternative text.
    """
    start = text.index("<svg")
    body = _LEFT_OUT.sub("", text[start:])
    head, _, rest = body.partition(">")
    width, height = (_PIXELS * float(points) for points in re.findall(r" (?:width|height)=\"([\d.]+)pt\"", head))
    box = re.findall(r"viewBox=\"([-\d. ]+)\"", head)[0]
    rest = re.sub(r"(\bid=\"|href=\"#|url\(#)", lambda match: f"{match[0]}{name}-", rest)
    rest = _COLOUR.sub(lambda match: _variable(match[0]), rest)
    return (f'<svg role="img" aria-label="{escaped_html(title)}" '
            f'viewBox="{box}" width="{width:.0f}" height="{height:.0f}">{rest}')


def _variable(colour: str) -> str:
    name = _NAMES.get(colour.lower())
    return colour if name is None else f"var(--fig-{name})"
