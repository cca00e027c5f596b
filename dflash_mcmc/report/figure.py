"""The style and colours of all figures, shared drawing functions, and saving as PNG and SVG.

Figures are made without a display and without pyplot's global state.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mcmc.errors import writing
from dflash_mcmc.statistics.estimates import IntervalEstimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, WRONG, OTHER, INK = "#0072B2", "#D55E00", "#9A9A9A", "#333333"
"""Okabe and Ito's blue and vermilion, which colour-blind readers can distinguish, and two greys."""
GRID, PALE = "#E6E6E6", "#CFE3F1"
"""Lines behind the data, and a light blue."""
GREEN, PURPLE, ORANGE, SKY = "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""More of Okabe and Ito's colours."""
PALETTE = (RIGHT, WRONG, GREEN, PURPLE, ORANGE, SKY, INK)
"""Colours of lines or bars. Figures also vary markers or hatches, so that they can be read in greyscale."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LOOKS = [*zip(PALETTE, MARKERS, strict=True), ("#8C564B", "<"), ("#6F7F1F", ">"), ("#7A5195", "h")]
"""Colour and marker of at most ten lines of a figure."""

_STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6,
    "savefig.dpi": 160, "pdf.fonttype": 42, "svg.hashsalt": "dflash_mcmc",  # the same figure always gives the same file
}


@contextmanager
def style(math: bool = True) -> Iterator[None]:
    """A context that gives figures the common style. Figures must be made and saved inside it.

    Args:
        math: whether dollar signs begin formulas. Names of runs can have any characters.
    """
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "text.parse_math": math}):
        yield


def panels(size: tuple[float, float], down: int = 1, across: int = 1, **shared: Any) -> "tuple[Figure, list[Axes]]":
    """A figure of this size in inches, and its panels, line by line."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=size, layout="constrained")
    return drawn, list(drawn.subplots(down, across, squeeze=False, **shared).flat)


def legend_below(drawn: "Figure", columns: int) -> None:
    """A legend below all panels, which names each line once."""
    handles = {label: handle for axes in drawn.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles)))


def save(figure: "Figure", folder: Path, name: str, formats: Collection[str] = ()) -> set[Path]:
    """Writes `name.png`, `name.svg` and, if `formats` has it, `name.pdf`. Returns the files; raises UserError."""
    dates: dict[str, dict | None] = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    files = {folder / f"{name}.{form}": date for form, date in dates.items() if form != "pdf" or form in formats}
    with writing(folder / name):
        for file, metadata in files.items():
            figure.savefig(file, metadata=metadata)
    return set(files)


Panel = tuple[str, str, Sequence[IntervalEstimate], Sequence[str]]
"""Title, label of the x axis, estimates, and a text beside each."""


def estimates(labels: Sequence[str], *of: Panel, strong: Sequence[bool] = (),
              line: tuple[float, str] | None = None) -> "Figure":
    """A figure with a row per label, from the top: a point, its interval, and a text at the right edge, in per cent.

    An estimate without an interval is drawn as a point only. The row of an estimate without a value is empty.

    Args:
        strong: whether each point is filled.
        line: where a line stands in the first panel, and its style.
    """
    size = 3.0 + 3.2 * len(of) + 0.066 * max(map(len, labels), default=0), 1.3 + 0.3 * len(labels)
    drawn, axes_of = panels(size, 1, len(of), sharey=True)
    for axes, (title, across, values, texts) in zip(axes_of, of, strict=True):
        for row, (estimate, filled, text) in enumerate(zip(values, strong or [False] * len(labels), texts, strict=True)):
            axes.annotate(text, (1.0, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                          va="center", fontsize=8)
            if estimate.value is None:
                continue
            if estimate.interval is not None:
                axes.plot([100.0 * end for end in estimate.interval], [row, row], color=RIGHT, linewidth=2.2, alpha=0.55,
                          solid_capstyle="butt", zorder=2)
            axes.plot(100.0 * estimate.value, row, "D" if filled else "o", markersize=6.5, markeredgewidth=1.5, zorder=3,
                      markerfacecolor=WRONG if filled else "white", markeredgecolor=WRONG if filled else RIGHT)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(ylim=(len(labels) - 0.4, -0.6), title=title, xlabel=across)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    if line is not None:
        axes_of[0].axvline(line[0], color=INK, linewidth=0.8, linestyle=line[1], zorder=1)
    return drawn


def plain_ticks(axes: "Axes") -> None:
    """Ticks 1, 2 and 5 of each decade of a logarithmic x axis, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def bars_of(rows: Sequence[dict], column: str, scale: float = 1.0) -> list[list[float]]:
    """The distances from a column of table rows to the ends of its intervals, for `Axes.errorbar`; 0 without an interval."""
    return [[scale * abs(row[column] - end_of(row, column, end)) for row in rows] for end in ("low", "high")]


def end_of(row: dict, column: str, end: str) -> float:
    """The end `low` or `high` of the interval of a column, or the value if there is no interval."""
    return row[column] if row[f"{column}_{end}"] is None else row[f"{column}_{end}"]


def name_lines(figure: "Figure", axes: "Axes", lines: Sequence[tuple[str, float, float, str]]) -> None:
    """Names (text, x, y, colour) at the right edge, moved apart where they are close, each joined to the end of its line.

    Call it after the figure's layout is computed; the axis limits must not change afterwards.
    """
    gap = 11.0 / (axes.get_position().height * figure.get_size_inches()[1] * 72.0)  # 11 points, in shares of the axis
    lines = sorted(lines, key=lambda line: line[2])
    ends = axes.transData.transform([(x, max(y, axes.get_ylim()[0])) for _, x, y, _ in lines])
    heights = axes.transAxes.inverted().transform(ends)[:, 1]
    for place in range(1, len(heights)):
        heights[place] = max(heights[place], heights[place - 1] + gap)
    heights -= max(0.0, heights.max(initial=0.0) - 1.0)
    for place in reversed(range(len(heights) - 1)):
        heights[place] = min(heights[place], heights[place + 1] - gap)
    for (text, x, y, colour), height in zip(lines, heights, strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkB": 4, "relpos": (0, 0.5)}
        axes.annotate(text if len(text) <= 60 else f"{text[:57]}...", (x, y), (1.03, height), color=colour, fontsize=8,
                      va="center", textcoords="axes fraction", annotation_clip=False, arrowprops=line)
