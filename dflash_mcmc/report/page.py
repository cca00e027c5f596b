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
from typing import TYPE_CHECKING

from dflash_mcmc.errors import printable
from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import ReportPart, text_of

if TYPE_CHECKING:
    from dflash_mcmc.report.parts import Drawing

_TEMPLATE = Path(__file__).with_name("template")
_BOUND = re.compile(r"(?<=\d) (?=%)|(?<=,) (?=[^\[\]]*\])")
"""Spaces of a cell at which no line is broken: before a per cent sign, and inside an interval."""
_BREAKS = re.compile(r"(?<=[A-Za-z\]\}])[.=/](?=[A-Za-z#\[\{])")
"""Signs inside names, such as `dataset.max_new_tokens`, after which a line can be broken."""


def html(title: str, parts: Sequence[ReportPart], figures: Path) -> str:
    """The page as HTML, headed by what its first part says of the data. It loads nothing over a network.

    Its figures are SVG elements, which follow the page's colours.

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
        title=title, parts=parts, picture=picture,
        version=importlib.metadata.version("dflash_mcmc"), style=Markup(_file("page.css")), scripts=list(map(Markup, scripts)),
        hashes=Markup(" ".join(  # of the Content-Security-Policy
            f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)))


def markdown(title: str, parts: Sequence[ReportPart]) -> str:
    """The report's text and tables as Markdown, with links to the figure files."""
    lines = []
    for part in parts:
        lines += [f"# {_escaped(part.name or title)}", *map(_escaped, [*part.verdict, part.counts]),
                  *(f"> **Note:** {_escaped(warning)}" for warning in part.warnings)]
        for section in part.sections:
            lines += [f"## {_escaped(section.title)}", *map(_escaped, section.text)]
            lines += [f"![{_escaped(drawing.title)}](figures/{drawing.name}.png)" for drawing in section.drawings]
            for table in section.tables:
                lines += [f"**{_escaped(table.title)}**", text_of(table, _escaped)]
    return "\n\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    for sign in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(sign, "\\" + sign)
    return printable(text.replace("\n", " "))


def _file(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


_NAMES = {"#ffffff": "ground", "#000000": "ink", figure.INK: "ink", figure.RIGHT: "right", figure.WRONG: "wrong",
          figure.OTHER: "other", figure.GREEN: "green", figure.PURPLE: "purple", figure.ORANGE: "orange", figure.SKY: "sky",
          figure.GRID: "grid", figure.PALE: "pale"}
"""The variables `--fig-...` of `template/page.css` for the colours of figures. Other colours, as of heat maps, stay."""
_VARIABLES = {colour.lower(): f"var(--fig-{name})" for colour, name in _NAMES.items()}
_COLOUR = re.compile(r"(?<=[:\s\"])#[0-9a-fA-F]{6}(?=[;\"])")
_LEFT_OUT = re.compile(r'<!--.*?-->|<metadata>.*?</metadata>|<style type="text/css">.*?</style>', re.DOTALL)


def svg(text: str, name: str, title: str) -> str:
    """An SVG file of matplotlib as an element of an HTML page.

    Args:
        name: name of the figure, which is unique in the page: ids of different figures may be the same otherwise.
        title: alternative text.
    """
    start = text.index("<svg")
    body = _LEFT_OUT.sub("", text[start:])
    head, _, rest = body.partition(">")
    width, height = (4.0 / 3.0 * float(points) for points in re.findall(r" (?:width|height)=\"([\d.]+)pt\"", head))  # pixels
    box = re.findall(r"viewBox=\"([-\d. ]+)\"", head)[0]
    rest = re.sub(r"(\bid=\"|href=\"#|url\(#)", lambda match: f"{match[0]}{name}-", rest)
    rest = _COLOUR.sub(lambda match: _VARIABLES.get(match[0].lower(), match[0]), rest)
    return (f'<svg role="img" aria-label="{escaped_html(title)}" '
            f'viewBox="{box}" width="{width:.0f}" height="{height:.0f}">{rest}')
