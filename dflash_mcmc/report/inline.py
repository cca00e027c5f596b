"""Figures as elements of the page: SVG files of matplotlib whose colours are those of the page's scheme."""

from __future__ import annotations

import html
import re

from dflash_mcmc.report import figure

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
    width, height = (_PIXELS * float(found) for found in re.findall(r" (?:width|height)=\"([\d.]+)pt\"", head))
    box = re.findall(r"viewBox=\"([-\d. ]+)\"", head)[0]
    rest = re.sub(r"(\bid=\"|href=\"#|url\(#)", lambda found: f"{found[0]}{name}-", rest)
    rest = _COLOUR.sub(lambda found: _variable(found[0]), rest)
    return (f'<svg role="img" aria-label="{html.escape(title)}" '
            f'viewBox="{box}" width="{width:.0f}" height="{height:.0f}">{rest}')


def _variable(colour: str) -> str:
    name = _NAMES.get(colour.lower())
    return colour if name is None else f"var(--fig-{name})"
